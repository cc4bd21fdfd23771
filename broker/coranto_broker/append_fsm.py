"""The append state machine: every append is driven through these states (seed 001 "Append State Machine").

Beside the seed's states there are UPDATE_SUSPEND, because journals can be suspended and woken by appends, and FOLLOW,
because appends that wait for the pipeline may go along with the one that has it (`coranto_broker.group_commit`).

`TRANSITIONS` is the whole graph and `_HANDLERS` says who acts in each state. A handler does one state's work and names
the next; going anywhere else than the table allows is a bug and raises. Every blocking state also ends in ERROR: when
it fails, or (by cancellation of the task) when the client goes away.

What an append holds on its way: nothing until it has acquired the replica's pipeline; then the pipeline, through
synchronization and streaming; then, having sent its commit or roll-back, only its turn to read acknowledgements.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from coranto.auth import Claims
from coranto.coordination.etcd import Coordinator, KeyValue, Op, Put, unmodified
from coranto.effects import Bytes, Clock
from coranto.errors import CorantoError, InvalidInput, StoreError, Unavailable
from coranto.fragments import Fragment
from coranto.specs import may_write, routes_equivalent
from coranto.wire import protocol_pb2 as pb
from coranto_broker import in_sync, preconditions
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.content import AppendMessage, Content
from coranto_broker.group_commit import (
    PROPOSALS_IN_FLIGHT,
    Course,
    Member,
    Refusal,
    TakenAlong,
    Tokens,
    Whole,
    commit_of,
    gather,
)
from coranto_broker.in_sync import Takeover
from coranto_broker.in_sync_records import InSyncRecords, Reading
from coranto_broker.ownership import Invalidated, Signal
from coranto_broker.pipeline import Pipeline, ReplicationFailed
from coranto_broker.resolver import Resolution, Resolver
from coranto_broker.spool import Hash, new_sum
from coranto_broker.spool_files import DurableSpool


class State(enum.Enum):
    """Where an append is."""

    __hash__ = object.__hash__  # That of `Enum` is written in Python, and each step looks up two tables.

    RESOLVE = "resolve"
    ACQUIRE_PIPELINE = "acquire pipeline"
    START_PIPELINE = "start pipeline"
    SEND_PIPELINE_SYNC = "send pipeline sync"
    RECV_PIPELINE_SYNC = "receive pipeline sync"
    UPDATE_ASSIGNMENTS = "update assignments"
    AWAIT_DESIRED_REPLICAS = "await desired replicas"
    VALIDATE_PRECONDITIONS = "validate preconditions"
    UPDATE_SUSPEND = "update suspend"
    FOLLOW = "follow"
    STREAM_CONTENT = "stream content"
    READ_ACKNOWLEDGEMENTS = "read acknowledgements"
    ERROR = "error"
    PROXY = "proxy"
    FINISHED = "finished"


TERMINAL = frozenset({State.ERROR, State.PROXY, State.FINISHED})

TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.RESOLVE: frozenset(
        {
            State.ACQUIRE_PIPELINE,  # We are the primary.
            State.START_PIPELINE,  # We are, and own the pipeline already.
            State.AWAIT_DESIRED_REPLICAS,  # We are not, and shall proxy.
            State.UPDATE_SUSPEND,  # The journal is fully suspended, and shall be woken.
            State.ERROR,
        }
    ),
    State.ACQUIRE_PIPELINE: frozenset(
        {
            State.START_PIPELINE,
            State.FOLLOW,  # Another append has the pipeline, and takes this one along.
            State.RESOLVE,  # The resolution was invalidated meanwhile, or the journal's flags changed.
            State.ERROR,
        }
    ),
    State.FOLLOW: frozenset({State.FINISHED, State.ERROR}),
    State.START_PIPELINE: frozenset(
        {
            State.UPDATE_ASSIGNMENTS,  # The pipeline is good as it is.
            State.VALIDATE_PRECONDITIONS,  # It is, and an append before this one found the rest to be, too.
            State.SEND_PIPELINE_SYNC,  # There was none, or it was of an older Route.
            State.RESOLVE,  # The resolution was invalidated meanwhile.
            State.ERROR,
        }
    ),
    State.SEND_PIPELINE_SYNC: frozenset({State.RECV_PIPELINE_SYNC}),
    State.RECV_PIPELINE_SYNC: frozenset(
        {
            State.UPDATE_ASSIGNMENTS,  # All replicas agree.
            State.SEND_PIPELINE_SYNC,  # One is ahead, or cannot extend our fragment: roll, and propose again.
            State.RESOLVE,  # One knows a later Route.
            State.ERROR,
        }
    ),
    State.UPDATE_ASSIGNMENTS: frozenset(
        {
            State.AWAIT_DESIRED_REPLICAS,  # etcd says already that the Route is consistent, and who is in sync.
            State.SEND_PIPELINE_SYNC,  # The journal was closed at a later offset: go on there.
            State.RESOLVE,  # It does now, at a later revision.
            State.ERROR,
        }
    ),
    State.AWAIT_DESIRED_REPLICAS: frozenset(
        {
            State.VALIDATE_PRECONDITIONS,
            State.PROXY,  # The Route is as it should be, and another broker is its primary.
            State.RESOLVE,  # Too many replicas: the allocator is about to remove some.
            State.ERROR,  # Too few.
        }
    ),
    State.VALIDATE_PRECONDITIONS: frozenset(
        {
            State.STREAM_CONTENT,
            State.SEND_PIPELINE_SYNC,  # An explicit offset has the replicas roll to it.
            State.UPDATE_SUSPEND,  # The journal is to be suspended, or woken.
            State.RESOLVE,  # The resolution was invalidated while the stores were being listed.
            State.ERROR,
        }
    ),
    State.UPDATE_SUSPEND: frozenset({State.RESOLVE, State.ERROR}),
    State.STREAM_CONTENT: frozenset(
        {
            State.STREAM_CONTENT,
            State.READ_ACKNOWLEDGEMENTS,
            State.VALIDATE_PRECONDITIONS,  # It has no content, and confirms that content was lost.
        }
    ),
    State.READ_ACKNOWLEDGEMENTS: frozenset({State.FINISHED, State.ERROR}),
    State.ERROR: frozenset(),
    State.PROXY: frozenset(),
    State.FINISHED: frozenset(),
}


class AppendEnvironment(Protocol):
    """What appends need of their broker."""

    clock: Clock
    coordinator: Coordinator
    resolver: Resolver

    in_sync: InSyncRecords

    async def verify(self, resolution: Resolution, spool: DurableSpool) -> Reading:
        """The in-sync record, if the broker's own spool may take part in a pipeline; else raises Stranded."""
        ...

    def build_pipeline(self, resolution: Resolution, spool: DurableSpool, reading: Reading) -> Pipeline:
        """A pipeline of the resolution's Route around the broker's own spool."""
        ...

    async def store_problem(self, url: str, until: Signal | None) -> str:
        """What is wrong with a fragment store, after it has been given some time; empty when it is healthy.

        Raises Invalidated when `until` fires first.
        """
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that outlives the call that needs it."""
        ...

    def grouped(self, appends: int) -> None:
        """So many whole appends are being proposed together."""
        ...


class AppendFsm:
    """One append. `run` until content may stream, feed it what the client sends, then `finish`; `release` at the end.

    `status` and `error` say what became of it: a status other than OK is for the response, an error is of the RPC.
    """

    def __init__(
        self, environment: AppendEnvironment, request: pb.AppendRequest, claims: Claims = UNRESTRICTED
    ) -> None:
        """`request` is the first message of the stream, already validated; `claims` are its sender's."""
        self._env = environment
        self._claims = claims
        self.request = request
        self.state = State.RESOLVE
        self.status: pb.Status.ValueType = pb.OK
        self.error: CorantoError | None = None
        self.resolution: Resolution | None = None
        self.registers = pb.LabelSet()
        self.commit: Fragment | None = None
        self.store_health_error = ""
        self.whole: Whole | None = None
        """All that the client has sent, if that is little and was received before the pipeline was acquired."""
        self.total_chunks = self.delayed_chunks = 0
        self._member: Member | None = None  # Our place in the line of those that wait.
        self._members: list[Member] = []  # Those that go along with us.
        self._read_through = request.min_etcd_revision
        self._suspend: pb.JournalSpec.Suspend | None = None  # What UPDATE_SUSPEND is to write.
        self._await_change = False  # Resolve only from a later state of the key space than `resolution`'s.
        self._pipeline: Pipeline | None = None
        self._owner: Resolution | None = None  # Whose replica's pipeline we own.
        self._roll_to = 0
        self._synchronizing = False
        self._begin = self._end = 0
        self._sum: Hash | None = None
        self._committing = False
        self._proposal: Fragment | None = None
        self._asks_loss = False  # Only if this turns out to be an append of nothing it confirms a loss.
        self._loss_confirmed = False

    # -- Driving it ----------------------------------------------------------------------------------------------------

    async def run(self, until: State = State.STREAM_CONTENT) -> bool:
        """Go on until content may stream, or another state is reached (True); or else a terminal state (False)."""
        while self.state is not until:
            if self.state in TERMINAL:
                return False
            await self._step()
        return True

    def client_sent(self, message: AppendMessage) -> bool:
        """In STREAM_CONTENT, a message of the client. False when no more are wanted; then `finish`."""
        problem: CorantoError | None = None
        content = message.content
        if self._committing:
            problem = InvalidInput("expected the end of the stream after the empty message that commits")
        elif has_parameters(message):
            problem = InvalidInput("only the first message may hold more than content", field="AppendRequest.content")
        elif not content:
            self._committing = True
        elif self._asks_loss:
            self.status = pb.INDEX_HAS_GREATER_OFFSET
            return self._end_of_input(None)
        elif not may_write(self._resolved.spec) or not preconditions.may_have_content(self.request):
            self.status = pb.NOT_ALLOWED
            return self._end_of_input(None)
        else:
            self._write(content)
        if problem is not None or self._owned.error is not None:
            return self._end_of_input(problem)
        self._to(State.STREAM_CONTENT)
        return True

    def client_ended(self) -> bool:
        """In STREAM_CONTENT, the client has closed its side. Returns False; then `finish`."""
        if not self._committing:
            return self._end_of_input(InvalidInput("unexpected EOF: an empty message commits, and none was sent"))
        if self._begin == self._end and registers_change(self.request):
            return self._end_of_input(
                InvalidInput("registers change only with content: append at least one byte", field="union_registers")
            )
        if self._asks_loss:
            self._asks_loss, self._loss_confirmed = False, True
            self._to(State.VALIDATE_PRECONDITIONS)
            return False
        return self._end_of_input(None)

    def client_failed(self, problem: CorantoError) -> bool:
        """In STREAM_CONTENT, the client broke a rule or the stream. Returns False; then `finish`."""
        return self._end_of_input(problem)

    async def drain(self) -> None:
        """Let slow replicas, and our own, catch up with what was sent to them."""
        await self._owned.drain()

    async def written(self) -> None:
        """In STREAM_CONTENT, before the client's end is passed on: have everything written that it sent."""
        await self._owned.written()

    async def prepare_stream(self) -> None:
        """In STREAM_CONTENT, before the first message: roll the fragment if that is due."""
        await self._roll_if_due()
        self._begin = self._end = self._owned.spool.end
        # At the begin of a fragment, what the spool works out for the fragment is the append's sum as well.
        self._sum = new_sum() if self._owned.spool.fragment.length else None

    def commit_whole(self, tokens: Tokens) -> None:
        """In STREAM_CONTENT: write all that the client has sent, and what goes along with it, and propose to commit.

        `tokens` pay for what goes along; our own content is paid for. Then `finish`.
        """
        whole, pipeline, resolution = self.whole, self._owned, self._resolved
        assert whole is not None
        if whole.content and not (may_write(resolution.spec) and preconditions.may_have_content(self.request)):
            self.status = pb.NOT_ALLOWED
            self._end_of_input(None)
            return
        replica = resolution.require_replica
        broken = pipeline.error
        if broken is not None:
            self._end_of_input(None)
            return
        if not pipeline.recorded:  # What this one may do is not what others may.
            if whole.content:
                self.client_sent(Content(whole.content))
            if self.state is State.STREAM_CONTENT and self.client_sent(Content(b"")):
                self.client_ended()
            return
        committed = pipeline.spool.committed
        course = Course(resolution.spec, committed, replica.index.known, self._env.clock.now())
        place = course.take(self.request, len(whole.content))
        self._members = gather(replica.line, course, resolution, len(whole.content), tokens)
        content = b"".join([whole.content, *(member.whole.content for member in self._members)])
        if content:
            pipeline.write(0, content)
        if pipeline.error is not None:
            self._end_of_input(None)
            return
        fragment = committed.fragment
        self.registers = place.registers
        self.commit = commit_of(fragment, place, whole.content)
        for member in self._members:
            member.commit_to(fragment)
        self._env.grouped(1 + len(self._members))
        self._propose(pipeline.spool.next_fragment(), course.registers)

    async def finish(self) -> None:
        """Read the acknowledgements. Cancelling it does not stop the reading."""
        if self.state is State.VALIDATE_PRECONDITIONS:
            if not await self.run():
                return
            await self.prepare_stream()
            self._end_of_input(None)
        await asyncio.shield(self._env.spawn(self._step())) if self._must_outlive else await self._step()

    def release(self) -> None:
        """Give up what is still owned. Content that was streamed but not proposed is rolled back."""
        pipeline, owner = self._pipeline, self._owner
        self._pipeline = self._owner = None
        if owner is None:
            return
        if pipeline is not None and self._synchronizing:
            self._shut_down(pipeline, owner)
            pipeline = None
        elif pipeline is not None and self.state is State.STREAM_CONTENT:
            pipeline.propose(pipeline.spool.fragment, pipeline.spool.registers, acknowledge=False)
            if pipeline.error is not None:
                self._shut_down(pipeline, owner)
                pipeline = None
        self._settle(ReplicationFailed("the append that it went along with was given up"))
        owner.require_replica.pipeline.put(pipeline)

    # -- The states ----------------------------------------------------------------------------------------------------

    async def _resolve(self) -> State:
        """Find out who is primary, from a key space that is recent enough."""
        if self._await_change:
            self._await_change = False
            await self._env.resolver.wait_for_change(self._resolved)
        resolution = await self._env.resolver.resolve(
            self.request.journal,
            may_proxy=not self.request.do_not_proxy,
            require_primary=True,
            min_revision=self._read_through,
            proxy_header=self.request.header if self.request.HasField("header") else None,
            claims=self._claims,
        )
        self.resolution = resolution
        if resolution.status == pb.SUSPENDED and self.request.suspend == pb.AppendRequest.SUSPEND_RESUME:
            offset = resolution.spec.suspend.offset
            self._suspend = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.NONE, offset=offset)
            return State.UPDATE_SUSPEND
        if resolution.status != pb.OK:
            self.status = resolution.status
            return State.ERROR
        if not resolution.is_local:
            self.release()
            return State.AWAIT_DESIRED_REPLICAS
        if self._owner is not None and self._owner.replica is not resolution.replica:
            self.release()
        if self._owner is not None:
            return State.START_PIPELINE
        return State.ACQUIRE_PIPELINE

    async def _acquire_pipeline(self) -> State:
        """Wait for exclusive ownership of the replica's pipeline."""
        resolution = self._resolved
        replica, until = resolution.require_replica, resolution.invalidated
        try:
            if self.whole is None:
                self._pipeline = await replica.pipeline.take(until)
                self._owner = resolution
            else:
                await self._line_up(resolution)
        except TakenAlong:
            return State.FOLLOW
        except Invalidated:
            return State.RESOLVE
        # From here on it commits ahead of whoever looks at the journal's end after its flags have changed.
        return State.START_PIPELINE if self._env.resolver.flags_hold(resolution) else State.RESOLVE

    async def _follow(self) -> State:
        """Wait for what becomes of the group."""
        member = self._member
        assert member is not None
        problem = await member.outcome
        if problem is not None:
            raise problem
        answer = member.answer
        assert answer is not None
        self.registers = answer.registers
        if isinstance(answer, Refusal):
            self.status = answer.status
            return State.ERROR
        self.commit = member.commit
        self.total_chunks = member.whole.chunks
        return State.FINISHED

    async def _start_pipeline(self) -> State:
        """Use the pipeline if it is of our Route; otherwise build one, which takes the replica's spool."""
        resolution, owner, pipeline = self._resolved, self._require_owner, self._pipeline
        if pipeline is not None:
            fits = pipeline.fits(resolution)
            current = fits or routes_equivalent(pipeline.route, resolution.header.route)
            if pipeline.error is None and current and self._env.clock.monotonic() < pipeline.renew_at:
                self.registers = pipeline.spool.registers
                return State.VALIDATE_PRECONDITIONS if fits else State.UPDATE_ASSIGNMENTS
            self._pipeline = None
            self._shut_down(pipeline, owner)
        try:
            spool = await resolution.require_replica.spool.take(resolution.invalidated)
        except Invalidated:
            return State.RESOLVE
        try:
            reading = await self._env.verify(resolution, spool)
        except BaseException:
            resolution.require_replica.spool.put(spool)
            raise
        self.registers = spool.registers
        self._pipeline = self._env.build_pipeline(resolution, spool, reading)
        self._synchronizing = True
        return State.SEND_PIPELINE_SYNC

    async def _send_pipeline_sync(self) -> State:
        """Propose the current fragment (perhaps rolled) to every replica."""
        self._synchronizing = True
        pipeline = self._owned
        await pipeline.settled()
        proposal = preconditions.propose(
            pipeline.spool.committed, self._roll_to, self._resolved.spec.fragment, self._env.clock.now()
        )
        pipeline.propose(proposal, self.registers, acknowledge=True)
        return State.RECV_PIPELINE_SYNC

    async def _recv_pipeline_sync(self) -> State:
        """Read what the replicas say to the proposal."""
        pipeline, owner = self._owned, self._require_owner
        result = await pipeline.gather_sync()
        problem = pipeline.error
        if problem is not None:
            self._pipeline = None
            self._synchronizing = False
            self._shut_down(pipeline, owner)
            raise problem
        if result.roll_to is not None:
            self._roll_to = result.roll_to
            if result.registers is not None:
                self.registers = result.registers
            return State.SEND_PIPELINE_SYNC
        self._roll_to = 0
        self._synchronizing = False
        if result.read_through:
            self._read_through = result.read_through
            self._pipeline = None
            self._shut_down(pipeline, owner)
            return State.RESOLVE
        return State.UPDATE_ASSIGNMENTS

    async def _update_assignments(self) -> State:
        """Tell etcd that the Route is consistent, and whom it consists of in the in-sync record, unless it says so.

        Both at once: when the allocator sees that it may remove a replica, the others can already go on without it.
        """
        resolution, pipeline = self._resolved, self._owned
        route = pb.Route(members=resolution.header.route.members, primary=resolution.header.route.primary)
        stale: list[KeyValue] = [each.kv for each in resolution.assignments if not routes_equivalent(each.value, route)]
        advertise = [Put(kv.key, route.SerializeToString(deterministic=True), keep_lease=True) for kv in stale]
        may_record = not pipeline.recorded and len(route.members) >= resolution.replication
        if may_record:
            found = await self._take_over(pipeline)
            if found is Takeover.ROLL:
                assert pipeline.reading is not None
                record = pipeline.reading.record
                assert record is not None
                self._roll_to, self.registers = record.floor, record.registers or pb.LabelSet()
                return State.SEND_PIPELINE_SYNC
            may_record = found is Takeover.CLEAN
        if may_record and not await self._record(pipeline, advertise):
            return State.RESOLVE
        if not stale:
            return State.AWAIT_DESIRED_REPLICAS
        if not may_record:
            # This may lose against the allocator. Then the later revision shows what it did, and we try again.
            compares = [unmodified(each.kv) for each in resolution.assignments]
            self._read_through = (await self._env.coordinator.txn(compares, advertise)).header.revision
        return State.RESOLVE

    async def _await_desired_replicas(self) -> State:
        """Go on only with as many replicas as the journal is to have."""
        resolution = self._resolved
        members = len(resolution.header.route.members)
        if members > resolution.replication:
            self._await_change = True
            return State.RESOLVE
        if members < resolution.replication:
            self.status = pb.INSUFFICIENT_JOURNAL_BROKERS
            return State.ERROR
        if not resolution.is_local:
            return State.PROXY
        if self._pipeline is not None:
            self._pipeline.found_to_fit(resolution)
        return State.VALIDATE_PRECONDITIONS

    async def _validate_preconditions(self) -> State:
        """Check registers and offsets, once the stores are known to work and have been listed for the first time."""
        resolution, pipeline = self._resolved, self._owned
        replica = resolution.require_replica
        try:
            for url in resolution.spec.fragment.stores[:1]:  # New fragments go to the first.
                problem = await self._env.store_problem(url, resolution.invalidated)
                if problem:
                    self.status, self.store_health_error = pb.FRAGMENT_STORE_UNHEALTHY, problem
                    return State.ERROR
            if not replica.index.refreshed:
                await replica.wait_refreshed(resolution.invalidated)
        except Invalidated:
            return State.RESOLVE
        except StoreError as error:
            self.status, self.store_health_error = pb.FRAGMENT_STORE_UNHEALTHY, str(error)
            return State.ERROR
        verdict = preconditions.check(
            self.request, resolution.spec, pipeline.spool.committed, replica.index.known, self._env.clock.now()
        )
        self._roll_to = verdict.roll_to
        matters = may_write(resolution.spec) or preconditions.is_strict(self.request)
        # Nor is a suspended journal's offset rolled to: whoever brings it back may end there, and has the registers.
        lost = not pipeline.recorded and matters
        if lost and (not self.request.offset or verdict.status != pb.OK):
            # No replica is known to hold all that was acknowledged, so nobody knows the journal's head and registers.
            self.status = pb.INDEX_HAS_GREATER_OFFSET
            return State.ERROR
        if verdict.status != pb.OK:
            self.status = verdict.status
            return State.ERROR
        if lost:
            # An append of nothing at an explicit offset is an operator's word that they need not be waited for.
            if not self._loss_confirmed:
                self._roll_to, self._asks_loss = 0, True
                return State.STREAM_CONTENT
            if not verdict.resync and not await self._record(pipeline, []):
                return State.RESOLVE
        if verdict.suspend is not None:
            if verdict.roll_to:
                await self._roll_if_due()  # So that what is only here gets stored.
            self._roll_to = 0
            self._suspend = verdict.suspend
            return State.UPDATE_SUSPEND
        return State.SEND_PIPELINE_SYNC if verdict.resync else State.STREAM_CONTENT

    async def _update_suspend(self) -> State:
        """Change the journal's spec. This may lose against another change; the later revision shows what became."""
        resolution = self._resolved
        assert resolution.item is not None
        spec = pb.JournalSpec()
        spec.CopyFrom(resolution.spec)
        spec.suspend.CopyFrom(self._suspend or pb.JournalSpec.Suspend())
        compares = [unmodified(resolution.item.kv), *(unmodified(each.kv) for each in resolution.assignments)]
        put = Put(resolution.item.kv.key, spec.SerializeToString(deterministic=True))
        pipeline = self._pipeline
        if spec.suspend.level == pb.JournalSpec.Suspend.FULL and pipeline is not None and pipeline.reading is not None:
            # Nobody will hold it. Whoever is assigned when it is woken goes on where it ends.
            reading, spool = pipeline.reading, pipeline.spool
            record = in_sync.closed(reading.record, reading.create_revision, spool.end, spool.registers)
            pipeline.recorded = False
            result, pipeline.reading = await self._env.in_sync.write(reading, record, compares, [put])
        else:
            result = await self._env.coordinator.txn(compares, [put])
        self._read_through = result.header.revision
        return State.RESOLVE

    async def _read_acknowledgements(self) -> State:
        """Give the pipeline on, await our turn, and read what every replica says to our proposal."""
        pipeline, owner, proposal = self._owned, self._require_owner, self._proposal
        assert proposal is not None
        broken = pipeline.error is not None
        turn = pipeline.turn()
        self._pipeline = self._owner = None
        replica = owner.require_replica
        if not broken:
            replica.pipeline.put(pipeline)
        else:
            replica.spool.put(pipeline.close_send())
            replica.pipeline.put(None)
        problem: CorantoError | None = Unavailable("this broker is shutting down; what it proposed may be applied")
        try:
            await turn.wait()
            await pipeline.gather_ok(proposal)
            problem = pipeline.error
            if broken:
                await pipeline.gather_end()
        finally:
            turn.done()
            self._settle(problem)
        if self.error is not None or self.status != pb.OK:
            return State.ERROR
        if pipeline.error is not None:
            raise pipeline.error
        return State.FINISHED

    # -- Its parts -----------------------------------------------------------------------------------------------------

    @property
    def _resolved(self) -> Resolution:
        assert self.resolution is not None  # Every state but the first follows a resolution.
        return self.resolution

    @property
    def _owned(self) -> Pipeline:
        assert self._pipeline is not None  # States that use the pipeline come after those that acquire it.
        return self._pipeline

    @property
    def _require_owner(self) -> Resolution:
        assert self._owner is not None
        return self._owner

    @property
    def _must_outlive(self) -> bool:
        return self._pipeline is not None and not self._pipeline.answers_at_once

    async def _step(self) -> None:
        try:
            self._to(await _HANDLERS[self.state](self))
        except CorantoError as error:
            self.error = self.error or error
            self.state = State.ERROR

    def _to(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"append state machine: {self.state.value} must not go to {state.value}")
        self.state = state

    async def _take_over(self, pipeline: Pipeline) -> Takeover:
        """Whether the pipeline's replicas, which agree, may go on with the journal."""
        resolution, spool = self._resolved, pipeline.spool
        assert resolution.item is not None
        found = Takeover.LOST
        if pipeline.reading is not None:
            found = in_sync.takeover(pipeline.reading.record, pipeline.names, spool.stamp, spool.end)
        if found is Takeover.CLEAN:
            return found
        # What keeps us from it may have changed since it was read.
        reading = await self._env.in_sync.read(resolution.item.id, resolution.item.create_revision)
        pipeline.reading = reading
        found = in_sync.takeover(reading.record, pipeline.names, spool.stamp, spool.end)
        if found is Takeover.LOST and reading.record is not None:
            resolution.require_replica.index.note_head(reading.record.floor)
        return found

    async def _record(self, pipeline: Pipeline, ops: Sequence[Op]) -> bool:
        """Record the pipeline's replicas as those in sync; False if something changed meanwhile. Applies `ops`, too."""
        reading, resolution, spool = pipeline.reading, self._resolved, pipeline.spool
        assert reading is not None
        revision = pipeline.header.etcd.revision
        if reading.record is not None and reading.record.revision > revision:
            self._pipeline = None
            self._shut_down(pipeline, self._require_owner)
            raise ReplicationFailed("a pipeline of a later Route than this one's was recorded")
        record = in_sync.recorded(reading.record, reading.create_revision, revision, pipeline.names, spool.end)
        if ops or record != reading.record:
            compares = [unmodified(each.kv) for each in resolution.assignments]
            result, pipeline.reading = await self._env.in_sync.write(reading, record, compares, ops)
            if ops or not result.succeeded:
                self._read_through = result.header.revision
            if not result.succeeded:
                return False
        pipeline.recorded = True
        spool.settle(spool.end)
        return True

    async def _line_up(self, resolution: Resolution) -> None:
        """Wait for the pipeline in the line, from which others take along. Raises TakenAlong and Invalidated."""
        assert self.whole is not None
        replica, until = resolution.require_replica, resolution.invalidated
        self._member = member = Member(self.request, self.whole, resolution)
        replica.line.join(member)
        try:
            self._pipeline = await replica.pipeline.take(until, member.waiter)
        finally:
            replica.line.leave(member)
        self._owner = resolution
        if self._pipeline is not None:
            # Those that come meanwhile go along.
            await self._pipeline.room(PROPOSALS_IN_FLIGHT, until)
            await replica.line.gathered()

    async def _roll_if_due(self) -> None:
        pipeline = self._owned
        spool = pipeline.spool
        proposal = preconditions.propose(
            spool.committed, self._roll_to, self._resolved.spec.fragment, self._env.clock.now()
        )
        if proposal != spool.fragment:
            # A fragment that completes is visible at once, so it must be acknowledged by then.
            await pipeline.settled()
            if pipeline.error is not None:
                raise pipeline.error  # Not every replica has what would complete.
            pipeline.propose(proposal, spool.registers, acknowledge=False)

    def _write(self, content: Bytes) -> None:
        pipeline = self._owned
        pipeline.write(self._end - self._begin, content)
        if self._sum is not None:
            pipeline.spool.hash(self._sum, content)
        self._end += len(content)

    def _end_of_input(self, problem: CorantoError | None) -> bool:
        """Propose to commit what the client has sent, or to roll it back."""
        pipeline = self._owned
        pipeline.join()
        spool = pipeline.spool
        if problem is None and self.status == pb.OK and pipeline.error is None:
            proposal = spool.next_fragment()
            if self._sum is None and self._end > self._begin:
                digest = proposal.sum
            else:
                # Unlike that of an empty fragment, the sum of an append of nothing is the SHA-1 of nothing.
                digest = (self._sum or new_sum()).digest()
            self.commit = Fragment(spool.fragment.journal, self._begin, self._end, digest, spool.fragment.codec)
            self.registers = preconditions.next_registers(spool.registers, self.request)
            self._propose(proposal, self.registers)
        else:
            self.error = problem
            self.registers = spool.registers
            self._propose(spool.fragment, spool.registers)
        return False

    def _propose(self, proposal: Fragment, registers: pb.LabelSet) -> None:
        self._proposal = proposal
        self._owned.propose(proposal, registers, acknowledge=True)
        self._to(State.READ_ACKNOWLEDGEMENTS)

    def _settle(self, problem: CorantoError | None) -> None:
        """Tell those that go along with us what became of the proposal."""
        members, self._members = self._members, []
        for member in members:
            member.settle(problem)

    def _shut_down(self, pipeline: Pipeline, owner: Resolution) -> None:
        """Close a pipeline and give back its spool; its replicas' good-byes are read in the background."""
        turn = pipeline.turn()
        owner.require_replica.spool.put(pipeline.close_send())
        if pipeline.local_only:
            turn.done()
            return
        self._env.spawn(pipeline.shut_down(turn))


_HANDLERS: Mapping[State, Callable[[AppendFsm], Awaitable[State]]] = {
    State.RESOLVE: AppendFsm._resolve,
    State.ACQUIRE_PIPELINE: AppendFsm._acquire_pipeline,
    State.FOLLOW: AppendFsm._follow,
    State.START_PIPELINE: AppendFsm._start_pipeline,
    State.SEND_PIPELINE_SYNC: AppendFsm._send_pipeline_sync,
    State.RECV_PIPELINE_SYNC: AppendFsm._recv_pipeline_sync,
    State.UPDATE_ASSIGNMENTS: AppendFsm._update_assignments,
    State.AWAIT_DESIRED_REPLICAS: AppendFsm._await_desired_replicas,
    State.VALIDATE_PRECONDITIONS: AppendFsm._validate_preconditions,
    State.UPDATE_SUSPEND: AppendFsm._update_suspend,
    State.READ_ACKNOWLEDGEMENTS: AppendFsm._read_acknowledgements,
}


def registers_change(request: pb.AppendRequest) -> bool:
    """Whether an append asks for other registers, which takes content."""
    return request.HasField("union_registers") or request.HasField("subtract_registers")


def has_parameters(message: AppendMessage) -> bool:
    """Whether a message of the stream holds anything but content."""
    return not isinstance(message, Content) and bool(
        message.journal
        or message.offset
        or message.do_not_proxy
        or message.suspend
        or message.min_etcd_revision
        or message.HasField("header")
        or message.HasField("check_registers")
        or message.HasField("union_registers")
        or message.HasField("subtract_registers")
    )
