"""The append state machine: takes one append from its request to its outcome.

`coranto_broker.append.states.TRANSITIONS` is the machine. Each state but STREAM_CONTENT has a method here that does its
work, which may wait, and returns the event that ends the state. In STREAM_CONTENT the client's messages are the events.
`coranto_broker.append.decision` decides whether the append may commit.

Every blocking state also ends in ERROR when it fails, or when the client goes away (the task is then cancelled).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from coranto.coordination.etcd import Coordinator, KeyValue, Put, unmodified
from coranto.effects import Clock
from coranto.errors import CorantoError, InvalidInput, StoreError, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.security.tokens import Claims
from coranto.specs.durability import NO_DEMAND, Durability
from coranto.specs.validation import routes_equivalent
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.decision import (
    TORN_LINE,
    ChangeSuspension,
    Commit,
    JournalSnapshot,
    Need,
    Refuse,
    Synchronize,
    decide,
    is_torn,
    judge_content,
    next_fragment,
)
from coranto_broker.append.group_commit import PROPOSALS_IN_FLIGHT, GroupPlan, Tokens, gather
from coranto_broker.append.held_pipeline import HeldPipeline
from coranto_broker.append.in_sync_update import find_takeover, record_replicas
from coranto_broker.append.states import TERMINAL, TRANSITIONS, AppendEvent, State, Way
from coranto_broker.append.streamed_content import StreamedContent
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.ownership import Invalidated, Signal
from coranto_broker.recovery.in_sync_records import InSyncRecords, StoredRecord
from coranto_broker.replication.pipeline import Ask, Pipeline, ReplicationFailed, rolled_back
from coranto_broker.replication.resolver import Resolution, Resolver
from coranto_broker.replication.waiting_appends import Line, Refusal, TakenAlong, WaitingAppend, Whole, commit_of
from coranto_broker.rpc.content import AppendMessage, ContentMessage
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.spool import in_sync
from coranto_broker.spool.durable_spool import DurableSpool
from coranto_broker.spool.in_sync import Takeover


class AppendEnvironment(Protocol):
    """The part of the broker that appends use."""

    clock: Clock
    coordinator: Coordinator
    resolver: Resolver

    in_sync: InSyncRecords

    async def verify(self, resolution: Resolution, spool: DurableSpool) -> StoredRecord:
        """Return the in-sync record. Raises Stranded if the broker's own spool may not take part in a pipeline."""
        ...

    def build_pipeline(self, resolution: Resolution, spool: DurableSpool, reading: StoredRecord) -> Pipeline:
        """Build a pipeline for the resolution's Route around the broker's own spool."""
        ...

    async def store_problem(self, journal: str, url: str, until: Signal | None) -> str:
        """Return the reason why a fragment store does not take a journal's content, or "" if it does.

        Waits some time for a problem to pass. Raises Invalidated when `until` fires first.
        """
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that outlives the call that needs it."""
        ...

    def proposed(self, way: Way, appends: int) -> None:
        """Note that this many appends are proposed together, to be committed."""
        ...

    def acknowledged_below_demand(self, appends: int) -> None:
        """Note appends that are committed, but survive less than their journal's labels demand."""
        ...


class AppendFsm:
    """One append. `run` it until content may stream, pass it the client's messages, `finish` it, then `release` it.

    `status` and `error` give the outcome: a status other than OK goes into the response, an error fails the RPC.
    """

    def __init__(
        self, environment: AppendEnvironment, request: pb.AppendRequest, claims: Claims = UNRESTRICTED
    ) -> None:
        """`request` is the validated first message of the stream. `claims` are its sender's."""
        self._env = environment
        self._claims = claims
        self.request = request
        self.state = State.RESOLVE
        self.status: pb.Status.ValueType = pb.OK
        self.error: CorantoError | None = None
        self.resolution: Resolution | None = None
        self.registers = pb.LabelSet()
        self.commit: Fragment | None = None
        self.durability = Durability(0, 0)
        """The durability of the append or, of one that asks, of the content that it asks about."""
        self.stored_end = 0
        """The end of the content that it asks about, as far as the stores have it."""
        self.store_health_error = ""
        self.whole: Whole | None = None
        """All content of the client, if it is small and was received before the pipeline was acquired."""
        self.total_chunks = self.delayed_chunks = 0
        self.on_joined: Callable[[Line, Resolution], None] | None = None
        """Called each time when this append joins the line of waiting appends. Others may then join behind it."""
        # RESOLVE
        self._read_through = request.min_etcd_revision
        self._await_change = False  # Resolve only from a key space later than `resolution`'s.
        # The pipeline, and the proposals sent to it
        self._held = HeldPipeline(environment.spawn)
        self._synchronizing = False
        self._roll_to = 0  # The offset that the next synchronizing proposal rolls to; 0 for none.
        self._proposal: Fragment | None = None
        self._demand = NO_DEMAND  # The demand of the journal's labels, as the proposal was made.
        self._undone: RolledBack | None = None  # The reason why no replica was asked to commit it.
        # VALIDATE_PRECONDITIONS
        self._suspend: pb.JournalSpec.Suspend | None = None  # The suspension that UPDATE_SUSPEND writes.
        self._decided: Commit | None = None  # None: the append confirms a loss, but only if it turns out to be empty.
        self._loss_confirmed = False
        # STREAM_CONTENT
        self._content: StreamedContent | None = None
        self._committing = False
        self._torn = False  # The content so far ends within a line, and the journal takes whole ones.
        # Group commit
        self._member: WaitingAppend | None = None  # Our place in the line of waiting appends.
        self._members: list[WaitingAppend] = []  # The appends that commit in our group.
        self._refused_members: list[WaitingAppend] = []  # Those that our group's commit refuses.

    # -- Its life ------------------------------------------------------------------------------------------------------

    async def run(self, *until: State) -> bool:
        """Run until a state of `until` (returns True) or a terminal state (returns False). Default: STREAM_CONTENT."""
        ends = until or (State.STREAM_CONTENT,)
        while self.state not in ends:
            if self.state in TERMINAL:
                return False
            await self._step()
        return True

    async def prepare_stream(self) -> None:
        """Begin a new fragment if that is due. Call it in STREAM_CONTENT, before the first message."""
        if self._decided is not None and self._decided.roll is not None:
            await self._begin_fragment(self._decided.roll)
        self._content = StreamedContent(self._pipeline)

    async def finish(self) -> None:
        """Read the acknowledgements. Cancelling this does not stop the reading."""
        if self.state is State.VALIDATE_PRECONDITIONS:
            if not await self.run():
                return
            await self.prepare_stream()
            self._end_of_input(None)
        pipeline = self._held.pipeline
        outlives = pipeline is not None and not (pipeline.answers_at_once and self._since is None)
        await asyncio.shield(self._env.spawn(self._step())) if outlives else await self._step()

    def release(self) -> None:
        """Release the pipeline if the append still owns it. Rolls back content that was streamed but not proposed."""
        if self._held.owner is None:
            return
        pipeline = self._held.pipeline
        if pipeline is not None and self._synchronizing:
            self._held.shut_down()
        elif pipeline is not None and self.state is State.STREAM_CONTENT:
            pipeline.propose(pipeline.spool.fragment, pipeline.spool.registers, acknowledge=False)
            if pipeline.error is not None:
                self._held.shut_down()
        self._answer_members(ReplicationFailed("the append that committed together with this one was given up"))
        self._held.release()

    async def _step(self) -> None:
        try:
            self._on(await _HANDLERS[self.state](self))
        except CorantoError as error:
            self.error = self.error or error
            self._on(AppendEvent.FAILED)

    def _on(self, event: AppendEvent) -> None:
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise RuntimeError(f"append state machine: {event.name} must not occur in state {self.state.name}")
        self.state = following

    # -- RESOLVE to AWAIT_DESIRED_REPLICAS: a pipeline to all replicas, whose Route etcd has --------------------------

    async def _resolve(self) -> AppendEvent:
        """Find the primary in a key space that is recent enough."""
        if self._await_change:
            self._await_change = False
            await self._env.resolver.wait_for_change(self._resolved)
        try:
            resolution = await self._env.resolver.resolve(
                self.request.journal,
                may_proxy=not self.request.do_not_proxy,
                require_primary=True,
                min_revision=self._read_through,
                proxy_header=self.request.header if self.request.HasField("header") else None,
                claims=self._claims,
            )
        except Unavailable as error:
            # So clients may try again: no content has been proposed yet.
            raise rolled_back(error, "nothing was appended") from error
        self.resolution = resolution
        if resolution.status == pb.SUSPENDED and self.request.suspend == pb.AppendRequest.SUSPEND_RESUME:
            offset = resolution.spec.suspend.offset
            self._suspend = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.NONE, offset=offset)
            return AppendEvent.SUSPENSION_MUST_CHANGE
        if resolution.status != pb.OK:
            return self._refused(resolution.status)
        if not resolution.is_local:
            self.release()
            return AppendEvent.PRIMARY_IS_ELSEWHERE
        if self._held.owner is not None and self._held.owner.replica is not resolution.replica:
            self.release()
        return AppendEvent.PRIMARY_IS_HERE if self._held.owner is None else AppendEvent.PIPELINE_IS_OWNED

    async def _acquire_pipeline(self) -> AppendEvent:
        """Wait for exclusive ownership of the replica's pipeline."""
        resolution = self._resolved
        try:
            if self.whole is None:
                pipeline = await resolution.require_replica.pipeline.take(resolution.invalidated)
                self._held.acquired(pipeline, resolution)
            else:
                await self._acquire_in_line(resolution, self.whole)
        except TakenAlong:
            return AppendEvent.TAKEN_ALONG
        except Invalidated:
            return AppendEvent.INVALIDATED
        # From here on, the append commits before anybody who sees other flags or suspends looks at the journal's end.
        return AppendEvent.PIPELINE_ACQUIRED if self._env.resolver.permits_hold(resolution) else AppendEvent.INVALIDATED

    async def _acquire_in_line(self, resolution: Resolution, whole: Whole) -> None:
        """Wait for the pipeline in the line, where leaders find members. Raises TakenAlong or Invalidated."""
        replica, until = resolution.require_replica, resolution.invalidated
        self._member = member = WaitingAppend(self.request, whole, resolution)
        replica.line.join(member)
        if self.on_joined is not None:
            self.on_joined(replica.line, resolution)
        try:
            pipeline = await replica.pipeline.take(until, member.waiter)
        finally:
            replica.line.leave(member)
        self._held.acquired(pipeline, resolution)
        if pipeline is not None:
            # Appends that arrive meanwhile join the group.
            await pipeline.wait_for_room(PROPOSALS_IN_FLIGHT, until)
            await replica.line.gathered()

    async def _follow(self) -> AppendEvent:
        """Wait for the outcome of the group."""
        member = self._member
        assert member is not None
        problem = await member.outcome
        if problem is not None:
            raise problem
        answer = member.answer
        assert answer is not None
        self.registers = answer.registers
        if isinstance(answer, Refusal):
            return self._refused(answer.status)
        self.commit, self.durability = member.commit, member.durability
        self.total_chunks = member.whole.chunks
        return AppendEvent.COMMITTED

    async def _start_pipeline(self) -> AppendEvent:
        """Use the pipeline if it follows our Route. Otherwise take the replica's spool and build a new pipeline."""
        resolution, pipeline = self._resolved, self._held.pipeline
        if pipeline is not None:
            fits = pipeline.fits(resolution)
            current = fits or routes_equivalent(pipeline.route, resolution.header.route)
            if current and pipeline.is_usable(self._env.clock.monotonic()):
                self.registers = pipeline.spool.registers
                return AppendEvent.PIPELINE_FITS if fits else AppendEvent.PIPELINE_FOLLOWS_ROUTE
            self._held.shut_down()
        try:
            spool = await resolution.require_replica.spool.take(resolution.invalidated)
        except Invalidated:
            return AppendEvent.INVALIDATED
        try:
            # Replicas are about to go on at the spool's end. If power loss took content before it here, that would
            # leave a hole that readers wait at.
            await spool.flush_commits()
            reading = await self._env.verify(resolution, spool)
        except BaseException:
            resolution.require_replica.spool.put(spool)
            raise
        self.registers = spool.registers
        self._held.pipeline = self._env.build_pipeline(resolution, spool, reading)
        self._synchronizing = True
        return AppendEvent.PIPELINE_BUILT

    async def _send_pipeline_sync(self) -> AppendEvent:
        """Propose the current fragment (perhaps rolled) to every replica."""
        self._synchronizing = True
        pipeline = self._pipeline
        await pipeline.settled()
        proposal = next_fragment(
            pipeline.spool.committed, self._roll_to, self._resolved.spec.fragment, self._env.clock.now()
        )
        pipeline.propose(proposal, self.registers, acknowledge=True)
        return AppendEvent.PROPOSED

    async def _recv_pipeline_sync(self) -> AppendEvent:
        """Read the replicas' answers to the proposal."""
        pipeline = self._pipeline
        result = await pipeline.gather_sync()
        problem = pipeline.error
        if problem is not None:
            self._synchronizing = False
            self._held.shut_down()
            raise rolled_back(problem, "replicas could not be synchronized, and nothing was proposed") from problem
        if result.roll_to is not None:
            self._roll_to = result.roll_to
            if result.registers is not None:
                self.registers = result.registers
            return AppendEvent.MUST_ROLL
        self._roll_to = 0
        self._synchronizing = False
        if result.read_through:
            self._read_through = result.read_through
            self._held.shut_down()
            return AppendEvent.ROUTE_IS_OLD
        return AppendEvent.REPLICAS_AGREE

    async def _update_assignments(self) -> AppendEvent:
        """Write to etcd that the Route is consistent, and its members to the in-sync record, unless etcd has both.

        One transaction writes both.
        """
        resolution, pipeline = self._resolved, self._pipeline
        route = pb.Route(members=resolution.header.route.members, primary=resolution.header.route.primary)
        stale: list[KeyValue] = [each.kv for each in resolution.assignments if not routes_equivalent(each.value, route)]
        advertise = [Put(kv.key, route.SerializeToString(deterministic=True), keep_lease=True) for kv in stale]
        may_record = not pipeline.recorded and len(route.members) >= resolution.replication
        if may_record:
            found = await find_takeover(self._env.in_sync, resolution, pipeline)
            if found is Takeover.ROLL:
                assert pipeline.reading is not None
                record = pipeline.reading.record
                assert record is not None
                self._roll_to, self.registers = record.floor, record.registers or pb.LabelSet()
                return AppendEvent.MUST_ROLL
            if found is Takeover.VERIFY:
                self._held.shut_down()
                return AppendEvent.ETCD_CHANGED
            may_record = found is Takeover.CLEAN
        if may_record and not await self._record(pipeline, advertise):
            return AppendEvent.ETCD_CHANGED
        if not stale:
            return AppendEvent.ETCD_IS_CURRENT
        if not may_record:
            # This may lose against the allocator. Then the later revision shows the allocator's change, and we retry.
            compares = [unmodified(each.kv) for each in resolution.assignments]
            self._read_through = (await self._env.coordinator.txn(compares, advertise)).header.revision
        return AppendEvent.ETCD_CHANGED

    async def _await_desired_replicas(self) -> AppendEvent:
        """Go on only with as many replicas as the journal should have."""
        resolution = self._resolved
        members = len(resolution.header.route.members)
        if members > resolution.replication:
            self._await_change = True
            return AppendEvent.TOO_MANY_REPLICAS
        if members < resolution.replication:
            return self._refused(pb.INSUFFICIENT_JOURNAL_BROKERS)
        if not resolution.is_local:
            return AppendEvent.PRIMARY_IS_ELSEWHERE
        pipeline = self._held.pipeline
        if pipeline is not None:
            pipeline.found_to_fit(resolution)
            pipeline.heed(resolution.spec.labels)
            replica = resolution.require_replica
            replica.demand_unmet, replica.refusal = pipeline.demand_unmet, pipeline.refusal
            replica.recorded = pipeline.recorded
        return AppendEvent.REPLICAS_SUFFICE

    # -- VALIDATE_PRECONDITIONS and UPDATE_SUSPEND: the decision ------------------------------------------------------

    async def _validate_preconditions(self) -> AppendEvent:
        """Ask for the decision, and carry it out or wait for what it needs."""
        resolution, length = self._resolved, len(self.whole.content) if self.whole is not None else None
        torn = self.whole is not None and is_torn(self.whole.content, self._pipeline.whole_lines)
        store_problem: str | None = None
        while True:
            found = decide(self.request, self._snapshot(store_problem), length, torn=torn)
            match found:
                case Commit():
                    self._decided = found
                    return AppendEvent.MAY_STREAM
                case Refuse():
                    self.store_health_error, self.registers = found.reason, found.registers
                    return self._refused(found.status)
                case Synchronize():
                    self._roll_to = found.offset
                    return AppendEvent.MUST_ROLL
                case ChangeSuspension():
                    if found.roll is not None:
                        await self._begin_fragment(found.roll)
                    self._suspend = found.suspend
                    return AppendEvent.SUSPENSION_MUST_CHANGE
            try:
                match found.need:
                    case Need.STORE:
                        url = resolution.spec.fragment.stores[0]  # New fragments go to the first store.
                        name, until = resolution.spec.name, resolution.invalidated
                        store_problem = await self._env.store_problem(name, url, until)
                    case Need.LISTING:
                        await resolution.require_replica.wait_refreshed(resolution.invalidated)
                    case Need.EMPTY_APPEND:
                        self._decided = None
                        return AppendEvent.MAY_STREAM
                    case Need.RECORD:
                        if await self._record(self._pipeline, fell=True):
                            # Each replica must know the journal's other id before it takes content behind this offset.
                            self._held.shut_down()
                        return AppendEvent.ETCD_CHANGED
            except Invalidated:
                return AppendEvent.INVALIDATED
            except StoreError as error:
                self.store_health_error = error.told
                return self._refused(pb.FRAGMENT_STORE_UNHEALTHY)

    def _snapshot(self, store_problem: str | None = "") -> JournalSnapshot:
        resolution, pipeline = self._resolved, self._pipeline
        index = resolution.require_replica.index
        return JournalSnapshot(
            resolution.spec,
            pipeline.spool.committed,
            index.known,
            self._env.clock.now(),
            store_problem,
            index.refreshed,
            pipeline.recorded,
            self._loss_confirmed,
            pipeline.refusal,
        )

    async def _update_suspend(self) -> AppendEvent:
        """Change the suspension in the journal's spec, then resolve again at the resulting revision.

        This may lose against another change. The later revision then shows that change.
        """
        resolution = self._resolved
        assert resolution.item is not None
        spec = pb.JournalSpec()
        spec.CopyFrom(resolution.spec)
        spec.suspend.CopyFrom(self._suspend or pb.JournalSpec.Suspend())
        compares = [unmodified(resolution.item.kv), *(unmodified(each.kv) for each in resolution.assignments)]
        put = Put(resolution.item.kv.key, spec.SerializeToString(deterministic=True))
        pipeline = self._held.pipeline
        if spec.suspend.level == pb.JournalSpec.Suspend.FULL and pipeline is not None and pipeline.reading is not None:
            # No broker will hold the journal. The brokers assigned when it wakes go on where it ends.
            reading, spool = pipeline.reading, pipeline.spool
            record = in_sync.closed(reading.record, reading.create_revision, spool.end, spool.registers)
            pipeline.recorded = False
            result, pipeline.reading = await self._env.in_sync.write(reading, record, compares, [put])
        else:
            result = await self._env.coordinator.txn(compares, [put])
        self._read_through = result.header.revision
        return AppendEvent.ETCD_CHANGED

    # -- STREAM_CONTENT: the client's messages ------------------------------------------------------------------------

    def client_sent(self, message: AppendMessage) -> bool:
        """Handle a message of the client in STREAM_CONTENT. Returns False when no more are wanted: then `finish`."""
        problem: CorantoError | None = None
        content = message.content
        if self._committing:
            problem = InvalidInput("expected the end of the stream after the empty message that commits")
        elif has_parameters(message):
            problem = InvalidInput("only the first message may hold more than content", field="AppendRequest.content")
        elif not content:
            self._committing = True
        elif self._decided is None:
            return self._refuse_content(pb.INDEX_HAS_GREATER_OFFSET)
        elif (status := self._judge(len(content))) is not None:
            return self._refuse_content(status)
        else:
            self._streamed.write(content)
            self._torn = is_torn(content, self._pipeline.whole_lines)
        if problem is not None or self._pipeline.error is not None:
            return self._end_of_input(problem)
        self._on(AppendEvent.CLIENT_SENT)
        return True

    def client_ended(self) -> bool:
        """Handle the end of the client's stream in STREAM_CONTENT. Returns False: then `finish`."""
        if not self._committing:
            return self._end_of_input(InvalidInput("unexpected EOF: an empty message commits, and none was sent"))
        if not self._streamed.length:
            try:
                judge_content(self.request, self._resolved.spec, 0)
            except InvalidInput as problem:
                return self._end_of_input(problem)
        if self._torn:
            self.store_health_error = TORN_LINE
            return self._refuse_content(pb.NOT_ALLOWED)
        if self._decided is None:
            self._loss_confirmed = True
            self._on(AppendEvent.LOSS_CONFIRMED)
            return False
        return self._end_of_input(None)

    def client_failed(self, problem: CorantoError) -> bool:
        """Handle a client that broke a rule or the stream in STREAM_CONTENT. Returns False: then `finish`."""
        return self._end_of_input(problem)

    async def drain(self) -> None:
        """Wait until slow replicas, including our own, catch up with the content sent to them."""
        await self._pipeline.drain()

    async def written(self) -> None:
        """Write all content that the client sent. Call it in STREAM_CONTENT, before `client_ended`."""
        await self._pipeline.written()

    def commit_whole(self, tokens: Tokens) -> None:
        """Write the client's content and that of the group's members, and propose to commit it. Then `finish`.

        Call it in STREAM_CONTENT. `tokens` pay for the members' content; our own is already paid for.
        """
        whole, pipeline, resolution = self.whole, self._pipeline, self._resolved
        assert whole is not None
        broken = pipeline.error
        if broken is not None:
            self._end_of_input(None)
            return
        if not pipeline.recorded or self._decided is None:  # This append may do what others may not.
            if whole.content:
                self.client_sent(ContentMessage(whole.content))
            if self.state is State.STREAM_CONTENT and self.client_sent(ContentMessage(b"")):
                self.client_ended()
            return
        snapshot, length = self._snapshot(), len(whole.content)
        fragment = snapshot.committed.fragment
        plan = GroupPlan(snapshot)
        place = plan.lead(length, self._decided.registers)
        asks = not length and self.request.HasField("durability")
        line = () if asks else resolution.require_replica.line  # The answer to a question is not one to other appends.
        self._members, self._refused_members = gather(
            line, plan, resolution, length, tokens, whole_lines=pipeline.whole_lines
        )
        content = b"".join([whole.content, *(member.whole.content for member in self._members)])
        if content:
            pipeline.write(0, content)
        if pipeline.error is not None:
            self._end_of_input(None)
            return
        self.registers = place.registers
        self.commit = commit_of(fragment, place, whole.content)
        for member in self._members:
            member.commit_to(fragment)
        self._env.proposed(Way.GROUP if self._members else Way.ALONE, 1 + len(self._members))
        self._propose(pipeline.spool.next_fragment(), plan.registers)

    def _judge(self, length: int) -> pb.Status.ValueType | None:
        refusal = self._pipeline.refusal
        status = judge_content(self.request, self._resolved.spec, length, refusal)
        if status == pb.INSUFFICIENT_JOURNAL_BROKERS:
            self.store_health_error = refusal
        return status

    def _refuse_content(self, status: pb.Status.ValueType) -> bool:
        self.status = status
        return self._end_of_input(None)

    def _end_of_input(self, problem: CorantoError | None) -> bool:
        """Propose to commit the client's content, or to roll it back."""
        pipeline = self._pipeline
        pipeline.join()
        spool = pipeline.spool
        if problem is None and self.status == pb.OK and pipeline.error is None:
            assert self._decided is not None
            proposal = spool.next_fragment()
            self.commit = self._streamed.commit(proposal)
            self.registers = self._decided.registers
            self._env.proposed(Way.STREAMED, 1)
            self._propose(proposal, self.registers)
        else:
            self.error = problem
            self.registers = spool.registers
            if pipeline.error is not None:
                self._undone = rolled_back(pipeline.error)
            self._propose(spool.fragment, spool.registers)
        return False

    # -- READ_ACKNOWLEDGEMENTS ----------------------------------------------------------------------------------------

    async def _read_acknowledgements(self) -> AppendEvent:
        """Hand the pipeline on, wait for our turn, and read every replica's answer to our proposal."""
        pipeline, proposal = self._pipeline, self._proposal
        assert proposal is not None
        turn, broken = self._held.hand_on()
        problem: CorantoError | None = Unavailable("this broker is shutting down; what it proposed may be applied")
        try:
            await turn.wait()
            self.durability = await pipeline.gather_ok(proposal, self._since)
            problem = self._undone or pipeline.error or self._below_demand()
            if broken:
                await pipeline.gather_end()
        finally:
            turn.done()
            self._answer_members(problem)
        if self.error is not None or self.status != pb.OK:
            return AppendEvent.REFUSED
        if problem is not None:
            raise problem
        return AppendEvent.COMMITTED

    @property
    def _since(self) -> int | None:
        """The offset from which on the client asks what content survives; None if it does not ask."""
        asks = self.commit is not None and not self.commit.length and self.request.HasField("durability")
        return self.request.durability.since if asks else None

    def _below_demand(self) -> CorantoError | None:
        """Note appends that survive less than the journal's labels demand. Returns the error that tells so, if any."""
        appends = bool(self.commit and self.commit.length) + sum(bool(each.whole.content) for each in self._members)
        if self._demand is NO_DEMAND or not appends or self.durability.meets(self._demand):
            return None
        replica = self._resolved.require_replica
        replica.acknowledged_below_demand += appends
        self._env.acknowledged_below_demand(appends)
        if not self._demand.refuses:
            return None
        return Unavailable(f"the append is in the journal, but {self.durability}; its labels demand {self._demand}")

    # -- Shared by several states -------------------------------------------------------------------------------------

    @property
    def _resolved(self) -> Resolution:
        assert self.resolution is not None  # Every state but the first follows a resolution.
        return self.resolution

    @property
    def _pipeline(self) -> Pipeline:
        assert self._held.pipeline is not None  # States that use the pipeline come after those that acquire it.
        return self._held.pipeline

    @property
    def _streamed(self) -> StreamedContent:
        assert self._content is not None  # `prepare_stream` comes before the client's messages.
        return self._content

    def _refused(self, status: pb.Status.ValueType) -> AppendEvent:
        self.status = status
        return AppendEvent.REFUSED

    async def _record(self, pipeline: Pipeline, advertise: list[Put] | None = None, *, fell: bool = False) -> bool:
        """Record the pipeline's replicas as in sync. Returns False if something changed meanwhile."""
        try:
            succeeded, read_through = await record_replicas(
                self._env.in_sync, self._resolved, pipeline, advertise or (), fell=fell
            )
        except ReplicationFailed:
            self._held.shut_down()
            raise
        self._read_through = read_through or self._read_through
        self._resolved.require_replica.recorded = pipeline.recorded
        return succeeded

    async def _begin_fragment(self, fragment: Fragment) -> None:
        """Have all replicas complete the present fragment and begin this empty one."""
        pipeline = self._pipeline
        # A completed fragment is visible at once, so its content must be acknowledged first.
        await pipeline.settled()
        if pipeline.error is not None:
            raise pipeline.error  # Not every replica has the content that the roll would complete.
        pipeline.propose(fragment, pipeline.spool.registers, acknowledge=False)

    def _propose(self, proposal: Fragment, registers: pb.LabelSet) -> None:
        pipeline = self._pipeline
        self._proposal, self._demand = proposal, pipeline.demand
        ask = Ask.SYNC if self._demand.synced else Ask.NOTHING
        since = self._since
        if since is not None:
            ask = Ask.SYNC if self.request.durability.sync else Ask.HELD
            self.stored_end = self._resolved.require_replica.index.stored_through(since)
        pipeline.propose(proposal, registers, acknowledge=True, ask=ask)
        if pipeline.error is not None and pipeline.local_only:
            self._undone = self._undone or rolled_back(pipeline.error)  # No other replica was asked.
        self._on(AppendEvent.PROPOSED)

    def _answer_members(self, problem: CorantoError | None) -> None:
        """Tell the members of our group the outcome of the proposal."""
        members, self._members = self._members, []
        for member in members:
            member.durability = self.durability
            member.settle(problem)
        refused, self._refused_members = self._refused_members, []
        for member in refused:
            member.settle(problem and rolled_back(problem, "nothing was applied"))


_HANDLERS: Mapping[State, Callable[[AppendFsm], Awaitable[AppendEvent]]] = {
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


def has_parameters(message: AppendMessage) -> bool:
    """Return True if a message of the stream holds anything but content."""
    return not isinstance(message, ContentMessage) and len(message.ListFields()) > bool(message.content)
