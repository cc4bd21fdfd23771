"""`Recorder`: writes the changes of a folder's files into a recovery log.

Changes are recorded as they are made, without waiting, and are appended in order by a task of the recorder's own.
Those recorded `together` are one append, so that a player sees all or none of them. `barrier` tells when all that was
recorded is durable.

Each append requires the author's fence among the log's registers. When the answer shows that the fence was not there
(registers start empty after the loss of all the log's brokers, and empty ones satisfy every check), the recorder
believes in the append only after it has convinced itself that it is still the owner and that nothing was lost: see
`_restore_fence`. A recorder that failed stays failed: its files are ahead of the log, and have to be recovered anew.
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
from coranto_consumers.recoverylog.authority import Authority, taken_over
from coranto_consumers.recoverylog.fnode_files import STAGING
from coranto_consumers.recoverylog.fsm import Verdict
from coranto_consumers.recoverylog.hints import Hints
from coranto_consumers.recoverylog.lineage import Chain, Proven, check_still_there, follow
from coranto_consumers.recoverylog.operations import (
    PROPERTY_PATHS,
    Change,
    Create,
    Fnode,
    Link,
    Operation,
    SetProperty,
    Unlink,
    Write,
    author_of,
    fence_of,
)
from coranto_consumers.recoverylog.player import Recovery

DEFAULT_BATCH_BYTES = 4 << 20
DEFAULT_PATIENCE = 300.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Group:
    """Content that is appended as a whole, and the place in the history behind it."""

    chain: Chain
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True)
class _Gate:
    """Nothing that follows is appended before all of these are done."""

    wait_for: Sequence[Awaitable[object]]


@dataclass(slots=True)
class _Mark:
    """Done once everything before it is durable."""

    done: asyncio.Future[None]


class Recorder:
    """Records into `log`, going on from a `Recovery` that took it over. Use as `async with Recorder(...) as recorder:`.

    Paths are relative to the recovery's directory; a leading slash is optional. The methods that record may be called
    on the recorder's event loop only, before the change is made. They raise InvalidInput, and record nothing, for what
    cannot be (a path that does not exist, or does), and the recorder's failure if it has failed. That is

    * Fenced: a later owner has taken the log over. What was not durable yet is not, and will not be.
    * any other error: it is not known whether what was not durable yet is.

    Without an `authority`, an author that finds its fence gone stops, because it cannot know better.
    """

    def __init__(
        self,
        client: JournalClient,
        recovery: Recovery,
        *,
        log: str = "",
        authority: Authority | None = None,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        patience: float = DEFAULT_PATIENCE,
        clock: Clock | None = None,
    ) -> None:
        """`log` is the log to record into if that is not the recovered one: a fork of it.

        An append is repeated for `patience` seconds.
        """
        if recovery.handoff is None:
            raise InvalidInput(f"{recovery.log} was played to its end but not taken over, so it cannot be recorded to")
        self.log = log or recovery.log
        self.directory = recovery.directory
        self.author = recovery.handoff.author
        self._client = client
        self._authority = authority
        self._batch_bytes = batch_bytes
        self._patience = patience
        self._clock: Clock = clock or SystemClock()
        self._fsm = recovery.fsm
        self._handoff = recovery.handoff
        self._check = pb.LabelSelector(include=fence_of(self.author))
        self._queue: deque[_Group | _Gate | _Mark] = deque()
        self._group: _Group | None = None
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._sender: asyncio.Task[None] | None = None
        first = Operation(recovery.handoff.seq_no, recovery.handoff.checksum, self.author)
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
        """Stop. What is not durable yet may or may not become so; its barriers are cancelled."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        self._failure = self._failure or InvalidInput(f"the recorder of {self.log} is closed")

    # -- What is recorded ---------------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is recorded within the block is one append. An exception in it makes the recorder fail."""
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
        """A new, empty file is at `path`, in place of what was there."""
        path = self._tracked(path)
        self._check_place(path)
        with self.together():
            earlier = self._fsm.paths.get(path)
            if earlier is not None:
                self._record(Unlink(earlier, path))
            self._record(Create(path))
            return self._fsm.paths[path]

    def write(self, fnode: Fnode, offset: int, content: bytes) -> None:
        """`content` was written at byte `offset` of a file."""
        if offset < 0:
            raise InvalidInput(f"{offset} is no offset within a file", field="offset")
        if not self._fsm.paths_of(fnode):
            raise InvalidInput(f"there is no file {fnode} in {self.log}", field="fnode")
        self._record(Write(fnode, offset, len(content)), content)

    def remove(self, path: str) -> None:
        """The file's path is gone, and with its last path the file."""
        path = self._tracked(path)
        self._record(Unlink(self.fnode_of(path), path))

    def link(self, source: str, target: str) -> None:
        """The file at `source` is also at `target`, where nothing was."""
        target = self._tracked(target)
        if target in self._fsm.paths:
            raise InvalidInput(f"{target} exists in {self.log}", field="target")
        self._check_place(target)
        self._record(Link(self.fnode_of(source), target))

    def rename(self, source: str, target: str) -> None:
        """The file at `source` is at `target` instead, in place of what was there.

        Where the target is a property, its content is read from the source.
        """
        source, target = self._tracked(source), _normal(target)
        fnode, earlier = self.fnode_of(source), self._fsm.paths.get(target)
        if earlier == fnode:
            return  # As in a file system: two paths of one file stay.
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
        """The file at `path`. Raises InvalidInput when there is none."""
        fnode = self._fsm.paths.get(_normal(path))
        if fnode is None:
            raise InvalidInput(f"there is no {_normal(path)} in {self.log}", field="path")
        return fnode

    def exists(self, path: str) -> bool:
        """Whether a file is at `path`."""
        return _normal(path) in self._fsm.paths

    @property
    def pending_bytes(self) -> int:
        """Content that is recorded and not durable yet."""
        return self._pending_bytes

    @property
    def has_failed(self) -> bool:
        """Whether nothing can be recorded any more."""
        return self._failure is not None

    @property
    def write_head(self) -> int:
        """What is recorded next comes to lie at or after this offset of the log."""
        return self._proven.end

    def after(self, wait_for: Sequence[Awaitable[object]]) -> None:
        """What is recorded from here on is appended once all of these are done, and never if one of them raises.

        The recorder then fails with what it raised.
        """
        self._check_usable()
        if wait_for:
            self._put(_Gate(wait_for))

    def barrier(self) -> asyncio.Future[None]:
        """Done once all that was recorded so far is durable, in a log that is still this author's.

        It raises the recorder's failure otherwise. What is recorded later does not hold it up.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_retrieve)
        if self._failure is not None:
            done.set_exception(self._failure)
        else:
            self._put(_Mark(done))
        return done

    async def hints(self) -> Hints:
        """Hints to the files as they are now, once all of that is durable.

        Raises InvalidInput for a fork into which no file was written yet: nothing would lead players to it.
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
        """No file may be where others have a folder, or below a file: no player could lay such files out."""
        for other in self._fsm.paths:
            if other != leaving and (other.startswith(f"{path}/") or path.startswith(f"{other}/")):
                raise InvalidInput(f"{path} and {other} cannot both be files in {self.log}", field="path")

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _record(self, change: Change, content: bytes = b"") -> None:
        self._check_usable()
        fsm = self._fsm
        op = Operation(fsm.next_seq_no, fsm.next_checksum, self.author, change, self.log, self.write_head)
        payload = op.to_payload()
        verdict = fsm.apply(op, payload)
        if verdict is not Verdict.APPLIED:
            raise InvalidInput(f"{change} cannot be recorded in {self.log}: {verdict.value}")
        group = self._group or _Group(self._chain)
        group.pieces.append(encode_frame(payload))
        if content:
            group.pieces.append(content)
        group.size += len(content) + len(payload)
        group.chain = self._chain
        if self._group is None:
            self._put(group)

    # -- What is appended ---------------------------------------------------------------------------------------------

    @property
    def _chain(self) -> Chain:
        return Chain(self._fsm.next_seq_no, self._fsm.next_checksum)

    def _put(self, item: _Group | _Gate | _Mark) -> None:
        self._queue.append(item)
        if isinstance(item, _Group):
            self._pending_bytes += item.size
        self._wake.set()

    async def _send(self) -> None:
        marks: list[_Mark] = []
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                # One turn of the loop, so that what is recorded together goes together.
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
            self._settle(marks, None)
            raise
        except Exception as error:  # noqa: BLE001  A gate may raise anything; it is for those that wait.
            self._fail(error)
            self._settle(marks, error)

    def _next_batch(self) -> tuple[list[_Group], list[_Mark]]:
        groups: list[_Group] = []
        marks: list[_Mark] = []
        size = 0
        while self._queue:
            item = self._queue[0]
            if isinstance(item, _Gate):
                break
            if isinstance(item, _Mark):
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

    def _settle(self, marks: list[_Mark], error: BaseException | None) -> None:
        """Nothing more is appended: say so to all that wait for it."""
        for item in (*marks, *self._queue):
            if isinstance(item, _Mark) and not item.done.done():
                if error is None:
                    item.done.cancel()
                else:
                    item.done.set_exception(error)
        self._queue.clear()

    async def _append(self, groups: list[_Group]) -> None:
        """Return once the groups are durable, in their place of this author's history.

        Without groups nothing is appended, but the fence is checked.
        """
        pieces = [piece for group in groups for piece in group.pieces]
        goal = groups[-1].chain if groups else self._proven.chain
        retry = Retry(self._patience)
        unknown = False
        while True:
            try:
                result = await self._client.append(
                    self.log, pieces or b"", check_registers=self._check, patience=self._patience
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
                    return  # An earlier try was applied before the log was taken over: the new owner has it.
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

    async def _reaches(self, goal: Chain, end: int) -> bool:
        """Whether this author's history goes on to `goal` in what lies between its last append and offset `end`."""
        proven = self._proven
        return await follow(self._client, self.log, proven.end, end, self.author, proven.chain, goal)

    async def _restore_fence(self, result: AppendResult, goal: Chain) -> None:
        """An append was answered, but this author's fence was not in the registers: return if it counts all the same.

        It does when this author still owns the log by the word of the authority, when its earlier content is where it
        was, and when no other author's operation came in between. The fence is put back first, so that none can come in
        later. A new owner claims the log before it appends: whoever claims it after our last look finds our append.
        """
        _log.warning("recorder.fence_lost", log=self.log, author=self.author, offset=result.begin)
        if self._authority is None:
            raise Fenced(
                f"recovery log {self.log}: the fence of author {self.author:#x} is gone, and there is no authority to "
                "ask whether another has taken over; stop this one"
            )
        await self._check_owner(self._authority)
        end = await self._put_fence(self._check)
        await check_still_there(self._client, self.log, self._proven)
        if not await self._reaches(goal, end):
            raise CorruptData(f"{self.log} does not hold what author {self.author:#x} appended to it; recover the log")
        await self._check_owner(self._authority)

    async def _replace_fence(self, refusal: RegisterMismatch) -> None:
        """An append was refused since the fence is another's: return once this author's is back, or raise Fenced.

        It may be that of a late handoff: of a process that claimed the log, hung, and appended its handoff when the log
        had long been taken over in its stead. Handoffs check no registers, so that it got in; but it is out of place,
        and took the log from nobody. Whoever may take over claims the log first, so the authority tells such a one from
        a later owner; and one that knows of no authority is told by its handoff, which is in place.
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
        """Set this author's fence where registers satisfy `check`, and return where the log ends then."""
        # Out of every sequence, so that all players pass over it.
        mark = encode_frame(Operation(0, 0, self.author).to_payload())
        try:
            result = await self._client.append(
                self.log,
                mark,
                check_registers=check,
                union_registers=fence_of(self.author),
                retry_unknown=True,
                patience=self._patience,
            )
        except RegisterMismatch as error:
            if author_of(error.registers) != self.author:
                raise Fenced(
                    f"recovery log {self.log} was taken over while its fence was gone; stop this one"
                ) from error
            return await self._client.head(self.log)  # An earlier try was applied, and its answer lost.
        return result.end

    async def _check_owner(self, authority: Authority) -> None:
        owner = await authority.current()
        if owner is None or owner.author != self.author:
            raise taken_over(self.log, self.author, owner)

    async def _fork(self) -> None:
        """Begin to record into another log than the recovered one: a no-op in its place, and the fence."""
        noop = Operation(self._fsm.next_seq_no, self._fsm.next_checksum, self.author, log=self.log)
        payload = noop.to_payload()
        self._fsm.apply(noop, payload)
        result = await self._client.append(
            self.log, encode_frame(payload), union_registers=fence_of(self.author), retry_unknown=True
        )
        self._proven = Proven(result.begin, result.end, result.sum, self._chain)


def _normal(path: str) -> str:
    """The path as it is recorded: with a leading slash, and nothing superfluous. Raises InvalidInput."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or parts[0] == STAGING or "\0" in path:
        raise InvalidInput(f"{path!r} is no path of a file below the recorded directory", field="path")
    return posixpath.join("/", *parts)


def _retrieve(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()  # A failure reaches callers by the next barrier, too.
