"""Durable spools: a `Spool` whose content and commits lie in files that a later process takes up again.

A journal's spool has a folder of its own::

    spools/<readable name>-<hash>/<create revision>/
        <begin>.content                 content of the fragment that begins there, uncompressed
        <begin>.<generation>.commits    its commit log; see `commit_log`

Content is written as it arrives, beyond what has committed. A commit appends one record to the log, and that write is
the moment of the commit: whatever stops the process before it leaves an uncommitted tail, which recovery cuts off. A
roll writes the first record of the next fragment before the old one is sealed, so the newest log always holds the
journal's end and registers, whatever has been persisted since.

A sealed fragment keeps its files until its content is in a fragment store. It may go there once it is *settled*: every
member of the journal's in-sync record has it, or has agreed to go on behind it. The `Watermark` of a spool is how far
that is known without asking etcd. A spool also remembers, in each record of its log, which pipelines it has followed
(`in_sync.Stamp`), so that whoever takes it up again can tell whether others went on without it.

Written bytes survive the end of the process
at once; whether they survive the loss of power before they are acknowledged is the `Fsync` policy (`spool_flush`).
Content and log reach the disk in any order, so that a record may be there before its content: recovery goes back to the
last one whose content is there. What may have been promised by then, the log says, too.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from coranto.effects import Bytes, Clock, Disk
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool import commit_log
from coranto_broker.spool.flush import Current, Flusher
from coranto_broker.spool.in_sync import UNSTAMPED, Stamp
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import Committed, Decision, Hash, Outcome, Spool
from coranto_broker.spool.write_worker import Aside

COMPACT_LOG_BYTES = 4 << 20
"""A commit log longer than this is started over, with its last record."""

SET_ASIDE = "set-aside"
"""The folder, within that of a spool, of files that are not part of the journal, or are not whole."""

DISTRUSTED_FILE = "distrusted"
"""A folder with a file of this name has met a sync that failed: what is read from it may not be on the disk."""
FETCHED = ".fetched"
"""How the name of a file ends whose content is being fetched. What a crash leaves of it is of no use."""

ASIDE_BYTES = 1 << 17
"""Content of at least this size is written and hashed by another thread, while this one receives what follows."""


_log = structlog.get_logger(__name__)


class Fsync(enum.StrEnum):
    """When spool files are forced to the disk. In every case a killed process loses nothing."""

    NEVER = "never"
    """Leave it to the operating system: power loss may take recently acknowledged appends."""
    COMMIT = "commit"
    """Before each append is acknowledged, and before readers see it; appends that wait together share one."""
    INTERVAL = "interval"
    """Every few seconds: power loss takes at most the appends of that time."""


class Watermark:
    """All content of a spool below `offset` is settled. It only rises."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._waiting: list[tuple[int, Callable[[], object]]] = []

    def raise_to(self, offset: int) -> None:
        if offset > self.offset:
            self.offset = offset
            if self._waiting:
                due = [tell for at, tell in self._waiting if at <= offset]
                self._waiting = [each for each in self._waiting if each[0] > offset]
                for tell in due:
                    tell()

    def when(self, offset: int, tell: Callable[[], object]) -> None:
        """Call `tell` once, when it has risen to `offset`, which it has not yet."""
        self._waiting.append((offset, tell))


@dataclass(frozen=True, slots=True)
class Sealed:
    """A completed fragment in local files, on its way to a fragment store."""

    fragment: Fragment
    first_append_time: float
    registers: pb.LabelSet
    content: SharedFile
    log: SharedFile = field(repr=False)
    create_revision: int = 0
    stamp: Stamp = UNSTAMPED
    watermark: Watermark = field(default_factory=Watermark, repr=False)
    readable: bool = True
    """Whether readers may see it from the moment on that it completes; else once `spool_readable` says so."""
    older_logs: tuple[SharedFile, ...] = field(default=(), repr=False, compare=False)
    """Those that `log` took the place of, unless they are gone."""
    may_drop: Callable[[], bool] = field(default=lambda: True, repr=False, compare=False)
    """Sees to it that the log which goes on behind the fragment outlives the machine; False when it cannot."""

    @property
    def settled(self) -> bool:
        """Whether nobody can go on any more without this fragment, as far as is known here."""
        return self.fragment.end <= self.watermark.offset

    def set_aside(self) -> None:
        """Keep the files where nobody takes them up: others went on without this content."""
        for log in self.older_logs:
            log.discard()
        for file in (self.log, self.content):
            file.move(self._place_aside(file))

    def set_content_aside(self) -> None:
        """Keep damaged content where nobody reads it. The log goes on to claim it, until it is put back or stored."""
        self.content.take_out(self._place_aside(self.content))

    def _place_aside(self, file: SharedFile) -> Path:
        return file.path.parent / SET_ASIDE / f"{self.fragment.sum.hex()[:8]}.{file.path.name}"

    def drop(self) -> None:
        """Remove the files: the content is elsewhere, or no longer wanted.

        They stay for the next start when the disk fails to keep the log that comes after them.
        """
        if not self.may_drop():
            return
        for log in self.older_logs:
            log.discard()
        self.log.discard()  # First: content without a log is not taken up again.
        try:
            self.log.sync_folder()  # A log without content would look like a loss.
        except OSError as error:
            _log.warning("content of a fragment stays for now", file=str(self.content.path), error=str(error))
        else:
            self.content.discard()


class SpoolObserver(Protocol):
    """Hears of what a spool has made visible."""

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        """Readers may see this extent of the fragment under construction."""
        ...

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        """The fragment will not grow any more. `primary` if this broker drove the roll."""
        ...

    def spool_skip(self, offset: int) -> None:
        """The journal goes on at `offset`; content before it, if any, is not here."""
        ...

    def spool_ahead(self, end: int) -> None:
        """Content up to `end` has committed here, and not yet everywhere, as far as is known: readers wait for it."""
        ...

    def spool_readable(self, end: int) -> None:
        """Readers may see whatever has completed up to `end`."""
        ...


@dataclass(frozen=True, slots=True)
class SpoolFolder:
    """Where the spool of one journal (of one create revision) lives, and the effects to get there.

    `base` is added to the etcd revisions of pipelines (`coranto_broker.recovery.identity`).
    """

    path: Path
    journal: str
    create_revision: int
    disk: Disk
    clock: Clock
    base: int = 0

    def content(self, begin: int) -> SharedFile:
        return SharedFile(self.disk, self.path / f"{begin:016x}.content")

    def log(self, begin: int, generation: int) -> SharedFile:
        return SharedFile(self.disk, self.path / f"{begin:016x}.{generation}.commits")

    def distrust(self, error: OSError) -> None:
        """After a sync that failed: have recovery write everything anew, also that of a later process."""
        try:
            self.disk.write_atomic(self.path / DISTRUSTED_FILE, str(error).encode())
        except OSError as problem:
            _log.error("spool could not be marked as distrusted", folder=str(self.path), error=str(problem))


def folder_of(root: Path, journal: str, create_revision: int) -> Path:
    """The spool folder of a journal. Its readable part is for people; the hash keeps names apart."""
    readable = re.sub(r"[^0-9A-Za-z._-]+", "_", journal)[:60]
    digest = hashlib.sha256(journal.encode()).hexdigest()[:16]
    return root / f"{readable}-{digest}" / str(create_revision)


class DurableSpool:
    """A spool and its files. One owner at a time, one event loop; failed writes (OSError) leave it as it was.

    Once a sync has failed everything that would commit or flush raises DiskFailed.
    """

    def __init__(
        self,
        folder: SpoolFolder,
        observer: SpoolObserver,
        fsync: Fsync,
        *,
        spool: Spool | None = None,
        log: SharedFile | None = None,
        generation: int = 0,
        stamp: Stamp = UNSTAMPED,
        watermark: Watermark | None = None,
        retired: Sequence[SharedFile] = (),
    ) -> None:
        """An empty spool, or (from recovery) `spool` with its open commit log of that generation.

        `retired` are files of its completed fragments, which may not be on the disk yet.
        """
        self._folder = folder
        self._observer = observer
        self.fsync = fsync
        self._spool = spool or Spool(folder.journal)
        self._content = folder.content(self._spool.fragment.begin)
        self._log = log
        self._log_length = log.size() if log is not None else 0
        self._generation = generation
        self._stamp = stamp
        self._watermark = watermark or Watermark()
        self._aside = Aside()
        self._published = self._spool.fragment.begin
        self._readable = self._recorded_readable = self._published  # All below; and as the log says.
        self._unpublished: deque[Fragment] = deque()  # Committed extents that readers do not see yet.
        self._ahead = False  # The answer to the last proposal told the primary that it lacks some of ours.
        self._promised_end = 0  # The journal's end up to which it is known to be on the disk.
        self._flusher = Flusher(folder, self._current, self._flushed, recovered=log is not None, retired=retired)

    @property
    def committed(self) -> Committed:
        return self._spool.committed

    @property
    def fragment(self) -> Fragment:
        return self._spool.fragment

    @property
    def registers(self) -> pb.LabelSet:
        return self._spool.registers

    @property
    def end(self) -> int:
        return self._spool.end

    @property
    def delta(self) -> int:
        return self._spool.delta

    @property
    def stamp(self) -> Stamp:
        """Which pipelines the spool has followed."""
        return self._stamp

    @property
    def on_failure(self) -> Callable[[], object]:
        """Called once, when a sync has failed: the spool must be closed and recovered then."""
        return self._flusher.on_failure

    @on_failure.setter
    def on_failure(self, tell: Callable[[], object]) -> None:
        self._flusher.on_failure = tell

    @property
    def content_file(self) -> SharedFile:
        """Content of the fragment under construction."""
        return self._content

    def next_fragment(self) -> Fragment:
        """The fragment that commits everything received. It is `written`, or the event loop has to wait for that."""
        self.join()
        return self._spool.next_fragment()

    def write(self, content_delta: int, content: Bytes) -> None:
        """Take content at `content_delta`. Raises InvalidInput when that is not where the delta ends.

        Large content, and what follows it, is written by another thread: await `room` before there is more. Where that
        fails, one of the later calls raises it, and nothing of the delta is left.
        """
        self._flusher.require_sound()
        if self._aside.failed:
            self.join()
        position = self._spool.check_content(content_delta)
        if self._log is None:
            # Content is never there before its log is. Otherwise a log that a kill or power loss has torn at its first
            # commit would look like one of acknowledged content, and the journal would wait for an operator.
            self._record(self._spool.committed, always=True)
            self._flusher.version += 1
        if not self._flusher.flushed_version and self.fsync is Fsync.COMMIT and not position:
            self._flusher.flush_now()  # Nearly always that is done by the first pipeline, which has been acknowledged.
        if len(content) < ASIDE_BYTES and self._aside.idle:
            self._content.write_at(position, content)
            self._spool.extend(content)
            return
        self._content.prepare()
        self._aside.add(partial(self._content.write_at, position, content), len(content))
        self._aside.add(self._spool.extend_aside(content), 0)

    def hash(self, sum: Hash, content: Bytes) -> None:
        """Have `sum` take up content that was just written. It lacks nothing once everything is `written`."""
        if self._aside.idle:
            sum.update(content)
        else:
            self._aside.add(partial(sum.update, content), 0)

    async def room(self) -> None:
        """Return once little enough waits to be written."""
        await self._aside.room()

    async def written(self) -> None:
        """Return once all content is written. Raises OSError when it cannot be."""
        with self._failing():
            await self._aside.done()

    def join(self) -> None:
        """As `written`, but that the event loop has to wait."""
        if self._aside.idle:
            return
        with self._failing():
            self._aside.join()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Leave nothing of the delta when writing it turns out to have failed."""
        try:
            yield
        except OSError:
            self.roll_back()
            raise

    def propose(
        self,
        proposal: Fragment,
        registers: pb.LabelSet,
        *,
        primary: bool,
        revision: int = 0,
        settled: bool = False,
    ) -> Decision:
        """Answer a proposal, durably. What it commits is not visible to readers before `publish`.

        `revision` is that of the pipeline's Route in etcd. With `settled`, its primary rolls only once every replica
        has what was proposed before.
        """
        self._flusher.require_sound()
        self.join()
        before = self._spool.fragment
        decision = self._spool.decide(proposal, registers, self._folder.clock.now())
        committing = decision.outcome is Outcome.COMMIT
        was_ahead = self._ahead
        self._ahead = decision.outcome is Outcome.MISMATCH and proposal.end < decision.committed.fragment.end
        counted = revision and revision + self._folder.base
        stamp, self._stamp = self._stamp, self._stamp.followed(counted, wrote=committing)
        try:
            if decision.rolled:
                # What the primary has just been told that it lacks may be here alone, and readers elsewhere wait.
                self._roll(decision, primary or was_ahead, stamp, settled)
            elif committing:
                self._record(decision.committed)
                self._spool.adopt(decision)
                self._flusher.version += 1
            else:
                if decision.outcome is Outcome.MISMATCH:
                    self._stamp = stamp
                elif stamp != self._stamp or self._recorded_readable < self._readable == self._spool.end:
                    self._record(decision.committed)
                    self._flusher.version += 1
                    if not self._spool.fragment.length and self._log is not None:
                        self._log.rest()
                self._spool.adopt(decision)
                if decision.outcome is Outcome.ROLL_BACK:
                    self._content.truncate(self._spool.fragment.length)
        except OSError:
            self._stamp = stamp
            raise
        if committing:
            self.settle(before.begin)  # A pipeline takes content only behind what everybody has.
            if not primary:
                self._unpublished.append(decision.committed.fragment)
                self._observer.spool_ahead(decision.committed.fragment.end)
        elif settled and decision.rolled:
            self.settle(before.end)
        return decision

    def commit(self, content: Bytes, registers: pb.LabelSet, revision: int) -> Fragment:
        """Take content and commit it: as `write`, and `propose` with `next_fragment`, but in one go. Not published yet.

        For the primary's spool, when it has no delta. Where writing fails (OSError) it is left as it was.
        """
        self._flusher.require_sound()
        spool, stamp = self._spool, self._stamp
        if self._log is not None and len(content) < ASIDE_BYTES and self._aside.idle:
            self._content.write_at(spool.check_content(0), content)
            spool.extend(content)
        else:
            self.write(0, content)
            self.join()
        decision = spool.decide_next(registers, self._folder.clock.now())
        counted = revision and revision + self._folder.base
        if stamp.written < counted:
            self._stamp = stamp.followed(counted, wrote=True)
        try:
            self._record(decision.committed)
        except OSError:
            self._stamp = stamp
            self.roll_back()
            raise
        spool.adopt(decision)
        self._ahead = False
        self._flusher.version += 1
        return decision.committed.fragment

    def settle(self, offset: int) -> None:
        """Nobody can go on any more without what lies below `offset`."""
        self._watermark.raise_to(offset)

    def roll_back(self) -> None:
        """Forget content that has not committed."""
        self._aside.abandon()
        if self._spool.delta:
            self._spool.roll_back()
            if not self._flusher.failed:  # Otherwise recovery does it.
                self._content.truncate(self._spool.fragment.length)

    async def flush_commits(self) -> None:
        """Return once everything committed so far satisfies the fsync policy. Raises OSError when it cannot.

        Cancelling the wait does not undo the commit. Commits that wait at the same time share one flush.
        """
        if self.fsync is not Fsync.COMMIT:
            return
        await self._flusher.through(self._flusher.version)

    async def flush(self) -> None:
        """Force everything committed so far to the disk, whatever the policy."""
        if self._flusher.flushed_version < self._flusher.version:
            self._flusher.require_sound()
            await self._flusher.flush()

    def publish(self, fragment: Fragment) -> None:
        """Let readers see this committed extent of the fragment under construction.

        It does nothing when they see it already, or when a roll has shown it since.
        """
        if fragment.end > self._published and fragment.begin == self._spool.fragment.begin:
            self._published = fragment.end
            self._readable = max(self._readable, fragment.end)
            self._observer.spool_commit(fragment, self._content)
        while self._unpublished and self._unpublished[0].end <= fragment.end:
            self._unpublished.popleft()

    def publish_through(self, offset: int) -> None:
        """Let readers see all that has committed up to `offset`: every replica of the journal has it."""
        readable: Fragment | None = None
        while self._unpublished and self._unpublished[0].end <= offset:
            readable = self._unpublished.popleft()
        if readable is not None:
            self.publish(readable)
        elif offset >= self._spool.fragment.end:
            self.publish(self._spool.fragment)  # We had it before this stream began.
        self._readable = max(self._readable, min(offset, self._spool.end))
        self._observer.spool_readable(offset)

    def close(self) -> None:
        """Close the files. The spool can be recovered from them."""
        self._aside.abandon()
        self._content.seal()
        if self._log is not None:
            self._log.seal()

    def _roll(self, decision: Decision, primary: bool, stamp: Stamp, settled: bool) -> None:
        """`stamp` is the one before this proposal. With `settled`, every replica has what completes."""
        before, after = self._spool.committed, decision.committed.fragment
        if after.begin == before.fragment.begin:  # Empty at the same offset as before: at most the codec changes.
            if decision.committed != before or stamp != self._stamp:
                self._record(decision.committed)
                self._flusher.version += 1
                if self._log is not None:
                    self._log.rest()
            if self._spool.delta:
                self._content.truncate(0)
            self._spool.adopt(decision)
            return
        readable = settled or before.fragment.end <= max(self._published, self._watermark.offset)
        if readable:
            self._readable = max(self._readable, before.fragment.end)
        old_content, old_log = self._content, self._log
        old_generation, old_length = self._generation, self._log_length
        if self._spool.delta:
            old_content.truncate(before.fragment.length)
        flusher = self._flusher
        if self.fsync is Fsync.COMMIT and flusher.flushed_version < flusher.version and old_log is not None:
            flusher.flush_now()  # A completed fragment is visible at once.
        try:
            self._log = None
            self._record(decision.committed)
        except OSError:
            self._log, self._generation, self._log_length = old_log, old_generation, old_length
            self._spool.roll_back()
            raise
        self._spool.adopt(decision)
        self._flusher.version += 1
        self._content = self._folder.content(after.begin)
        self._published = after.begin
        self._unpublished.clear()
        if decision.completed is None or old_log is None:
            old_content.discard()
            if old_log is not None:
                flusher.supersede(old_log, in_turn=self.fsync is Fsync.NEVER)
        else:
            old_content.seal()
            old_log.seal()
            if self.fsync is Fsync.INTERVAL:
                flusher.retire(old_content, old_log)
            first, revision = before.first_append_time, self._folder.create_revision
            sealed = Sealed(
                before.fragment,
                first,
                before.registers,
                old_content,
                old_log,
                revision,
                stamp,
                self._watermark,
                readable,
                flusher.superseded,
                partial(self._assure, flusher.version),
            )
            self._observer.spool_complete(sealed, primary=primary)
        if after.begin > before.fragment.end:
            self._observer.spool_skip(after.begin)

    def _record(self, committed: Committed, *, always: bool = False) -> None:
        flushed = self._promised_end if self.fsync is Fsync.COMMIT else commit_log.UNAWAITED
        record = commit_log.encode(self._folder.create_revision, committed, self._stamp, flushed, self._readable)
        begin = committed.fragment.begin
        if committed.fragment.length and not self._spool.fragment.length:
            self._flusher.names_change()  # Its content file is new.
        if self._log is None:
            if not committed.fragment.end and not committed.registers.labels and not always and not self._stamp.synced:
                return  # A journal that was never written, and never synchronized, needs no memory.
            self._log = self._begin_log(begin, 0, record)
            return
        if self._log_length > COMPACT_LOG_BYTES:
            new = self._begin_log(begin, self._generation + 1, record)
            self._flusher.supersede(self._log, in_turn=self.fsync is Fsync.NEVER)
            self._log = new
            return
        # Where the last whole record ends, whatever a write that failed may have left behind it.
        self._log.write_at(self._log_length, record)
        self._log_length += len(record)
        self._recorded_readable = self._readable

    def _begin_log(self, begin: int, generation: int, record: bytes) -> SharedFile:
        """A log with its first record. Nothing is left of it when it cannot be written."""
        log = self._folder.log(begin, generation)
        try:
            log.write_at(0, record)
        except OSError:
            log.discard()
            raise
        self._generation, self._log_length = generation, len(record)
        self._recorded_readable = self._readable
        self._flusher.names_change()
        return log

    def _current(self) -> Current:
        """What is to be flushed."""
        files = [self._content] if self._spool.fragment.length else []
        if self._log is not None:
            files.append(self._log)
        return Current(files, self._spool.end)

    def _flushed(self, end: int) -> None:
        """The journal is on the disk up to `end`."""
        if self.fsync is Fsync.COMMIT and end > self._promised_end:
            self._promised_end = end
            self._mark()
        if self._log is not None and not self._spool.fragment.length and not self._spool.delta:
            self._log.rest()

    def _mark(self) -> None:
        """Write down what is promised, lest content that the disk loses later look like content that never was."""
        if self._log is None or self._log.discarded:
            return
        mark = commit_log.encode_mark(self._promised_end)
        with contextlib.suppress(OSError):  # On a full disk, say. The next record tells it, too.
            self._log.write_at(self._log_length, mark)
            self._log_length += len(mark)

    def _assure(self, version: int) -> bool:
        return self._flusher.assure(version, self._log)
