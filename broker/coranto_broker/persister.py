"""The persister: takes completed fragments from local files to the journal's fragment store.

The broker that drove a journal's appends stores its fragments at once. Other replicas hold back for some minutes, by
which time the primary has normally done it, and then only look whether the fragment is there. What fails is tried
again, ever more slowly, until it succeeds or the journal is gone. Local files are the queue: what has not been stored
when the broker ends is found again by the next one.

Only what is part of the journal for good is stored (see `in_sync`). While that is open, a fragment waits; when it turns
out that others went on without it, its files are set aside.

A fragment whose predecessor here waits, or was refused by its store, waits for that one: readers take a journal whose
first stored fragment begins later for one whose beginning was removed.

New fragments go to the first store of the journal's spec, as of the time of the attempt. While the broker shuts down,
a store that denies access is passed over for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import structlog

from coranto.codecs import Compressor
from coranto.effects import Clock
from coranto.errors import CorantoError, StoreDenied
from coranto.fragments import Fragment
from coranto.postfix import PostfixTemplate
from coranto.stores import FragmentStore, StoreRegistry
from coranto.wire import protocol_pb2 as pb
from coranto_broker.in_sync import Judgement
from coranto_broker.metrics import Metrics
from coranto_broker.spool_files import Sealed

REPLICA_DELAY_SECONDS = 150.0
MAX_PARALLEL = 8
ATTEMPT_SECONDS = 300.0
_PIECE_BYTES = 1 << 20
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
_LATER_SECONDS = 60.0
_TURN_SECONDS = 5.0
_OPEN_SECONDS = 3.0
"""How long the end waits for fragments of which it is open whether they may be stored: their primary may be ending too,
and store them. If it does not, it goes on with its own."""
_log = structlog.get_logger(__name__)

OnStored = Callable[[Sealed, Fragment], None]
Judge = Callable[[Sealed], Awaitable[Judgement]]


class _Undecided(Exception):
    """Whether the fragment is part of the journal is open."""


class _Diverged(Exception):
    """The fragment is not part of the journal."""


@dataclass(slots=True, eq=False)
class _Job:
    sealed: Sealed
    on_stored: OnStored
    on_diverged: Callable[[Sealed], None]
    delay: float
    waits: int = 0
    failures: int = 0
    unreadable: bool = False
    """Whether it was the local file that failed."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


class FragmentPersister:
    """Stores fragments in the background. `close` it when no more come."""

    def __init__(
        self,
        spec_of: Callable[[str, int], pb.JournalSpec | None],
        stores: StoreRegistry,
        clock: Clock,
        metrics: Metrics,
        *,
        max_parallel: int = MAX_PARALLEL,
        judge: Judge | None = None,
    ) -> None:
        """`spec_of` gives the present spec of a journal with that create revision, None when it was deleted.

        `judge` says whether a fragment is part of its journal; without it, all are.
        """
        self._spec_of = spec_of
        self._stores = stores
        self._clock = clock
        self._metrics = metrics
        self._judge = judge
        self._parallel = asyncio.Semaphore(max_parallel)
        self._draining = False
        self._tasks: dict[asyncio.Task[None], _Job] = {}
        self._of_journal: dict[str, dict[asyncio.Task[None], _Job]] = {}

    @property
    def pending(self) -> int:
        """Fragments that are not stored yet."""
        return len(self._tasks)

    def add(
        self,
        sealed: Sealed,
        on_stored: OnStored,
        *,
        primary: bool,
        on_diverged: Callable[[Sealed], None] = lambda sealed: None,
    ) -> None:
        """Store this fragment; `on_stored` is called with it as it is in the store.

        `on_diverged` is called instead when it has turned out not to be part of the journal.
        """
        job = _Job(sealed, on_stored, on_diverged, 0.0 if primary else REPLICA_DELAY_SECONDS)
        task = asyncio.create_task(self._work(job), name=f"persist {sealed.fragment.content_path}")
        self._tasks[task] = self._of_journal.setdefault(sealed.fragment.journal, {})[task] = job
        task.add_done_callback(self._done)

    async def release(self, journal: str, create_revision: int) -> None:
        """Leave the fragments of the journal of that create revision alone: somebody else takes up their files."""
        jobs = self._of_journal.get(journal, {})
        found = [task for task, job in jobs.items() if job.sealed.create_revision == create_revision]
        for task in found:
            task.cancel()
        await asyncio.gather(*found, return_exceptions=True)

    def hurry(self, journal: str) -> None:
        """Try what is waiting of this journal now."""
        for job in self._of_journal.get(journal, {}).values():
            job.hurry.set()

    async def close(self, timeout: float) -> int:
        """Try everything that is left once more without delay, for at most `timeout` seconds.

        Returns how many fragments remain only in local files.
        """
        self._draining = True
        for job in self._tasks.values():
            job.hurry.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=min(timeout, _OPEN_SECONDS))
        decided = {task for task, job in self._tasks.items() if not self._is_open(job)}
        if decided and timeout > _OPEN_SECONDS:
            await asyncio.wait(decided, timeout=timeout - _OPEN_SECONDS)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return len(left)

    async def _work(self, job: _Job) -> None:
        sealed = job.sealed
        while not sealed.content.discarded:
            await self._pause(job)
            await self._turn(job)
            try:
                spec = self._spec_of(sealed.fragment.journal, sealed.create_revision)
                if spec is None:
                    _log.info("a fragment of a deleted journal is not stored", fragment=sealed.fragment.content_path)
                    return  # It is set aside with its folder.
                if not spec.fragment.stores:
                    return  # Nothing to do: it is served from its local file.
                async with self._parallel, asyncio.timeout(ATTEMPT_SECONDS):
                    stored = await self._attempt(sealed, spec)
            except _Undecided:
                # Asked again before long at first: most wait for nothing but the next pipeline.
                if not job.waits and not sealed.settled:
                    sealed.watermark.when(sealed.fragment.end, job.hurry.set)
                job.delay = _BACKOFF_SECONDS[job.waits] if job.waits < len(_BACKOFF_SECONDS) else _LATER_SECONDS
                job.waits += 1
                continue
            except _Diverged:
                sealed.set_aside()
                job.on_diverged(sealed)
                _log.error(
                    "fragment was set aside: others went on without it",
                    fragment=sealed.fragment.content_path,
                    folder=str(sealed.content.path.parent / "set-aside"),
                )
                return
            except (CorantoError, OSError) as error:
                self._metrics.persist_failures.inc()
                job.delay = _BACKOFF_SECONDS[job.failures] if job.failures < len(_BACKOFF_SECONDS) else _LATER_SECONDS
                job.failures += 1
                job.unreadable = isinstance(error, OSError)
                _log.warning(
                    "fragment could not be stored; trying again",
                    fragment=sealed.fragment.content_path,
                    error=str(error) or type(error).__name__,
                    seconds=job.delay,
                )
                continue
            job.on_stored(sealed, stored)
            return

    def _done(self, task: asyncio.Task[None]) -> None:
        job = self._tasks.pop(task)
        journal = job.sealed.fragment.journal
        others = self._of_journal[journal]
        del others[task]
        if not others:
            del self._of_journal[journal]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("fragment is not going to be stored", fragment=job.sealed.fragment.content_path, exc_info=error)

    async def _pause(self, job: _Job) -> None:
        """Wait until the next attempt is due, or wanted now. While draining, failures are repeated every second."""
        if job.delay <= 0:
            return
        if self._draining and (job.failures or job.waits):
            await self._clock.sleep(min(job.delay, 1.0))
            return
        try:
            async with asyncio.timeout(job.delay):
                await job.hurry.wait()
        except TimeoutError:
            return
        job.hurry.clear()

    def _is_open(self, job: _Job) -> bool:
        """Whether it is not known if the fragment may be stored, as it is not when that of an earlier one is not."""
        others = self._of_journal[job.sealed.fragment.journal].values()
        begin = job.sealed.fragment.begin
        return any(other.waits and not other.failures and other.sealed.fragment.begin <= begin for other in others)

    async def _turn(self, job: _Job) -> None:
        """Return once no earlier fragment of the journal waits, but for those that cannot be read here."""
        others = self._of_journal[job.sealed.fragment.journal]
        for other in others.values():
            if other.waits and _goes_before(other, job):
                other.hurry.set()  # What has followed it since may have decided.
        while before := [task for task, other in others.items() if _goes_before(other, job)]:
            await asyncio.wait(before, timeout=_TURN_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _attempt(self, sealed: Sealed, spec: pb.JournalSpec) -> Fragment:
        postfix = ""
        if spec.fragment.path_postfix_template:
            template = PostfixTemplate(spec.fragment.path_postfix_template)
            postfix = template.render(sealed.fragment, sealed.first_append_time, sealed.registers, spec)
        fragment = replace(sealed.fragment, path_postfix=postfix)
        urls = list(spec.fragment.stores)
        for url in urls:
            store = self._stores.get(url)
            try:
                if not await store.exists(fragment):
                    await self._check(sealed)
                    await self._put(store, fragment, sealed)
            except StoreDenied:
                if not self._draining or url == urls[-1]:
                    raise
                continue
            self._metrics.persisted.inc()
            self._metrics.persisted_bytes.inc(fragment.length)
            return replace(fragment, backing_store=url, mod_time=int(self._clock.now()))
        raise AssertionError("a journal with stores has a first one")

    async def _check(self, sealed: Sealed) -> None:
        match await self._judge(sealed) if self._judge is not None else Judgement.FINAL:
            case Judgement.OPEN:
                raise _Undecided
            case Judgement.DIVERGED:
                raise _Diverged

    async def _put(self, store: FragmentStore, fragment: Fragment, sealed: Sealed) -> None:
        with sealed.content.borrow():
            if fragment.length <= _PIECE_BYTES:
                data = await asyncio.to_thread(_compress_whole, sealed)
                await store.put(fragment, data)
            else:
                await store.put(fragment, _compressed(sealed))
        _log.debug("stored", fragment=fragment.content_path, store=store.url)


def _goes_before(other: _Job, job: _Job) -> bool:
    """Of fragments of the same journal."""
    one, two = other.sealed, job.sealed
    earlier = one.create_revision == two.create_revision and one.fragment.begin < two.fragment.begin
    return earlier and bool(other.waits or other.failures) and not other.unreadable


def _compress_whole(sealed: Sealed) -> bytes:
    compressor = Compressor(sealed.fragment.codec)
    head = compressor.write(_read(sealed, 0, sealed.fragment.length))
    return head + compressor.finish()


async def _compressed(sealed: Sealed) -> AsyncIterator[bytes]:
    """The fragment's file, piece by piece; reading and compressing go on in threads."""
    compressor = Compressor(sealed.fragment.codec)
    for position in range(0, sealed.fragment.length, _PIECE_BYTES):
        data = await asyncio.to_thread(_compress_piece, compressor, sealed, position)
        if data:
            yield data
    if data := await asyncio.to_thread(compressor.finish):
        yield data


def _compress_piece(compressor: Compressor, sealed: Sealed, position: int) -> bytes:
    return compressor.write(_read(sealed, position, min(_PIECE_BYTES, sealed.fragment.length - position)))


def _read(sealed: Sealed, position: int, length: int) -> bytes:
    data = sealed.content.read_at(position, length)
    if len(data) != length:
        raise OSError(f"{sealed.content.path} ends at {position + len(data)}, before its fragment does")
    return data
