"""The replication pipeline: sends an append's content and proposals to the spools of all replicas.

A pipeline is a list of `ReplicaStream`s in the order of its Route's members. One of them is the broker's own spool
(`LocalStream`). The others reach peers over Replicate RPCs (`coranto_broker.replication.peers`). Sending never
suspends: streams to peers queue, and `drain` waits until their queues are short again. Responses arrive in the order of
requests.

The two ends have separate owners (seed 001). The owner of the pipeline owns the *send* end. After an append has sent
its proposal, it takes a `Turn` for the *receive* end and hands the pipeline over. It reads its acknowledgements after
all earlier turns. So several appends are in flight.
"""

from __future__ import annotations

import asyncio
import errno
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from coranto.effects import Bytes
from coranto.errors import CorantoError, InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.labels import takes_whole_lines
from coranto.specs.durability import NO_DEMAND, Durability, ReplicaAnswer, demand_of, durability_of, unmet
from coranto.wire import protocol_pb2 as pb
from coranto_broker.ownership import Invalidated, Signal
from coranto_broker.recovery.in_sync_records import StoredRecord
from coranto_broker.rpc.rolled_back import DiskFull, RolledBack
from coranto_broker.spool.durable_spool import DurableSpool, Fsync
from coranto_broker.spool.steady import Steady

Ask = pb.ReplicateRequest.Ask
_NOTHING, _HELD, _SYNC = Ask.NOTHING, Ask.HELD, Ask.SYNC  # Looking them up is slow.

SHUTDOWN_SECONDS = 5.0
"""The maximum wait for replicas when a pipeline shuts down."""


class ReplicationFailed(CorantoError):
    """A replica failed or sent an invalid answer. The outcome of the append is unknown."""

    retriable = True


def rolled_back(problem: Exception, what: str = "nothing was applied") -> RolledBack:
    """Return the error for an append that failed before any replica was asked to commit it."""
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"the disk is full, and nothing was applied: {problem}. Make room there; then try again")
        cause = cause.__cause__
    return RolledBack(f"{what}: {problem}")


class Extension:
    """Content that extends the fragment, and the proposal that commits it: one message for all peers, encoded once."""

    __slots__ = ("_encoded", "ask", "content", "proposal", "readable", "registers", "traceparent")

    def __init__(
        self,
        content: Bytes,
        proposal: Fragment,
        registers: pb.LabelSet,
        readable: int,
        ask: Ask.ValueType,
        traceparent: str = "",
    ) -> None:
        """All replicas have the journal up to `readable`, which is 0 if unknown."""
        self.content = content
        self.proposal = proposal
        self.registers = registers
        self.readable = readable
        self.ask = ask
        self.traceparent = traceparent
        self._encoded = b""

    def encoded(self) -> bytes:
        """Return the encoded message for peers."""
        if not self._encoded:
            request = pb.ReplicateRequest(content=bytes(self.content), acknowledge=True, readable=self.readable)
            self.proposal.fill(request.proposal)
            request.registers.CopyFrom(self.registers)
            if self.ask != _NOTHING:
                request.ask = self.ask
            if self.traceparent:
                request.traceparent = self.traceparent
            self._encoded = request.SerializeToString()
        return self._encoded


class ReplicaStream(Protocol):
    """One replica of a pipeline. After a method has failed, it is not called again."""

    def write(self, content_delta: int, content: Bytes) -> None:
        """Send content."""
        ...

    @property
    def is_open(self) -> bool:
        """False once the stream is known to be closed."""
        ...

    @property
    def tells_synced(self) -> bool:
        """True if acknowledgements report synced content. False before the first acknowledgement."""
        ...

    def propose(
        self,
        proposal: Fragment,
        registers: pb.LabelSet,
        *,
        header: pb.Header | None,
        acknowledge: bool,
        ask: Ask.ValueType = Ask.NOTHING,
        traceparent: str = "",
    ) -> None:
        """Send a proposal. With `acknowledge`, its response will be read, and answers `ask`.

        `traceparent` is the context of its span, if it is sampled.
        """
        ...

    def extend(self, extension: Extension) -> None:
        """Send content and the proposal that commits it. Its response will be read."""
        ...

    def readable(self, offset: int) -> None:
        """Tell the replica that every replica has the journal's content up to `offset`."""
        ...

    async def drain(self) -> None:
        """Return once the queue of unsent content is short enough."""
        ...

    async def acknowledgement(self) -> pb.ReplicateResponse:
        """Return the next response that was requested."""
        ...

    def close_send(self) -> None:
        """Half-close the stream."""
        ...

    async def closed(self) -> None:
        """Wait until the replica has closed its side. Any further response is an error."""
        ...

    def abort(self) -> None:
        """Stop waiting for the replica. Pending reads from it fail."""
        ...


class LocalReplica(Protocol):
    """The part of this broker's replica that acknowledgements report."""

    @property
    def held_from(self) -> int: ...

    async def force(self) -> int: ...


async def complete(
    response: pb.ReplicateResponse, spool: DurableSpool, replica: LocalReplica | None, version: int, ask: Ask.ValueType
) -> None:
    """Sync to disk as the spool's policy and `ask` demand, and complete an acknowledgement with the state of the disk.

    `version` is the spool's version with the proposal. Raises OSError if the disk fails.
    """
    if spool.fsync is Fsync.COMMIT:
        await spool.flush_commits()
    if ask == _SYNC and replica is not None:
        response.held_from = await replica.force()
    elif ask != _NOTHING and replica is not None:
        response.held_from = replica.held_from
    if spool.is_short_of_space:
        response.short_of_room = True
    if ask != _HELD and spool.is_on_disk(version):  # Completed fragments may be on the disk only in part.
        response.synced = True


class LocalStream:
    """The broker's own spool as a replica of the pipeline."""

    is_open = tells_synced = True

    def __init__(self, spool: DurableSpool, replica: LocalReplica | None = None) -> None:
        """`replica` has the completed fragments, if any."""
        self._spool = spool
        self._replica = replica
        self._responses: deque[tuple[pb.ReplicateResponse, int, Ask.ValueType]] = deque()
        self._revision = 0
        self._failure: OSError | None = None

    def write(self, content_delta: int, content: Bytes) -> None:
        self._spool.write(content_delta, content)

    def propose(
        self,
        proposal: Fragment,
        registers: pb.LabelSet,
        *,
        header: pb.Header | None,
        acknowledge: bool,
        ask: Ask.ValueType = Ask.NOTHING,
        traceparent: str = "",
    ) -> None:
        if header is not None:
            self._revision = header.etcd.revision
        try:
            response = self._spool.propose(proposal, registers, primary=True, revision=self._revision).response()
        except OSError as error:
            self._failure = error
            raise
        if acknowledge:
            self._responses.append((response, self._spool.version, ask))
        elif response.status != pb.OK:
            raise ReplicationFailed(f"the spool of {proposal.journal} refused a proposal made from itself")

    def extend(self, extension: Extension) -> None:
        """Only queue the response, because the pipeline has already committed the content to the spool."""
        self._responses.append((pb.ReplicateResponse(status=pb.OK), self._spool.version, extension.ask))

    def readable(self, offset: int) -> None:
        self._spool.publish_through(offset)

    async def drain(self) -> None:
        await self._spool.wait_for_capacity()

    async def acknowledgement(self) -> pb.ReplicateResponse:
        if not self._responses:
            raise ReplicationFailed("the proposal could not be made durable") from self._failure
        response, version, ask = self._responses.popleft()
        await complete(response, self._spool, self._replica, version, ask)
        return response

    def close_send(self) -> None:
        self._spool.roll_back()

    async def closed(self) -> None:
        return

    def abort(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The replicas' answers to a synchronizing proposal.

    If `roll_to` is not None, propose again, rolled to that offset, with the `registers` of the replica that is ahead,
    if any. If `read_through` is not 0, a peer has a different Route at that etcd revision. With the defaults of both,
    all replicas agree.
    """

    roll_to: int | None = None
    registers: pb.LabelSet | None = None
    read_through: int = 0


class Turn:
    """A place in the order of reading acknowledgements."""

    def __init__(self, before: Turn | None) -> None:
        self._before = before
        self._waiters: list[asyncio.Future[object]] = []
        self.is_done = False

    async def wait(self) -> None:
        """Return once all earlier turns are done."""
        before, self._before = self._before, None  # Otherwise each turn would reference all earlier ones.
        if before is not None:
            await before.finished()

    async def finished(self, until: Signal | None = None) -> None:
        """Return once this turn is done. Raises Invalidated if `until` fires first."""
        if self.is_done:
            return
        if until is not None and until.fired:
            raise Invalidated
        waiter: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if until is None:
            await waiter
            return
        until.add(waiter)
        try:
            await waiter
        finally:
            until.discard(waiter)

    def done(self) -> None:
        """End this turn, so that the next one may read."""
        self.is_done = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


class SteadyPipeline(NamedTuple):
    """The range where plain appends extend the fragment without a roll.

    It is valid while the fragment index has the change count `changes`, and `store` (if any) is healthy.
    """

    range: Steady
    changes: int
    store: str


class Pipeline:
    """A started pipeline, which owns the replica's spool until `close_send`."""

    def __init__(
        self,
        header: pb.Header,
        spool: DurableSpool,
        streams: Sequence[ReplicaStream],
        names: Sequence[str],
        renew_at: float = math.inf,
        reading: StoredRecord | None = None,
    ) -> None:
        """`header` is the header of the pipeline's resolution.

        `streams` and `names` are in the order of its Route's members. `reading` is the in-sync record as the primary
        last read it. At `renew_at` (monotonic) another pipeline should replace this one, since its streams end soon.
        """
        self.header = header
        self.renew_at = renew_at
        self.spool = spool
        self.reading = reading
        self.checked_record = reading.record if reading is not None else None
        """The record that the primary has checked its spool against. Other replicas use this record or a later one."""
        self.recorded = False
        """True if the in-sync record names this pipeline's replicas, so that the pipeline may accept content."""
        self._fits: Callable[[], object] = lambda: None
        self.steady: SteadyPipeline | None = None
        """The cached range where appends need no decision (`coranto_broker.append.batch`)."""
        self._streams = list(zip(names, streams, strict=True))
        self.commits_inline = len(streams) == 1 and spool.fsync is not Fsync.COMMIT
        """True if acknowledgements wait neither for another broker nor for the disk."""
        self.demand = NO_DEMAND
        """The demand of the journal's labels on acknowledgements."""
        self.demand_unmet = ""
        """The reason why the replicas cannot meet the demand, or an empty string."""
        self.refusal = ""
        """The reason for refusing appends with content: an unmet demand or a full disk. Otherwise an empty string."""
        self._short_of_space = ""
        self.whole_lines = False
        """True if the journal's labels demand that each append ends with a newline."""
        self._zones = {name: name.partition("#")[0] for name in names}
        zones = len(set(self._zones.values()))
        self._unsynced, self._synced = Durability(len(names), zones), Durability(len(names), zones, len(names), zones)
        self._local = names[header.route.primary]
        self._revision = header.etcd.revision
        self._send_error: ReplicationFailed | None = None
        self._receive_errors: dict[str, ReplicationFailed] = {}
        self._last_turn: Turn | None = None
        self._turns: deque[Turn] = deque()  # All turns under way, and perhaps some that are done.
        self._header_sent = False
        self._sent_readable = -1  # The last `readable` offset that was sent to replicas.

    @property
    def route(self) -> pb.Route:
        return self.header.route

    @property
    def names(self) -> list[str]:
        """The names of the replicas, in the order of the Route."""
        return [name for name, _ in self._streams]

    @property
    def local_only(self) -> bool:
        """True if this broker's spool is the only replica."""
        return len(self._streams) == 1

    @property
    def error(self) -> ReplicationFailed | None:
        """The failure of the pipeline, if any, after which it cannot be used.

        Failures to receive take precedence, because a peer sends its reason before it ends the stream.
        """
        if not self._receive_errors:
            return self._send_error
        return next(iter(self._receive_errors.values()))

    def replace(self) -> None:
        """Let the next append replace this pipeline."""
        self.renew_at = -math.inf

    def is_usable(self, monotonic: float) -> bool:
        """Return True if no replica has failed, and the pipeline does not have to be replaced yet."""
        return self.error is None and monotonic < self.renew_at and (self.local_only or self._closed_stream() is None)

    def _closed_stream(self) -> str | None:
        """Return the name of a replica with a closed stream, or None."""
        return next((name for name, stream in self._streams if not stream.is_open), None)

    def mark_fitting(self, resolution: object) -> None:
        """Record that Route, assignments and number of replicas are correct for this resolution.

        Later appends with the same resolution need not check them again.
        """
        self._fits = weakref.ref(resolution)  # Weak, since a resolution refers to a state of the key space.
        self.steady = None

    def adopt_demand(self, labels: pb.LabelSet) -> None:
        """Adopt the demand of the journal's labels. Call it once the replicas have synchronized."""
        reports = [(self._zones[name], stream.tells_synced) for name, stream in self._streams]
        try:
            self.demand = demand_of(labels)
            self.demand_unmet = unmet(self.demand, reports)
        except InvalidInput as error:
            self.demand, self.demand_unmet = NO_DEMAND, f"the journal's labels are invalid: {error}"
        self.refusal = (self.demand_unmet if self.demand.refuses else "") or self._short_of_space
        self.whole_lines = takes_whole_lines(labels)
        self.commits_inline = self.local_only and self.spool.fsync is not Fsync.COMMIT and not self.demand_unmet

    def fits(self, resolution: object) -> bool:
        """Return True if `mark_fitting` was called with this object, and the pipeline may accept content."""
        return self.recorded and self._fits() is resolution

    def write(self, content_delta: int, content: Bytes) -> None:
        """Send content to all replicas. Failures are in `error`."""
        for name, stream in self._streams:
            if self._send_error is not None:
                return
            try:
                stream.write(content_delta, content)
            except (OSError, CorantoError) as error:
                self._failed_to_send(name, error)

    def propose(
        self,
        proposal: Fragment,
        registers: pb.LabelSet,
        *,
        acknowledge: bool,
        ask: Ask.ValueType = Ask.NOTHING,
        traceparent: str = "",
    ) -> None:
        """Send a proposal to all replicas. The first one has the pipeline's header. Failures are in `error`.

        Reachable replicas get it even if another has failed, so that they can roll back.
        """
        header = None if self._header_sent else self.header
        self._header_sent = True
        for name, stream in self._streams:
            try:
                stream.propose(
                    proposal, registers, header=header, acknowledge=acknowledge, ask=ask, traceparent=traceparent
                )
            except (OSError, CorantoError) as error:
                self._failed_to_send(name, error)

    async def drain(self) -> None:
        """Wait until every stream accepts more. Failures are in `error`."""
        for name, stream in self._streams:
            try:
                await stream.drain()
            except CorantoError as error:
                self._failed_to_send(name, error)

    async def written(self) -> None:
        """Wait until this broker's spool has written all content. Failures are in `error`."""
        try:
            await self.spool.written()
        except OSError as error:
            self._failed_to_send(self._local, error)

    def join(self) -> None:
        """Do the same as `written`, but block the event loop."""
        try:
            self.spool.join()
        except OSError as error:
            self._failed_to_send(self._local, error)

    def commit(self, content: Bytes, registers: pb.LabelSet) -> Fragment:
        """Write, propose and read the acknowledgement in one call. Requires `commits_inline` and `is_idle`.

        Raises RolledBack if writing fails. The pipeline cannot be used afterwards.
        """
        spool = self.spool
        try:
            proposal = spool.commit(content, registers, self._revision)
        except (OSError, CorantoError) as error:
            raise rolled_back(self._failed_to_send(self._local, error)) from error
        spool.publish(proposal)
        spool.settle(proposal.end)
        return proposal

    def extend(
        self, content: Bytes, registers: pb.LabelSet, ask: Ask.ValueType = Ask.NOTHING, traceparent: str = ""
    ) -> Fragment:
        """Send content and the proposal that commits it to all replicas. Returns the proposal.

        For a pipeline that `fits` and has no other content. Raises RolledBack if this broker's spool fails, or if
        another replica's stream is known to be closed: then no replica was asked, and the pipeline cannot be used
        afterwards. Other failures are in `error`.
        """
        spool = self.spool
        begin = spool.fragment.begin
        if (closed := self._closed_stream()) is not None:
            raise rolled_back(self._failed_to_send(closed, ReplicationFailed("the stream is broken")))
        try:
            proposal = spool.commit(content, registers, self._revision)
        except (OSError, CorantoError) as error:
            raise rolled_back(self._failed_to_send(self._local, error)) from error
        spool.settle(begin)  # A pipeline accepts content only after all replicas have all earlier fragments.
        extension = Extension(content, proposal, registers, max(self._sent_readable, 0), ask, traceparent)
        for name, stream in self._streams:
            try:
                stream.extend(extension)
            except CorantoError as error:
                self._failed_to_send(name, error)
        return proposal

    def has_capacity(self, limit: int) -> bool:
        """Return True if fewer than `limit` proposals wait for acknowledgements."""
        self._forget_done()
        return len(self._turns) < limit

    @property
    def is_idle(self) -> bool:
        """True if all requested acknowledgements were read."""
        return self._last_turn is None or self._last_turn.is_done

    def turn(self) -> Turn:
        """Take the next turn to read acknowledgements. Call `done` on it in any case."""
        before = self._last_turn
        self._last_turn = Turn(None if before is None or before.is_done else before)
        self._forget_done()
        self._turns.append(self._last_turn)
        return self._last_turn

    async def wait_for_capacity(self, limit: int, until: Signal | None) -> None:
        """Return once fewer than `limit` proposals wait for acknowledgements. For the owner of the pipeline.

        Raises Invalidated if `until` fires first.
        """
        self._forget_done()
        while len(self._turns) >= limit:
            await self._turns[-limit].finished(until)
            self._forget_done()

    def _forget_done(self) -> None:
        while self._turns and self._turns[0].is_done:
            self._turns.popleft()

    async def settled(self) -> None:
        """Wait until all requested acknowledgements were read."""
        if self._last_turn is not None:
            await self._last_turn.finished()

    async def gather_ok(self, proposal: Fragment, since: int | None = None) -> Durability:
        """Read an acknowledgement of every replica. Any answer but OK is a failure in `error`.

        Once every replica holds the proposal, readers see it on all of them. Returns the durability of the proposal or,
        with `since`, of all content from that offset on, which the replicas were asked about.
        """
        responses, synced = await self._gather(), 0
        for name, response in responses:
            synced += response.synced
            if response.status != pb.OK:
                self._failed_to_receive(name, f"answered {pb.Status.Name(response.status)}")
        if self.error is None and self.recorded:
            self.spool.publish(proposal)
            self.spool.settle(proposal.end)
            self._send_readable(proposal.end)
        if since is None and synced in (0, len(self._streams)):
            return self._synced if synced else self._unsynced
        return durability_of(
            [
                ReplicaAnswer(self._zones[name], each.synced, each.held_from if each.HasField("held_from") else None)
                for name, each in responses
            ],
            since,
        )

    async def gather_sync(self) -> SyncResult:
        """Read the answers to a synchronizing proposal."""
        roll_to: int | None = None
        registers: pb.LabelSet | None = None
        read_through = 0
        for name, response in await self._gather():
            theirs = response.fragment
            if response.status == pb.WRONG_ROUTE:
                revision = response.header.etcd.revision
                if revision > self.header.etcd.revision:
                    read_through = max(read_through, revision)
                else:
                    self._failed_to_receive(name, f"disputes the route, but only at etcd revision {revision}")
            elif response.status == pb.PROPOSAL_MISMATCH and theirs.end > self.spool.end:
                if roll_to is None or theirs.end > roll_to:
                    roll_to, registers = theirs.end, response.registers
            elif (
                response.status == pb.PROPOSAL_MISMATCH
                and theirs.begin == theirs.end == self.spool.end
                and self.spool.fragment.length
            ):
                # The replica lacks content of this fragment and cannot extend it, so begin a new one.
                if roll_to is None:
                    roll_to = theirs.end
            elif response.status != pb.OK:
                self._failed_to_receive(
                    name,
                    f"answered {pb.Status.Name(response.status)} with [{theirs.begin}, {theirs.end}) "
                    f"to the proposal of {self.spool.fragment}",
                )
        return SyncResult(roll_to, registers, read_through)

    def show(self) -> None:
        """Make the content that the replicas have agreed on visible to readers of every replica."""
        self.spool.publish(self.spool.fragment)
        self._send_readable(self.spool.end)

    def _send_readable(self, offset: int) -> None:
        if offset > self._sent_readable:
            self._sent_readable = offset
            for _, stream in self._streams:
                stream.readable(offset)

    def close_send(self) -> DurableSpool:
        """Half-close all streams, roll back uncommitted content, and return the spool. Call once."""
        for name, stream in self._streams:
            try:
                stream.close_send()
            except (OSError, CorantoError) as error:
                self._failed_to_send(name, error)
        return self.spool

    async def shut_down(self, turn: Turn) -> None:
        """Wait for acknowledgements in flight, then until all replicas have closed their streams.

        Call `close_send` first, and take `turn` before that. Streams of replicas that do not answer within
        SHUTDOWN_SECONDS are aborted.
        """
        waiting = asyncio.ensure_future(turn.wait())
        try:
            _, pending = await asyncio.wait((waiting,), timeout=SHUTDOWN_SECONDS)
            if pending:
                self._abort()
            await waiting
            try:
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await self.gather_end()
            except TimeoutError:
                self._abort()
        finally:
            waiting.cancel()
            turn.done()

    def _abort(self) -> None:
        for _, stream in self._streams:
            stream.abort()

    async def gather_end(self) -> None:
        """Wait until every replica has closed its stream. Streams that have failed are aborted immediately."""
        # A replica that answers an error and then hangs must not keep its call alive.
        failed = set(self._receive_errors)
        for name, stream in self._streams:
            if name in failed:
                stream.abort()
        for name, stream in self._streams:
            if name not in failed:
                try:
                    await stream.closed()
                except CorantoError as error:
                    self._failed_to_receive(name, str(error))

    async def _gather(self) -> list[tuple[str, pb.ReplicateResponse]]:
        responses = []
        for name, stream in self._streams:
            if name not in self._receive_errors:
                try:
                    responses.append((name, await stream.acknowledgement()))
                except (OSError, CorantoError) as error:
                    self._failed_to_receive(name, str(error), error)
        if not self.local_only:  # A single spool rolls back content that it cannot write.
            self._reject_without_space([name for name, each in responses if each.short_of_room])
        return responses

    def _reject_without_space(self, short: list[str]) -> None:
        """Refuse appends with content while replicas are short of space. The next append's pipeline checks it again."""
        if short:
            self._short_of_space = (
                f"the disk of {' and of '.join(short)} is nearly full (disk_reserve_bytes), so nothing was applied. "
                "Make room there, or end that broker, so that another one takes over"
            )
            self.replace()

    def _failed_to_send(self, name: str, error: Exception) -> ReplicationFailed:
        if self._send_error is None:
            self._send_error = ReplicationFailed(f"sending to {name}: {error}")
            self._send_error.__cause__ = error
        return self._send_error

    def _failed_to_receive(self, name: str, problem: str, cause: Exception | None = None) -> None:
        if name not in self._receive_errors:
            error = self._receive_errors[name] = ReplicationFailed(f"answer of {name}: {problem}")
            error.__cause__ = cause
