"""Durable spools: a `Spool` with content and commits in files, so that a later process can recover it.

A journal's spool has its own folder::

    spools/<readable name>-<hash>/<create revision>/
        <begin>.content                 content of the fragment that begins there, uncompressed
        <begin>.<generation>.commits    its commit log; see `commit_log`

Content is written as it arrives, after the committed content. A commit appends one record to the log. The commit takes
effect with that write: if the process stops before it, an uncommitted tail remains, and recovery truncates it. A roll
writes the first record of the next fragment before it seals the old one. So the newest log always holds the journal's
end and registers, no matter what has been persisted since.

A sealed fragment keeps its files until its content is in a fragment store. It may be stored once it is *settled*: every
member of the journal's in-sync record has it, or has agreed to continue after it. The `SettledOffset` of a spool is the
end of the content that is known to be settled without asking etcd. Each record of the log also holds the pipelines that
the spool has followed (`in_sync.Stamp`). From this, recovery can determine whether others continued without this spool.

As soon as bytes are written, they survive the end of the process. The `Fsync` policy decides whether they also survive
power loss before they are acknowledged (`spool.flush`). Content and log reach the disk in any order, so a record may be
there before its content. Recovery goes back to the last record whose content is there. The log also records which
content may have been acknowledged.
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
from coranto_broker.spool.free_space import FreeSpace
from coranto_broker.spool.in_sync import UNSTAMPED, Stamp
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import CommittedState, Extended, Hash, ProposalDecision, ProposalEffect, Spool
from coranto_broker.spool.write_worker import WriteQueue

COMPACT_LOG_BYTES = 4 << 20
"""A commit log longer than this (in bytes) is replaced by a new log that begins with the next record."""

SET_ASIDE = "set-aside"
"""The folder, within a spool's folder, for files that are damaged or not part of the journal."""

DISTRUSTED_FILE = "distrusted"
"""The file that marks a folder after a failed sync: content that is read there may not be on the disk."""
FETCHED = ".fetched"
"""The suffix of a file whose content is still being fetched. Recovery deletes such files."""

DEFERRED_BYTES = 1 << 17
"""Content of at least this many bytes is written and hashed by another thread, while this one receives more."""


_log = structlog.get_logger(__name__)


class Fsync(enum.StrEnum):
    """The policy for forcing spool files to the disk. A killed process loses nothing under any policy."""

    NEVER = "never"
    """Leave it to the operating system. Power loss may lose recently acknowledged appends."""
    COMMIT = "commit"
    """Before each append is acknowledged and readers see it. Appends that wait at the same time share one flush."""
    INTERVAL = "interval"
    """Every few seconds. Power loss loses at most the appends of that time."""


class SettledOffset:
    """The end of the settled content of a spool. It only rises."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._waiting: list[tuple[int, Callable[[], object]]] = []

    def raise_to(self, offset: int) -> None:
        if offset > self.offset:
            self.offset = offset
            if self._waiting:
                due = [callback for at, callback in self._waiting if at <= offset]
                self._waiting = [each for each in self._waiting if each[0] > offset]
                for callback in due:
                    callback()

    def call_when_reached(self, offset: int, callback: Callable[[], object]) -> None:
        """Call `callback` once, when the watermark reaches `offset`. The watermark must be below `offset` now."""
        self._waiting.append((offset, callback))


@dataclass(frozen=True, slots=True)
class Sealed:
    """A completed fragment in local files that is to be persisted."""

    fragment: Fragment
    first_append_time: float
    registers: pb.LabelSet
    content: SharedFile
    log: SharedFile = field(repr=False)
    create_revision: int = 0
    stamp: Stamp = UNSTAMPED
    watermark: SettledOffset = field(default_factory=SettledOffset, repr=False)
    readable: bool = True
    """True if the fragment is visible to readers immediately. Otherwise, it is once `spool_readable` is called."""
    older_logs: tuple[SharedFile, ...] = field(default=(), repr=False, compare=False)
    """Logs that `log` has replaced and that still exist."""
    may_drop: Callable[[], bool] = field(default=lambda: True, repr=False, compare=False)
    """Ensures that the log of the next fragment survives power loss. Returns False if the disk fails."""

    @property
    def settled(self) -> bool:
        """True if it is known here, without asking etcd, that no broker can continue without this fragment."""
        return self.fragment.end <= self.watermark.offset

    def set_aside(self) -> None:
        """Move the files to SET_ASIDE, which recovery ignores, because others continued without this content."""
        for log in self.older_logs:
            log.discard()
        for file in (self.log, self.content):
            file.move(self._place_aside(file))

    def quarantine_content(self) -> None:
        """Move damaged content out of readers' reach. The log still claims it, until it is put back or stored."""
        self.content.quarantine(self._place_aside(self.content))

    def _place_aside(self, file: SharedFile) -> Path:
        return file.path.parent / SET_ASIDE / name_aside(self.fragment, file.path)

    def drop(self) -> None:
        """Remove the files, because their content is elsewhere or no longer wanted.

        If the disk fails to keep the next fragment's log, the files stay until the next start.
        """
        if not self.may_drop():
            return
        for log in self.older_logs:
            log.discard()
        self.log.discard()  # Remove the log first: recovery ignores content without a log.
        try:
            self.log.sync_folder()  # A log without its content would look like a loss.
        except OSError as error:
            _log.warning("spool.content_not_removed", file=str(self.content.path), error=str(error))
        else:
            self.content.discard()


class SpoolObserver(Protocol):
    """Is notified of a spool's commits, completed fragments and visible offsets."""

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        """Make this extent of the fragment under construction visible to readers."""
        ...

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        """Handle a fragment that is complete and no longer grows. `primary` is True if this broker drove the roll."""
        ...

    def spool_skip(self, offset: int) -> None:
        """Note that the journal continues at `offset`. Content just before it, if any, is not here."""
        ...

    def spool_ahead(self, end: int) -> None:
        """Note that content up to `end` has committed here, but perhaps not on every replica, so readers must wait."""
        ...

    def spool_readable(self, end: int) -> None:
        """Make all completed fragments up to `end` visible to readers."""
        ...


@dataclass(frozen=True, slots=True)
class SpoolFolder:
    """The folder of the spool of one journal at one create revision, with the disk and clock to use it.

    `free_space` belongs to the disk. `base` is added to pipelines' etcd revisions (`coranto_broker.recovery.identity`).
    """

    path: Path
    journal: str
    create_revision: int
    disk: Disk
    clock: Clock
    base: int = 0
    free_space: FreeSpace | None = None

    def content(self, begin: int) -> SharedFile:
        return SharedFile(self.disk, self.path / f"{begin:016x}.content")

    def log(self, begin: int, generation: int) -> SharedFile:
        return SharedFile(self.disk, self.path / f"{begin:016x}.{generation}.commits")

    def distrust(self, error: OSError) -> None:
        """Mark the folder after a failed sync, so that recovery rewrites all files, in a later process too."""
        try:
            self.disk.write_atomic(self.path / DISTRUSTED_FILE, str(error).encode())
        except OSError as problem:
            _log.error("spool.distrust_not_marked", folder=str(self.path), error=str(problem))


def name_aside(fragment: Fragment, path: Path) -> str:
    """Return the name in `SET_ASIDE` of a file of a completed fragment."""
    return f"{fragment.sum.hex()[:8]}.{path.name}"


def folder_of(root: Path, journal: str, create_revision: int) -> Path:
    """Return the spool folder of a journal. Its name has a readable part, and a hash that makes it unique."""
    readable = re.sub(r"[^0-9A-Za-z._-]+", "_", journal)[:60]
    digest = hashlib.sha256(journal.encode()).hexdigest()[:16]
    return root / f"{readable}-{digest}" / str(create_revision)


class DurableSpool:
    """A spool and its files, for one owner at a time on one event loop.

    A write that fails (OSError) leaves the spool as it was. After a failed sync, everything that would commit or flush
    raises DiskFailed.
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
        watermark: SettledOffset | None = None,
        readable: int = 0,
        retired: Sequence[SharedFile] = (),
    ) -> None:
        """Begin with an empty spool or, after recovery, with `spool` and its open commit log of that generation.

        `readable` is the logged end of the content that readers may see. It may lie in a completed fragment.
        `retired` are the files of its completed fragments, which may not be on the disk yet.
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
        self._watermark = watermark or SettledOffset()
        self._writes = WriteQueue()
        self._published = self._spool.fragment.begin
        self._readable = self._recorded_readable = readable  # The end of visible content; as last logged.
        self._unpublished: deque[Fragment] = deque()  # Committed extents that readers do not see yet.
        self._ahead = False  # The last answer reported content that the primary lacks.
        self._promised_end = 0  # The journal is known to be on the disk below this offset.
        self._flusher = Flusher(folder, self._current, self._flushed, recovered=log is not None, retired=retired)

    @property
    def committed(self) -> CommittedState:
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
        """The pipelines that the spool has followed."""
        return self._stamp

    @property
    def version(self) -> int:
        """The number of commits and other changes so far."""
        return self._flusher.version

    def is_on_disk(self, version: int) -> bool:
        """Return True if all commits up to that version survive power loss."""
        return self._flusher.flushed_version >= version

    def set_fsync(self, fsync: Fsync) -> None:
        """Switch to another policy, from the next commit on."""
        if fsync is Fsync.COMMIT and self.fsync is not Fsync.COMMIT:
            self._promised_end = max(self._promised_end, self._spool.end)  # It was acknowledged without the disk.
        self.fsync = fsync

    @property
    def on_failure(self) -> Callable[[], object]:
        """A callback for the first failed sync. The spool must then be closed and recovered."""
        return self._flusher.on_failure

    @on_failure.setter
    def on_failure(self, callback: Callable[[], object]) -> None:
        self._flusher.on_failure = callback

    @property
    def content_file(self) -> SharedFile:
        """The content file of the fragment under construction."""
        return self._content

    def next_fragment(self) -> Fragment:
        """Return the fragment that would commit all received content. Blocks the event loop until it is written."""
        self.join()
        return self._spool.next_fragment()

    def write(self, content_delta: int, content: Bytes) -> None:
        """Add content to the delta. Raises InvalidInput if `content_delta` is not the end of the delta.

        Another thread writes large content and content that follows it: await `wait_for_capacity` before more. If
        that thread fails, a later call raises its error, and the whole delta is dropped.
        """
        self._flusher.require_sound()
        if self._writes.failed:
            self.join()
        position = self._spool.check_content(content_delta)
        if self._log is None:
            # The log always exists before the content. Otherwise, if a kill or power loss tore the log at its first
            # commit, acknowledged content would seem to be lost, and the journal would wait for an operator.
            self._record(self._spool.committed, always=True)
            self._flusher.version += 1
        if self._must_flush_log and not position:
            self._flusher.flush_now()  # Rare: the first pipeline was acknowledged, which nearly always flushed this.
        if len(content) < DEFERRED_BYTES and self._writes.idle:
            self._content.write_at(position, content)
            self._spool.extend(content)
            return
        self._content.prepare()
        self._writes.add(partial(self._content.write_at, position, content), len(content))
        self._writes.add(self._spool.extend_later(content), 0)

    def hash(self, sum: Hash, content: Bytes) -> None:
        """Update `sum` with content that was just written. The sum is complete once `written` has returned."""
        if self._writes.idle:
            sum.update(content)
        else:
            self._writes.add(partial(sum.update, content), 0)

    async def wait_for_capacity(self) -> None:
        """Return once the queue of unwritten content has capacity."""
        await self._writes.wait_for_capacity()

    async def written(self) -> None:
        """Return once all content is written. Raises OSError if it cannot be written; the delta is then dropped."""
        with self._failing():
            await self._writes.done()

    def join(self) -> None:
        """Do the same as `written`, but block the event loop until then."""
        if self._writes.idle:
            return
        with self._failing():
            self._writes.join()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Drop the delta if writing it has failed."""
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
    ) -> ProposalDecision:
        """Answer a proposal durably. Readers do not see its commit before `publish`.

        `revision` is the etcd revision of the pipeline's Route. `settled`: the primary of this pipeline rolls only once
        every replica has the earlier proposals.
        """
        self._flusher.require_sound()
        self.join()
        before = self._spool.fragment
        decision = self._spool.decide(proposal, registers, self._folder.clock.now())
        committing = decision.effect is ProposalEffect.COMMIT
        was_ahead = self._ahead
        self._ahead = decision.effect is ProposalEffect.MISMATCH and proposal.end < decision.committed.fragment.end
        counted = revision and revision + self._folder.base
        stamp, self._stamp = self._stamp, self._stamp.followed(counted, wrote=committing)
        try:
            if decision.rolled:
                # If the last answer reported content that the primary lacks, this broker may be the only one with that
                # content, and readers of other brokers wait for it.
                self._roll(decision, primary or was_ahead, stamp, settled)
            elif committing:
                self._record(decision.committed)
                self._spool.adopt(decision)
                self._flusher.version += 1
            else:
                if decision.effect is ProposalEffect.MISMATCH:
                    self._stamp = stamp
                elif stamp != self._stamp or self._recorded_readable < self._readable == self._spool.end:
                    self._record(decision.committed)
                    self._flusher.version += 1
                    if not self._spool.fragment.length and self._log is not None:
                        self._log.close_descriptor()
                self._spool.adopt(decision)
                if decision.effect is ProposalEffect.ROLL_BACK:
                    self._content.truncate(self._spool.fragment.length)
        except OSError:
            self._stamp = stamp
            raise
        if committing:
            self.settle(before.begin)  # A pipeline takes content only once all replicas have the content before it.
            if not primary:
                self._unpublished.append(decision.committed.fragment)
                self._observer.spool_ahead(decision.committed.fragment.end)
        elif settled and decision.rolled:
            self.settle(before.end)
        return decision

    def commit(self, content: Bytes, registers: pb.LabelSet, revision: int) -> Fragment:
        """Add content and commit it in one go, like `write` and then `propose` with `next_fragment`. Does not publish.

        For the primary's spool when it has no delta. If writing fails (OSError), the spool stays as it was.
        """
        self._flusher.require_sound()
        if not self._writes_inline(len(content)):
            self.write(0, content)
            self.join()
            self._commit_delta(registers, revision)
        else:
            self._commit_extended(content, self._spool.extended(content, registers, self._folder.clock.now()), revision)
        return self._spool.fragment

    def commit_proposed(self, content: Bytes, proposal: pb.Fragment, revision: int) -> bool:
        """Commit content that came with its proposal in one go, if it fits, keeps the registers and needs no waiting.

        For the spool of a replica. Returns False if nothing was changed: use `write` and `propose` then. If writing
        fails (OSError), the spool stays as it was.
        """
        self._flusher.require_sound()
        spool = self._spool
        if spool.delta or proposal.end != spool.end + len(content) or not self._writes_inline(len(content)):
            return False
        extended, begin = spool.extended(content, spool.registers, self._folder.clock.now()), spool.fragment.begin
        fragment = extended.committed.fragment
        if not fragment.is_wire(proposal):
            return False
        self._commit_extended(content, extended, revision)
        self.settle(begin)  # A pipeline takes content only once all replicas have the content before it.
        self._unpublished.append(fragment)
        self._observer.spool_ahead(fragment.end)
        return True

    def _writes_inline(self, length: int) -> bool:
        if self._log is None or (self._must_flush_log and not self._spool.fragment.length):
            return False  # `write` creates or flushes the log.
        return length < DEFERRED_BYTES and self._writes.idle

    @property
    def _must_flush_log(self) -> bool:
        """True if the log must be on the disk before the first content, and may not be there."""
        return not self._flusher.flushed_version and self.fsync is Fsync.COMMIT

    def _commit_extended(self, content: Bytes, extended: Extended, revision: int) -> None:
        """Write and commit content that extends the fragment."""
        stamp = self._follow_pipeline(revision)
        length = self._spool.fragment.length
        try:
            self._content.write_at(length, content)
            self._record(extended.committed)
        except OSError:
            self._stamp = stamp
            if not self._flusher.failed:  # After a failed sync, recovery truncates the file.
                self._content.truncate(length)
            raise
        self._spool.adopt_extended(extended)
        self._ahead = False
        self._flusher.version += 1

    def _commit_delta(self, registers: pb.LabelSet, revision: int) -> None:
        """Commit content that is already written."""
        decision = self._spool.decide_next(registers, self._folder.clock.now())
        stamp = self._follow_pipeline(revision)
        try:
            self._record(decision.committed)
        except OSError:
            self._stamp = stamp
            self.roll_back()
            raise
        self._spool.adopt(decision)
        self._ahead = False
        self._flusher.version += 1

    def _follow_pipeline(self, revision: int) -> Stamp:
        """Stamp the spool with a pipeline that commits content. Returns the stamp before it."""
        before, counted = self._stamp, revision and revision + self._folder.base
        if before.written < counted:
            self._stamp = before.followed(counted, wrote=True)
        return before

    def settle(self, offset: int) -> None:
        """Raise the watermark: no broker can continue without the content below `offset`."""
        self._watermark.raise_to(offset)

    @property
    def is_short_of_space(self) -> bool:
        """True if the disk is nearly full."""
        return self._folder.free_space is not None and self._folder.free_space.is_short

    def roll_back(self) -> None:
        """Drop content that has not committed."""
        self._writes.abandon()
        if self._spool.delta:
            self._spool.roll_back()
            if not self._flusher.failed:  # After a failed sync, recovery truncates the file.
                self._content.truncate(self._spool.fragment.length)

    async def flush_commits(self) -> None:
        """Return once everything committed so far satisfies the fsync policy. Raises OSError if the disk fails.

        Cancelling the wait does not undo the commit. Commits that wait at the same time share one flush.
        """
        if self.fsync is not Fsync.COMMIT:
            return
        await self._flusher.flush_through(self._flusher.version)

    async def force(self, *completed: SharedFile) -> None:
        """Force everything committed so far, and these files of completed fragments, to the disk.

        Raises OSError if the disk fails.
        """
        self._flusher.require_sound()
        if completed:
            self._flusher.retire(*completed)
            await self._flusher.flush()
        await self._flusher.flush_through(self._flusher.version)

    async def flush(self) -> None:
        """Force everything committed so far to the disk, whatever the policy. Raises OSError if the disk fails."""
        if self._flusher.flushed_version < self._flusher.version:
            self._flusher.require_sound()
            await self._flusher.flush()

    def publish(self, fragment: Fragment) -> None:
        """Make this committed extent of the fragment under construction visible to readers.

        Does nothing if it is already visible, or if the spool has rolled since.
        """
        if fragment.end > self._published and fragment.begin == self._spool.fragment.begin:
            self._published = fragment.end
            self._readable = max(self._readable, fragment.end)
            self._observer.spool_commit(fragment, self._content)
        while self._unpublished and self._unpublished[0].end <= fragment.end:
            self._unpublished.popleft()

    def publish_through(self, offset: int) -> None:
        """Make all commits up to `offset` visible to readers, because every replica of the journal has them."""
        readable: Fragment | None = None
        while self._unpublished and self._unpublished[0].end <= offset:
            readable = self._unpublished.popleft()
        if readable is not None:
            self.publish(readable)
        elif offset >= self._spool.fragment.end:
            self.publish(self._spool.fragment)  # This spool had it before this stream began.
        self._readable = max(self._readable, min(offset, self._spool.end))
        self._observer.spool_readable(offset)

    def close(self) -> None:
        """Close the files. The spool can be recovered from them."""
        self._writes.abandon()
        self._content.seal()
        if self._log is not None:
            self._log.seal()

    def _roll(self, decision: ProposalDecision, primary: bool, stamp: Stamp, settled: bool) -> None:
        """Roll to the next fragment. `stamp` is the spool's stamp before this proposal.

        `settled`: every replica has the completed fragment.
        """
        before, after = self._spool.committed, decision.committed.fragment
        if after.begin == before.fragment.begin:  # An empty fragment at the same offset. At most the codec changes.
            if decision.committed != before or stamp != self._stamp:
                self._record(decision.committed)
                self._flusher.version += 1
                if self._log is not None:
                    self._log.close_descriptor()
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
            flusher.flush_now()  # A completed fragment is visible immediately.
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
                flusher.supersede(old_log, unflushed=self.fsync is Fsync.NEVER)
        else:
            old_content.seal()
            old_log.seal()
            if self.fsync is not Fsync.COMMIT:  # The next flush also covers the commits of this fragment.
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
                partial(self._ensure_flushed, flusher.version),
            )
            self._observer.spool_complete(sealed, primary=primary)
        if after.begin > before.fragment.end:
            self._observer.spool_skip(after.begin)

    def _record(self, committed: CommittedState, *, always: bool = False) -> None:
        flushed = self._promised_end if self.fsync is Fsync.COMMIT else commit_log.UNAWAITED
        record = commit_log.encode(self._folder.create_revision, committed, self._stamp, flushed, self._readable)
        begin = committed.fragment.begin
        if committed.fragment.length and not self._spool.fragment.length:
            self._flusher.record_new_files()  # The fragment's content file is new.
        if self._log is None:
            if not committed.fragment.end and not committed.registers.labels and not always and not self._stamp.synced:
                return  # A journal that was never written or synchronized needs no record.
            self._log = self._begin_log(begin, 0, record)
            return
        if self._log_length > COMPACT_LOG_BYTES:
            new = self._begin_log(begin, self._generation + 1, record)
            self._flusher.supersede(self._log, unflushed=self.fsync is Fsync.NEVER)
            self._log = new
            return
        # Write at the end of the last complete record. A failed write may have left bytes after it.
        self._log.write_at(self._log_length, record)
        self._log_length += len(record)
        self._recorded_readable = self._readable

    def _begin_log(self, begin: int, generation: int, record: bytes) -> SharedFile:
        """Create a log with its first record. If the record cannot be written, the log is removed."""
        log = self._folder.log(begin, generation)
        try:
            log.write_at(0, record)
        except OSError:
            log.discard()
            raise
        self._generation, self._log_length = generation, len(record)
        self._recorded_readable = self._readable
        self._flusher.record_new_files()
        return log

    def _current(self) -> Current:
        """Return the files to flush, and the journal's end."""
        files = [self._content] if self._spool.fragment.length else []
        if self._log is not None:
            files.append(self._log)
        return Current(files, self._spool.end)

    def _flushed(self, end: int) -> None:
        """Record that the journal is on the disk up to `end`."""
        if self.fsync is Fsync.COMMIT and end > self._promised_end:
            self._promised_end = end
            self._mark()
        if self._log is not None and not self._spool.fragment.length and not self._spool.delta:
            self._log.close_descriptor()

    def _mark(self) -> None:
        """Record the promised end in the log. Otherwise, content that the disk loses later would not count as lost."""
        if self._log is None or self._log.discarded:
            return
        mark = commit_log.encode_mark(self._promised_end)
        with contextlib.suppress(OSError):  # The disk may be full, for example. The next record has it, too.
            self._log.write_at(self._log_length, mark)
            self._log_length += len(mark)

    def _ensure_flushed(self, version: int) -> bool:
        return self._flusher.ensure_flushed(version, self._log)
