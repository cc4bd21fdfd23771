"""`Recorder` writes the changes of a folder's files into a recovery log.

Changes are recorded as they are made, without waiting. A task of the recorder appends them in order. Changes recorded
in one `together` block are one append, so that a player sees all or none of them. `barrier` returns a future that is
done when everything recorded so far is durable.

Each append requires the author's fence among the log's registers. The answer may show that the fence was not there:
registers start empty after the loss of all the log's brokers, and empty registers satisfy every check. Then the
recorder trusts the append only after it has checked that it is still the owner and that no content was lost; see
`_restore_fence`. A recorder that has failed stays failed: its files are ahead of the log and must be recovered again.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
from collections import deque
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import structlog

from coranto.client import JournalClient
from coranto.client.retry import Retry
from coranto.client.values import AppendResult
from coranto.effects import Clock, SystemClock
from coranto.errors import AppendOutcomeUnknown, CorruptData, Fenced, InvalidInput, RegisterMismatch
from coranto.messages.fixed_frame import encode_frame
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog.authority import Authority, not_owner_error
from coranto_consumers.recoverylog.fnode_files import STAGING
from coranto_consumers.recoverylog.fsm import ApplyResult
from coranto_consumers.recoverylog.hints import Hints
from coranto_consumers.recoverylog.lineage import HistoryPosition, Proven, follow, require_content
from coranto_consumers.recoverylog.operations import (
    PROPERTY_PATHS,
    Change,
    Create,
    Fnode,
    Link,
    RecordedOperation,
    SetProperty,
    Unlink,
    Write,
    author_of,
    fence_of,
)
from coranto_consumers.recoverylog.player import RecoveredFiles

DEFAULT_BATCH_BYTES = 4 << 20
DEFAULT_RETRY_TIMEOUT = 300.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Group:
    """Content that is appended as a whole, and the place in the history after it."""

    chain: HistoryPosition
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True)
class _Gate:
    """Holds back all later appends until all of these awaitables are done."""

    wait_for: Sequence[Awaitable[object]]


@dataclass(slots=True)
class _Barrier:
    """A mark in the queue. Its future is done once everything before it is durable."""

    done: asyncio.Future[None]


class Recorder:
    """Records into `log`, starting from the files that a player recovered when it took the log over.

    Use as `async with Recorder(…) as recorder:`.

    Paths are relative to the recovery's directory; a leading slash is optional. Call the methods that record only on
    the recorder's event loop, before the change is made. For a change that is not possible (a path that does not exist,
    or already exists) they raise InvalidInput and record nothing. If the recorder has failed, they raise its failure:

    * Fenced: a later owner has taken the log over. Changes that were not yet durable will never be.
    * any other error: it is unknown whether changes that were not yet durable are durable now.

    Without an `authority`, an author that finds its fence missing stops, because it cannot tell who owns the log.
    """

    def __init__(
        self,
        client: JournalClient,
        recovery: RecoveredFiles,
        *,
        log: str = "",
        authority: Authority | None = None,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        clock: Clock | None = None,
    ) -> None:
        """`log` is the log to record into if it is not the recovered one but a fork of it.

        A failed append is retried for `retry_timeout` seconds.
        """
        if recovery.handoff is None:
            raise InvalidInput(
                f"{recovery.log} was played to its end but not taken over, so it cannot be recorded to; "
                "take it over with `Player.hand_off`"
            )
        self.log = log or recovery.log
        self.directory = recovery.directory
        self.author = recovery.handoff.author
        self._client = client
        self._authority = authority
        self._batch_bytes = batch_bytes
        self._retry_timeout = retry_timeout
        self._clock: Clock = clock or SystemClock()
        self._fsm = recovery.fsm
        self._handoff = recovery.handoff
        self._check = pb.LabelSelector(include=fence_of(self.author))
        self._queue: deque[_Group | _Gate | _Barrier] = deque()
        self._group: _Group | None = None
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._sender: asyncio.Task[None] | None = None
        first = RecordedOperation(recovery.handoff.seq_no, recovery.handoff.checksum, self.author)
        content = encode_frame(first.to_payload())
        self._proven = Proven(recovery.handoff.begin, recovery.handoff.end, hashlib.sha1(content).digest(), self._chain)

    async def __aenter__(self) -> Recorder:
        if self.log != self._fsm.last_log:
            await self._fork()
        self._sender = asyncio.create_task(self._send(), name=f"record {self.log}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop. Changes that are not durable yet may or may not become durable. Their barriers are cancelled."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        self._failure = self._failure or InvalidInput(f"the recorder of {self.log} is closed; open another one")

    # -- Recording ----------------------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Append all changes recorded within the block as one. An exception in the block makes the recorder fail."""
        if self._group is not None:
            yield
            return
        self._group = _Group(self._chain)
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            group, self._group = self._group, None
        if group.pieces:
            self._put(group)

    def create(self, path: str) -> Fnode:
        """Record a new, empty file at `path`. An existing file is replaced."""
        path = self._tracked(path)
        self._check_place(path)
        with self.together():
            earlier = self._fsm.paths.get(path)
            if earlier is not None:
                self._record(Unlink(earlier, path))
            self._record(Create(path))
            return self._fsm.paths[path]

    def write(self, fnode: Fnode, offset: int, content: bytes) -> None:
        """Record a write of `content` at byte `offset` of a file."""
        if offset < 0:
            raise InvalidInput(f"{offset} is not an offset within a file; give 0 or more", field="offset")
        if not self._fsm.paths_of(fnode):
            raise InvalidInput(f"there is no file {fnode} in {self.log}; create it first", field="fnode")
        self._record(Write(fnode, offset, len(content)), content)

    def remove(self, path: str) -> None:
        """Record the removal of a path. A file that loses its last path is gone."""
        path = self._tracked(path)
        self._record(Unlink(self.fnode_of(path), path))

    def link(self, source: str, target: str) -> None:
        """Record one more path, `target`, of the file at `source`. Nothing may be at `target`."""
        target = self._tracked(target)
        if target in self._fsm.paths:
            raise InvalidInput(f"{target} exists in {self.log} already; remove it first", field="target")
        self._check_place(target)
        self._record(Link(self.fnode_of(source), target))

    def rename(self, source: str, target: str) -> None:
        """Record that the file at `source` moves to `target`. An existing file is replaced.

        If the target is a property, its content is read from the source.
        """
        source, target = self._tracked(source), _normal(target)
        fnode, earlier = self.fnode_of(source), self._fsm.paths.get(target)
        if earlier == fnode:
            return  # As in a file system, both paths of the one file stay.
        self._check_place(target, leaving=source)
        with self.together():
            if self._is_property(target):
                self._record(SetProperty(target, (self.directory / source[1:]).read_text()))
            else:
                if earlier is not None:
                    self._record(Unlink(earlier, target))
                self._record(Link(fnode, target))
            self._record(Unlink(fnode, source))

    def fnode_of(self, path: str) -> Fnode:
        """Return the file at `path`. Raises InvalidInput when there is none."""
        fnode = self._fsm.paths.get(_normal(path))
        if fnode is None:
            raise InvalidInput(f"there is no {_normal(path)} in {self.log}; create it first", field="path")
        return fnode

    def exists(self, path: str) -> bool:
        """Return True if a file is at `path`."""
        return _normal(path) in self._fsm.paths

    @property
    def pending_bytes(self) -> int:
        """The bytes that are recorded and not durable yet."""
        return self._pending_bytes

    @property
    def has_failed(self) -> bool:
        """True if the recorder has failed, so that nothing can be recorded any more."""
        return self._failure is not None

    @property
    def write_head(self) -> int:
        """The offset of the log at or after which the next recorded change will lie."""
        return self._proven.end

    def after(self, wait_for: Sequence[Awaitable[object]]) -> None:
        """Append changes recorded from now on only after all of `wait_for` are done.

        If one of them raises, these changes are never appended, and the recorder fails with that exception.
        """
        self._check_usable()
        if wait_for:
            self._put(_Gate(wait_for))

    def barrier(self) -> asyncio.Future[None]:
        """Return a future that is done once all changes so far are durable, in a log that this author still owns.

        Otherwise the future raises the recorder's failure. Later changes do not delay it.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_retrieve)
        if self._failure is not None:
            done.set_exception(self._failure)
        else:
            self._put(_Barrier(done))
        return done

    async def hints(self) -> Hints:
        """Return hints of the files as they are now, once all of their changes are durable.

        Raises InvalidInput for a fork into which no file was written yet: no hints would lead players to it. Cancelling
        ends only the wait.
        """
        hints = self._fsm.hints(self.log)
        logs = {segment.log for live in hints.live_fnodes for segment in live.segments}
        if self.log not in (self._handoff.log, *logs):
            raise InvalidInput(f"nothing was written into {self.log} yet, a fork of {self._handoff.log}")
        await self.barrier()
        return hints

    def _tracked(self, path: str) -> str:
        path = _normal(path)
        if self._is_property(path):
            raise InvalidInput(f"{path} is a property: files are only renamed to it", field="path")
        return path

    def _is_property(self, path: str) -> bool:
        return path in PROPERTY_PATHS or path in self._fsm.properties

    def _check_place(self, path: str, leaving: str = "") -> None:
        """Raise InvalidInput for a path that is a folder of other files, or below a file: no player could create it."""
        for other in self._fsm.paths:
            if other != leaving and (other.startswith(f"{path}/") or path.startswith(f"{other}/")):
                raise InvalidInput(
                    f"{path} and {other} cannot both be files in {self.log}; choose another path", field="path"
                )

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _record(self, change: Change, content: bytes = b"") -> None:
        self._check_usable()
        fsm = self._fsm
        op = RecordedOperation(fsm.next_seq_no, fsm.next_checksum, self.author, change, self.log, self.write_head)
        payload = op.to_payload()
        result = fsm.apply(op, payload)
        if result is not ApplyResult.APPLIED:
            raise InvalidInput(f"{change} cannot be recorded in {self.log}: {result.value}")
        group = self._group or _Group(self._chain)
        group.pieces.append(encode_frame(payload))
        if content:
            group.pieces.append(content)
        group.size += len(content) + len(payload)
        group.chain = self._chain
        if self._group is None:
            self._put(group)

    # -- Appending ----------------------------------------------------------------------------------------------------

    @property
    def _chain(self) -> HistoryPosition:
        return HistoryPosition(self._fsm.next_seq_no, self._fsm.next_checksum)

    def _put(self, item: _Group | _Gate | _Barrier) -> None:
        self._queue.append(item)
        if isinstance(item, _Group):
            self._pending_bytes += item.size
        self._wake.set()

    async def _send(self) -> None:
        marks: list[_Barrier] = []
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                # Wait one turn of the loop, so that changes recorded in the same turn share an append.
                await asyncio.sleep(0)
                while self._queue:
                    if isinstance(self._queue[0], _Gate):
                        gate = self._queue.popleft()
                        assert isinstance(gate, _Gate)
                        for each in gate.wait_for:
                            await each
                        continue
                    groups, marks = self._next_batch()
                    await self._append(groups)
                    self._pending_bytes -= sum(group.size for group in groups)
                    for mark in marks:
                        if not mark.done.done():
                            mark.done.set_result(None)
        except asyncio.CancelledError:
            self._end_barriers(marks, None)
            raise
        except Exception as error:  # noqa: BLE001  A gate may raise anything. Waiting callers get it.
            self._fail(error)
            self._end_barriers(marks, error)

    def _next_batch(self) -> tuple[list[_Group], list[_Barrier]]:
        groups: list[_Group] = []
        marks: list[_Barrier] = []
        size = 0
        while self._queue:
            item = self._queue[0]
            if isinstance(item, _Gate):
                break
            if isinstance(item, _Barrier):
                marks.append(item)
            else:
                if groups and size + item.size > self._batch_bytes:
                    break
                groups.append(item)
                size += item.size
            self._queue.popleft()
        return groups, marks

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            _log.warning("recorder.failed", log=self.log, author=self.author, reason=str(error))

    def _end_barriers(self, marks: list[_Barrier], error: BaseException | None) -> None:
        """End all barriers, since nothing more is appended: cancel them, or set `error`."""
        for item in (*marks, *self._queue):
            if isinstance(item, _Barrier) and not item.done.done():
                if error is None:
                    item.done.cancel()
                else:
                    item.done.set_exception(error)
        self._queue.clear()

    async def _append(self, groups: list[_Group]) -> None:
        """Append groups, and return once they are durable at their place of this author's history.

        Without groups no content is appended, but the fence is checked.
        """
        pieces = [piece for group in groups for piece in group.pieces]
        goal = groups[-1].chain if groups else self._proven.chain
        retry = Retry(self._retry_timeout)
        unknown = False
        while True:
            try:
                result = await self._client.append(
                    self.log, pieces or b"", check_registers=self._check, retry_timeout=self._retry_timeout
                )
                break
            except AppendOutcomeUnknown as error:
                unknown = True
                delay = retry.failed(self._clock.monotonic())
                if delay is None:
                    raise
                _log.info("recorder.repeats", log=self.log, reason=str(error))
                await self._clock.sleep(delay)
            except RegisterMismatch as error:
                if unknown and await self._reaches(goal, await self._client.head(self.log)):
                    return  # An earlier attempt was applied before the takeover: the new owner has its content.
                await self._replace_fence(error)
        if result.begin < self._proven.end:
            raise CorruptData(
                f"{self.log} ended at offset {self._proven.end} before, and an append went to {result.begin}: it lost "
                "content. Stop this author, and recover the log."
            )
        if author_of(result.registers) != self.author:
            await self._restore_fence(result, goal)
        if pieces:
            self._proven = Proven(result.begin, result.end, result.sum, goal)

    async def _reaches(self, goal: HistoryPosition, end: int) -> bool:
        """Return True if this author's history reaches `goal` between its last append and offset `end`."""
        proven = self._proven
        return await follow(self._client, self.log, proven.end, end, self.author, proven.chain, goal)

    async def _restore_fence(self, result: AppendResult, goal: HistoryPosition) -> None:
        """Check an append whose answer did not have this author's fence among the registers. Return if it counts.

        It counts when three things hold: the authority still names this author as the owner, the author's earlier
        content is still at its place, and no other author's operation came in between. The fence is restored first, so
        that no other operation can come in later. A new owner claims the log before it appends. So an owner that claims
        it after our last check of the authority finds our append. Raises Fenced or CorruptData otherwise.
        """
        _log.warning("recorder.fence_lost", log=self.log, author=self.author, offset=result.begin)
        if self._authority is None:
            raise Fenced(
                f"recovery log {self.log}: the fence of author {self.author:#x} is gone, and there is no authority to "
                "ask whether another has taken over; stop this one"
            )
        await self._check_owner(self._authority)
        end = await self._put_fence(self._check)
        await require_content(self._client, self.log, self._proven)
        if not await self._reaches(goal, end):
            raise CorruptData(f"{self.log} lacks content that author {self.author:#x} appended to it; recover the log")
        await self._check_owner(self._authority)

    async def _replace_fence(self, refusal: RegisterMismatch) -> None:
        """Replace another author's fence that refused an append.

        Raises Fenced when this author is no longer the owner, or cannot know it.

        The fence may come from a late handoff: a process claimed the log, hung, and appended its handoff long after
        another process had taken the log over. Handoffs check no registers, so this one was accepted. But it does not
        continue the history, and so it has not taken the log over. Every owner claims the log before it takes over, so
        the authority distinguishes a late handoff from a later owner. An owner that uses no authority is recognized by
        its handoff, which continues the history.
        """
        late, authority = author_of(refusal.registers), self._authority
        fenced = Fenced(
            f"recovery log {self.log}: author {self.author:#x} was fenced off by "
            f"{f'author {late:#x}' if late else 'registers of another kind'}; stop this one"
        )
        owner = await authority.current() if authority is not None and late else None
        if authority is None or late is None or owner is None or owner.author != self.author:
            raise fenced from refusal
        _log.warning("recorder.late_handoff", log=self.log, author=self.author, late=late)
        await self._reaches(self._proven.chain, await self._client.head(self.log))  # Raises Fenced.
        end = await self._put_fence(pb.LabelSelector(include=fence_of(late)))
        await self._reaches(self._proven.chain, end)
        await self._check_owner(authority)

    async def _put_fence(self, check: pb.LabelSelector) -> int:
        """Set this author's fence if registers satisfy `check`, and return the end offset of the log after that."""
        # `seq_no` 0 is in no history, so all players skip the operation.
        mark = encode_frame(RecordedOperation(0, 0, self.author).to_payload())
        try:
            result = await self._client.append(
                self.log,
                mark,
                check_registers=check,
                union_registers=fence_of(self.author),
                retry_unknown=True,
                retry_timeout=self._retry_timeout,
            )
        except RegisterMismatch as error:
            if author_of(error.registers) != self.author:
                raise Fenced(
                    f"recovery log {self.log} was taken over while its fence was gone; stop this one"
                ) from error
            return await self._client.head(self.log)  # An earlier attempt was applied, but its answer was lost.
        return result.end

    async def _check_owner(self, authority: Authority) -> None:
        owner = await authority.current()
        if owner is None or owner.author != self.author:
            raise not_owner_error(self.log, self.author, owner)

    async def _fork(self) -> None:
        """Begin to record into a fork: append a no-op that continues the history, and set the fence."""
        noop = RecordedOperation(self._fsm.next_seq_no, self._fsm.next_checksum, self.author, log=self.log)
        payload = noop.to_payload()
        self._fsm.apply(noop, payload)
        result = await self._client.append(
            self.log, encode_frame(payload), union_registers=fence_of(self.author), retry_unknown=True
        )
        self._proven = Proven(result.begin, result.end, result.sum, self._chain)


def _normal(path: str) -> str:
    """Return the normalized path for the log, with a leading slash. Raises InvalidInput."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or parts[0] == STAGING or "\0" in path:
        raise InvalidInput(
            f"{path!r} is not the path of a file below the recorded directory; use a path within it", field="path"
        )
    return posixpath.join("/", *parts)


def _retrieve(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()  # Marks it as retrieved: the next barrier raises the failure, too.
