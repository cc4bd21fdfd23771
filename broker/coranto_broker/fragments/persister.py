"""The persister: stores completed fragments from local files in the journal's fragment store.

The broker that drove a journal's appends stores its fragments immediately. Other replicas wait some minutes. Normally,
the primary has then stored the fragment, and they only check that the store has it. A failed attempt is retried with
backoff, until it succeeds or the journal is deleted. Local files are the queue: after a restart, a broker finds the
fragments that it had not stored.

Only fragments that are permanently part of the journal are stored (see `in_sync`). While that is undecided, a fragment
waits. If other brokers have continued without it, its files are set aside.

A fragment waits while an earlier one on this broker waits or is refused by its store. Otherwise readers would see a
journal whose first stored fragment begins later, and conclude that its beginning was removed.

New fragments go to the first store of the journal's spec at the time of the attempt. While the broker shuts down, it
tries the next store if one denies access.

Content is hashed as it is read and compressed, and no store gives it the fragment's name before its SHA-1 matches. If
it does not match, or the file cannot be read, the disk has damaged it. Damaged content is set aside immediately, so
that it is not read any more, and is fetched from another broker of the journal (see `copies`). If none has it, the
fragment waits and counts as not stored until another broker stores its copy. A file in the store under the fragment's
name counts only if its length is plausible; otherwise it is replaced.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import structlog

from coranto.effects import Clock
from coranto.errors import CorantoError, StoreDenied
from coranto.fragments.codecs import Compressor, can_hold
from coranto.fragments.fragment import Fragment
from coranto.fragments.postfix import PostfixTemplate
from coranto.fragments.stores import FragmentStore, StoreRegistry
from coranto.tracing import Tracer, TraceSpan
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.backlog import Backlog
from coranto_broker.fragments.copies import Copies, restore
from coranto_broker.fragments.journal_folders import JournalFolders
from coranto_broker.metrics import Metrics
from coranto_broker.spool.durable_spool import Sealed
from coranto_broker.spool.in_sync import Judgement

REPLICA_DELAY_SECONDS = 150.0
MAX_PARALLEL = 8
ATTEMPT_SECONDS = 300.0
_PIECE_BYTES = 1 << 20
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
_LATER_SECONDS = 60.0
_HELD_SECONDS = 10.0
"""The maximum pause between attempts while the backlog holds appends back."""
_TURN_SECONDS = 5.0
_OPEN_SECONDS = 3.0
"""The time that `close` waits for undecided fragments. If their primary is exiting too, it may store them. If not, it
continues with its own copies."""
_RECOVERY_SECONDS = 2 * REPLICA_DELAY_SECONDS
"""The time that fragments wait for an earlier damaged one. Replicas with good copies store it within this time."""
_log = structlog.get_logger(__name__)

OnStored = Callable[[Sealed, Fragment], None]
Judge = Callable[[Sealed], Awaitable[Judgement]]


class _Undecided(Exception):
    """It is undecided whether the fragment is part of the journal."""


class _Diverged(Exception):
    """The fragment is not part of the journal."""


class _Damaged(Exception):
    """The local file does not hold the fragment's content."""


@dataclass(slots=True, eq=False)
class _Job:
    sealed: Sealed
    on_stored: OnStored
    on_diverged: Callable[[Sealed], None]
    delay: float
    waits: int = 0
    failures: int = 0
    unreadable: bool = False
    """True if the local file failed, so that later fragments do not wait for this one any more."""
    damaged_at: float | None = None
    """Monotonic time when the local content was found to be damaged; None if it is not damaged now."""
    damages: int = 0
    """The number of times that it was damaged: more than one if the disk damages restored files again."""
    store: str = ""
    """The URL of the store that was tried last."""
    counted: bool = False
    """True if it is part of the backlog."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class FragmentPersister:
    """Stores fragments in the background. `close` it once no more are added."""

    def __init__(
        self,
        spec_of: Callable[[str, int], pb.JournalSpec | None],
        stores: StoreRegistry,
        clock: Clock,
        metrics: Metrics,
        *,
        max_parallel: int = MAX_PARALLEL,
        judge: Judge | None = None,
        folders: JournalFolders | None = None,
        copies: Copies | None = None,
        backlog: Backlog | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`spec_of` returns the current spec of a journal with that create revision, or None if it was deleted.

        `judge` decides whether a fragment is part of its journal; without it, all are. `folders` knows the owners of
        folders in stores; without it, there are no other journals. `copies` gives access to other brokers' copies.
        `backlog` counts unstored content.
        """
        self._spec_of = spec_of
        self._stores = stores
        self._clock = clock
        self._metrics = metrics
        self._judge = judge
        self._folders = folders or JournalFolders(stores)
        self._copies = copies
        self._backlog = backlog if backlog is not None else Backlog(clock)
        self._tracer = tracer
        self._parallel = asyncio.Semaphore(max_parallel)
        self._draining = False
        self._tasks: dict[asyncio.Task[None], _Job] = {}
        self._of_journal: dict[str, dict[asyncio.Task[None], _Job]] = {}

    @property
    def pending(self) -> int:
        """The number of fragments that are not known to be stored. Replicas check the store only after their delay."""
        return sum(not job.sealed.content.discarded for job in self._tasks.values())

    @property
    def oldest(self) -> float:
        """Wall time of the first append to the oldest content that this broker must store; infinite if none."""
        return min(
            (job.sealed.first_append_time or math.inf for job in self._tasks.values() if job.counted), default=math.inf
        )

    @property
    def damaged(self) -> int:
        """The number of fragments with damaged local content that have been neither stored nor restored yet."""
        return sum(job.damaged_at is not None for job in self._tasks.values())

    def add(
        self,
        sealed: Sealed,
        on_stored: OnStored,
        *,
        primary: bool,
        on_diverged: Callable[[Sealed], None] = lambda sealed: None,
    ) -> None:
        """Store this fragment in the background. `on_stored` is called with the fragment as it is in the store.

        `on_diverged` is called instead if the fragment turns out not to be part of the journal.
        """
        job = _Job(sealed, on_stored, on_diverged, 0.0 if primary else REPLICA_DELAY_SECONDS)
        task = asyncio.create_task(self._work(job), name=f"persist {sealed.fragment.content_path}")
        self._tasks[task] = self._of_journal.setdefault(sealed.fragment.journal, {})[task] = job
        task.add_done_callback(self._done)
        if primary:
            self._count(job)

    async def release(self, journal: str, create_revision: int) -> None:
        """Stop storing the fragments of the journal with that create revision. The caller then owns their files."""
        jobs = self._of_journal.get(journal, {})
        found = [task for task, job in jobs.items() if job.sealed.create_revision == create_revision]
        for task in found:
            task.cancel()
        await asyncio.gather(*found, return_exceptions=True)

    def wake(self, journal: str) -> None:
        """Try the waiting fragments of this journal now."""
        for job in self._of_journal.get(journal, {}).values():
            self._count(job)
            job.wake.set()

    async def close(self, timeout: float) -> int:
        """Try all remaining fragments without delay, for at most `timeout` seconds.

        Returns the number of fragments that remain only in local files.
        """
        self._draining = True
        for job in self._tasks.values():
            job.wake.set()
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
        while True:
            await self._pause(job)
            await self._turn(job)
            if sealed.content.discarded:  # The fragment was stored during the wait, and perhaps removed by retention.
                return
            try:
                spec = self._spec_of(sealed.fragment.journal, sealed.create_revision)
                if spec is None:
                    _log.info("fragment.journal_deleted", fragment=sealed.fragment.content_path)
                    return  # Its files are set aside with the folder.
                if not spec.fragment.stores:
                    return  # Nothing to do: it is served from its local file.
                async with self._parallel, asyncio.timeout(ATTEMPT_SECONDS):
                    stored = await self._attempt(job, spec)
            except _Undecided:
                # Retry soon at first: most fragments wait only for the next pipeline.
                if not job.waits and not sealed.settled:
                    sealed.watermark.call_when_reached(sealed.fragment.end, job.wake.set)
                job.delay = _BACKOFF_SECONDS[job.waits] if job.waits < len(_BACKOFF_SECONDS) else _LATER_SECONDS
                job.waits += 1
                continue
            except _Diverged:
                sealed.set_aside()
                job.on_diverged(sealed)
                _log.error(
                    "fragment.set_aside",
                    fragment=sealed.fragment.content_path,
                    folder=str(sealed.content.path.parent / "set-aside"),
                )
                return
            except _Damaged as error:
                self._found_damaged(job, error)
                continue
            except (CorantoError, OSError) as error:
                job.unreadable = isinstance(error, OSError) and not isinstance(error, TimeoutError)
                self._failed(job)
                if not job.unreadable:
                    self._refused(job, str(error) or f"it took more than {ATTEMPT_SECONDS:.0f} seconds")
                _log.warning(
                    "fragment.storing_failed",
                    fragment=sealed.fragment.content_path,
                    error=str(error) or type(error).__name__,
                    seconds=job.delay,
                )
                continue
            self._backlog.stored(sealed.fragment.journal)
            job.on_stored(sealed, stored)
            return

    def _failed(self, job: _Job) -> None:
        self._metrics.persist_failures.inc()
        job.delay = _BACKOFF_SECONDS[job.failures] if job.failures < len(_BACKOFF_SECONDS) else _LATER_SECONDS
        job.failures += 1

    def _refused(self, job: _Job, reason: str) -> None:
        """Record a failure of the store, not of the local disk. If the journal is held back, retry sooner."""
        journal = job.sealed.fragment.journal
        self._count(job)
        self._backlog.failed(journal, job.store, job.failures, reason)
        if self._backlog.holds(journal):
            job.delay = min(job.delay, _HELD_SECONDS)

    def _count(self, job: _Job) -> None:
        """Add the fragment to the backlog: this broker must store it, as primary or because the primary has not."""
        if not job.counted:
            job.counted = True
            self._backlog.add(job.sealed.fragment.journal, job.sealed.fragment.length)

    def _discount(self, job: _Job) -> None:
        """Remove the fragment from the backlog: it is stored, or cannot be stored."""
        if job.counted:
            job.counted = False
            self._backlog.remove(job.sealed.fragment.journal, job.sealed.fragment.length)

    def _found_damaged(self, job: _Job, error: _Damaged) -> None:
        """Set damaged content aside, and look for a good copy: immediately, and then with growing pauses."""
        sealed, now = job.sealed, self._clock.monotonic()
        path = sealed.fragment.content_path
        self._failed(job)
        job.damaged_at = now if job.damaged_at is None else job.damaged_at
        if sealed.content.is_quarantined:
            if self._copies is None or self._draining or now - job.damaged_at >= _RECOVERY_SECONDS:
                job.unreadable = True
                self._discount(job)  # Otherwise appends would wait for it.
            _log.error("fragment.copy_not_found", fragment=path, seconds=job.delay)
            return
        self._metrics.damaged.inc()
        job.damages += 1
        if job.damages == 1:
            job.delay = 0.0
        folder = str(sealed.content.path.parent / "set-aside")
        try:
            sealed.quarantine_content()
        except OSError as failure:
            folder = f"it stays where it was: {failure}"
        _log.error("fragment.damaged", fragment=path, error=str(error), set_aside=folder)

    def _done(self, task: asyncio.Task[None]) -> None:
        job = self._tasks.pop(task)
        journal = job.sealed.fragment.journal
        others = self._of_journal[journal]
        del others[task]
        if not others:
            del self._of_journal[journal]
        self._discount(job)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("fragment.given_up", fragment=job.sealed.fragment.content_path, exc_info=error)

    async def _pause(self, job: _Job) -> None:
        """Wait until the next attempt is due, or `wake` is set. While draining, retry at least every second."""
        if job.delay <= 0:
            return
        if self._draining and (job.failures or job.waits):
            await self._clock.sleep(min(job.delay, 1.0))
            return
        try:
            async with asyncio.timeout(job.delay):
                await job.wake.wait()
        except TimeoutError:
            return
        job.wake.clear()

    def _is_open(self, job: _Job) -> bool:
        """Return True if it is undecided whether this fragment, or an earlier one of the journal, may be stored."""
        others = self._of_journal[job.sealed.fragment.journal].values()
        begin = job.sealed.fragment.begin
        return any(other.waits and not other.failures and other.sealed.fragment.begin <= begin for other in others)

    async def _turn(self, job: _Job) -> None:
        """Wait until no earlier fragment of the journal waits, except for those that cannot be read here."""
        others = self._of_journal[job.sealed.fragment.journal]
        for other in others.values():
            if other.waits and _is_stored_before(other, job):
                other.wake.set()  # Later commits may have decided whether it may be stored.
        while before := [task for task, other in others.items() if _is_stored_before(other, job)]:
            await asyncio.wait(before, timeout=_TURN_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _attempt(self, job: _Job, spec: pb.JournalSpec) -> Fragment:
        sealed, postfix, job.store = job.sealed, "", spec.fragment.stores[0]
        if spec.fragment.path_postfix_template:
            template = PostfixTemplate(spec.fragment.path_postfix_template)
            postfix = template.render(sealed.fragment, sealed.first_append_time, sealed.registers, spec)
        journal = sealed.fragment.journal
        urls = list(spec.fragment.stores)
        for url in urls:
            job.store = url
            store = self._stores.get(url)
            fragment = replace(sealed.fragment, path_postfix=self._folders.own_postfix(journal, url, postfix))
            try:
                if not await self._has(store, fragment):
                    await self._check(sealed)
                    await self._folders.mark(journal, url)
                    if sealed.content.is_quarantined:
                        await self._restore_content(job)
                    await self._put(store, fragment, sealed)
            except StoreDenied:
                if not self._draining or url == urls[-1]:
                    raise
                continue
            self._metrics.persisted.inc()
            self._metrics.persisted_bytes.inc(fragment.length)
            return replace(fragment, backing_store=url, mod_time=int(self._clock.now()))
        raise AssertionError("a journal with stores has a first one")

    @staticmethod
    async def _has(store: FragmentStore, fragment: Fragment) -> bool:
        """Return True if the store has a file of the fragment's name and a plausible length. Content is not read."""
        size = await store.size(fragment)
        if size is None or can_hold(fragment.codec, size, fragment.length):
            return size is not None
        _log.error(
            "fragment.wrong_in_store",
            fragment=fragment.content_path,
            store=store.url,
            file_bytes=size,
            content_bytes=fragment.length,
        )
        return False

    async def _restore_content(self, job: _Job) -> None:
        """Replace damaged content by a good copy. Raises _Damaged if no broker has one."""
        source = await restore(job.sealed, self._copies) if self._copies is not None else ""
        if not source:
            raise _Damaged("no other broker of the journal has a good copy")
        job.damaged_at = None
        self._count(job)
        self._metrics.restored.inc()
        _log.warning("fragment.mended", fragment=job.sealed.fragment.content_path, source=source)

    async def _check(self, sealed: Sealed) -> None:
        match await self._judge(sealed) if self._judge is not None else Judgement.FINAL:
            case Judgement.OPEN:
                raise _Undecided
            case Judgement.DIVERGED:
                raise _Diverged

    async def _put(self, store: FragmentStore, fragment: Fragment, sealed: Sealed) -> None:
        with sealed.content.borrow(), self._span(fragment) or nullcontext():
            if fragment.length <= _PIECE_BYTES:
                data = await asyncio.to_thread(_Reading(sealed).all)
                await store.put(fragment, data)
            else:
                await store.put(fragment, _Reading(sealed).pieces())
        _log.debug("fragment.stored", fragment=fragment.content_path, store=store.url)

    def _span(self, fragment: Fragment) -> TraceSpan | None:
        """Begin the span of storing a fragment: its own trace, since many appends wrote it."""
        if self._tracer is None:
            return None
        begin, end = fragment.begin, fragment.end
        return self._tracer.span("persist", fragment.journal, is_root=True, begin=begin, end=end, bytes=end - begin)


def _is_stored_before(other: _Job, job: _Job) -> bool:
    """Return True if `job` must wait for `other`, a fragment of the same journal."""
    one, two = other.sealed, job.sealed
    earlier = one.create_revision == two.create_revision and one.fragment.begin < two.fragment.begin
    return earlier and bool(other.waits or other.failures) and not other.unreadable


class _Reading:
    """The compressed content of a fragment. Raises _Damaged before its end if the content is not the fragment's."""

    def __init__(self, sealed: Sealed) -> None:
        self._sealed = sealed
        self._compressor = Compressor(sealed.fragment.codec)
        self._sum = hashlib.sha1(usedforsecurity=False)

    def all(self) -> bytes:
        """Return all compressed content."""
        return self._piece(0, self._sealed.fragment.length) + self._finish()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the compressed content in pieces, which are read, hashed and compressed in threads."""
        length = self._sealed.fragment.length
        for position in range(0, length, _PIECE_BYTES):
            if data := await asyncio.to_thread(self._piece, position, min(_PIECE_BYTES, length - position)):
                yield data
        if data := await asyncio.to_thread(self._finish):
            yield data

    def _piece(self, position: int, length: int) -> bytes:
        path = self._sealed.content.path
        try:
            data = self._sealed.content.read_at(position, length)
        except OSError as error:
            if error.errno != errno.EIO:
                raise  # A transient error, such as too many open files.
            raise _Damaged(f"{path} cannot be read at {position}: {error}") from error
        if len(data) != length:
            raise _Damaged(f"{path} ends at {position + len(data)}, before its fragment does")
        self._sum.update(data)
        return self._compressor.write(data)

    def _finish(self) -> bytes:
        fragment, digest = self._sealed.fragment, self._sum.digest()
        if digest != fragment.sum:
            raise _Damaged(f"{self._sealed.content.path} has the SHA-1 {digest.hex()}, not {fragment.sum.hex()}")
        return self._compressor.finish()
