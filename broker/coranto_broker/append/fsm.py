"""The append state machine: prepares an append until its content may be proposed.

`coranto_broker.append.states.TRANSITIONS` is the machine. Each state from RESOLVE to UPDATE_SUSPEND has a method of its
name here, which may wait, and returns the event that ends the state. STREAM_CONTENT is in
`coranto_broker.append.receiving`, and READ_ACKNOWLEDGEMENTS in `coranto_broker.append.batch`.

Each state here also ends in ERROR if it fails, or if the client leaves (which cancels the work).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coranto.coordination.etcd import KeyValue, Put, unmodified
from coranto.errors import CorantoError, StoreError, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.journal_ids import fallen_id
from coranto.specs.validation import routes_equivalent
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.batch import PROPOSALS_IN_FLIGHT, snapshot_of
from coranto_broker.append.decision import ChangeSuspension, Commit, Need, Refuse, Synchronize, decide, next_fragment
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queued_append import NO_REGISTERS, AppendOutcome, QueuedAppend
from coranto_broker.append.states import TERMINAL, AppendEvent, State
from coranto_broker.ownership import Invalidated
from coranto_broker.replication.pipeline import Pipeline, ReplicationFailed, Turn, rolled_back
from coranto_broker.replication.replica import Replica
from coranto_broker.replication.resolver import Resolution
from coranto_broker.spool import in_sync
from coranto_broker.spool.in_sync import Takeover


class HeldPipeline:
    """Ownership of a replica's pipeline, or of the right to build one.

    An append owns the pipeline while it synchronizes and streams. With its proposal it hands the pipeline over to the
    next append, and keeps only its turn to read acknowledgements.
    """

    def __init__(self, host: AppendHost, pipeline: Pipeline | None = None, owner: Resolution | None = None) -> None:
        self._host = host
        self.pipeline = pipeline
        self.owner = owner
        """The owner's latest resolution to the replica; None without ownership."""

    def _close(self) -> tuple[Pipeline, Turn]:
        """Close the pipeline, and give its spool back to the replica. Keep the right to build another pipeline."""
        pipeline, self.pipeline = self.pipeline, None
        assert pipeline is not None
        assert self.owner is not None
        turn = pipeline.turn()
        self.owner.require_replica.spool.put(pipeline.close_send())
        return pipeline, turn

    def shut_down(self) -> None:
        """Close the pipeline, if any. A background task reads the replicas' streams to their ends."""
        if self.pipeline is None:
            return
        pipeline, turn = self._close()
        if pipeline.local_only:
            turn.done()
        else:
            self._host.spawn(pipeline.shut_down(turn))

    def hand_over(self) -> tuple[Turn, bool]:
        """Hand the pipeline over to the next append. Return the turn to read, and True if the pipeline is broken.

        A broken pipeline is closed instead, and its replicas' streams end after that turn.
        """
        assert self.pipeline is not None
        is_broken = self.pipeline.error is not None
        turn = self._close()[1] if is_broken else self.pipeline.turn()
        self.release()
        return turn, is_broken

    def release(self) -> None:
        """Give up the ownership, if any."""
        pipeline, owner = self.pipeline, self.owner
        self.pipeline = self.owner = None
        if owner is not None:
            owner.require_replica.pipeline.put(pipeline)


class AppendFsm:
    """The states of one append before its content. `run` it, then use its pipeline (`held`) or `release` it."""

    def __init__(self, host: AppendHost, append: QueuedAppend) -> None:
        self._host = host
        self.append = append
        self.held = HeldPipeline(host)
        self.registers = pb.LabelSet()
        """The journal's registers when the pipeline starts."""
        self.decided: Commit | None = None
        """The decision on content. None if the append confirms a loss; it must then be empty."""
        self._loss_confirmed = False
        self.is_streaming = False
        """True once the replicas may have content that is not proposed."""
        self._outcome: AppendOutcome | CorantoError | None = None
        self._read_through = append.request.min_etcd_revision
        self._await_change = False  # Resolve next from a later key space.
        self._synchronizing = False
        self._roll_to = 0  # The offset that the next synchronizing proposal rolls to; 0 for none.
        self._suspend: pb.JournalSpec.Suspend | None = None  # The suspension that UPDATE_SUSPEND writes.

    async def run(self, replica: Replica | None = None) -> AppendOutcome | CorantoError | None:
        """Run until content may be proposed, or until the append belongs in the queue of another replica than this.

        Returns the outcome of a terminal state.
        """
        append = self.append
        while append.state not in TERMINAL:
            is_elsewhere = append.state is State.ACQUIRE_PIPELINE and append.resolved.replica is not replica
            if is_elsewhere or append.state is State.STREAM_CONTENT:
                return None
            try:
                event: AppendEvent = await getattr(self, f"_{append.state.name.lower()}")()
            except Invalidated:
                event = AppendEvent.INVALIDATED
            except CorantoError as error:
                self._outcome, event = error, AppendEvent.FAILED
            append.transition(event)
        return self._outcome or AppendOutcome(append.resolved)

    def release(self) -> None:
        """Release the pipeline if the append still owns it, and roll back streamed content without a proposal."""
        pipeline = self.held.pipeline
        if pipeline is not None and (self._synchronizing or isinstance(self._outcome, ReplicationFailed)):
            self.held.shut_down()
        elif pipeline is not None and self.is_streaming:
            pipeline.propose(pipeline.spool.fragment, pipeline.spool.registers, acknowledge=False)
            if pipeline.error is not None:
                self.held.shut_down()
        self.held.release()

    # -- RESOLVE to AWAIT_DESIRED_REPLICAS: a pipeline to all replicas, whose Route etcd has --------------------------

    async def _resolve(self) -> AppendEvent:
        """Find the primary in a sufficiently recent key space."""
        if self._await_change:
            self._await_change = False
            await self._host.resolver.wait_for_change(self.append.resolved)
        request = self.append.request
        try:
            resolution = await self._host.resolver.resolve(
                request.journal,
                may_proxy=not request.do_not_proxy,
                require_primary=True,
                min_revision=self._read_through,
                proxy_header=request.header if request.HasField("header") else None,
                claims=self.append.claims,
            )
        except Unavailable as error:
            # Clients may retry, because no content was proposed.
            raise rolled_back(error, "nothing was appended") from error
        self.append.resolution = resolution
        if resolution.status == pb.SUSPENDED and request.suspend == pb.AppendRequest.SUSPEND_RESUME:
            offset = resolution.spec.suspend.offset
            self._suspend = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.NONE, offset=offset)
            return AppendEvent.SUSPENSION_MUST_CHANGE
        if resolution.status != pb.OK:
            return self._refused(Refuse(resolution.status, NO_REGISTERS))
        if not resolution.is_local:
            self.release()
            return AppendEvent.PRIMARY_IS_ELSEWHERE
        if self.held.owner is not None and self.held.owner.replica is not resolution.replica:
            self.release()
        if self.held.owner is None:
            return AppendEvent.PRIMARY_IS_HERE
        self.held.owner = resolution
        return AppendEvent.PIPELINE_IS_OWNED

    async def _acquire_pipeline(self) -> AppendEvent:
        """Wait for exclusive ownership of the replica's pipeline."""
        resolution = self.append.resolved
        pipeline = await resolution.require_replica.pipeline.take(resolution.invalidated)
        self.held.pipeline, self.held.owner = pipeline, resolution
        if pipeline is not None and self.append.content is not None:
            # During this wait, arriving appends can join its batch.
            await pipeline.wait_for_capacity(PROPOSALS_IN_FLIGHT, resolution.invalidated)
        # If flags and suspension are unchanged now, callers that see later ones read the journal's end only after this
        # append, which owns the pipeline, has committed.
        permitted = self._host.resolver.permits_hold(resolution)
        return AppendEvent.PIPELINE_ACQUIRED if permitted else AppendEvent.INVALIDATED

    async def _start_pipeline(self) -> AppendEvent:
        """Use the pipeline if it has the resolution's Route. Otherwise build one with the replica's spool."""
        resolution, pipeline = self.append.resolved, self.held.pipeline
        if pipeline is not None:
            fits = pipeline.fits(resolution)
            current = fits or routes_equivalent(pipeline.route, resolution.header.route)
            if current and pipeline.is_usable(self._host.clock.monotonic()):
                self.registers = pipeline.spool.registers
                return AppendEvent.PIPELINE_FITS if fits else AppendEvent.PIPELINE_FOLLOWS_ROUTE
            self.held.shut_down()
        spool = await resolution.require_replica.spool.take(resolution.invalidated)
        try:
            # Replicas are about to continue at the spool's end. A later power loss must not leave a gap before it.
            await spool.flush_commits()
            reading = await self._host.verify(resolution, spool)
        except BaseException:
            resolution.require_replica.spool.put(spool)
            raise
        self.registers = spool.registers
        self.held.pipeline = self._host.build_pipeline(resolution, spool, reading)
        self._synchronizing = True
        return AppendEvent.PIPELINE_BUILT

    async def _send_pipeline_sync(self) -> AppendEvent:
        """Propose the current fragment, or the one after a roll, to every replica."""
        self._synchronizing = True
        pipeline = self._pipeline
        await pipeline.settled()
        proposal = next_fragment(
            pipeline.spool.committed, self._roll_to, self.append.resolved.spec.fragment, self._host.clock.now()
        )
        pipeline.propose(proposal, self.registers, acknowledge=True)
        return AppendEvent.PROPOSED

    async def _recv_pipeline_sync(self) -> AppendEvent:
        """Read the replicas' answers to the proposal."""
        pipeline = self._pipeline
        result = await pipeline.gather_sync()
        if (problem := pipeline.error) is not None:
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
            self.held.shut_down()
            return AppendEvent.ROUTE_IS_OLD
        return AppendEvent.REPLICAS_AGREE

    async def _update_assignments(self) -> AppendEvent:
        """Write the consistent Route and the in-sync record to etcd in one transaction, unless etcd has both."""
        resolution, pipeline = self.append.resolved, self._pipeline
        route = pb.Route(members=resolution.header.route.members, primary=resolution.header.route.primary)
        stale: list[KeyValue] = [each.kv for each in resolution.assignments if not routes_equivalent(each.value, route)]
        advertise = [Put(kv.key, route.SerializeToString(deterministic=True), keep_lease=True) for kv in stale]
        may_record = not pipeline.recorded and len(route.members) >= resolution.replication
        if may_record:
            found = await self._takeover(pipeline)
            if found is Takeover.ROLL:
                record = pipeline.reading.record if pipeline.reading is not None else None
                assert record is not None
                self._roll_to, self.registers = record.floor, record.registers or pb.LabelSet()
                return AppendEvent.MUST_ROLL
            if found is Takeover.VERIFY:
                self.held.shut_down()
                return AppendEvent.ETCD_CHANGED
            may_record = found is Takeover.CLEAN
        if may_record and not await self._record(pipeline, advertise):
            return AppendEvent.ETCD_CHANGED
        if stale and not may_record:
            # If the allocator was faster, the later revision shows its change, and the append resolves again.
            compares = [unmodified(each.kv) for each in resolution.assignments]
            self._read_through = (await self._host.coordinator.txn(compares, advertise)).header.revision
        return AppendEvent.ETCD_CHANGED if stale else AppendEvent.ETCD_IS_CURRENT

    async def _await_desired_replicas(self) -> AppendEvent:
        """Continue only with the number of replicas of the journal's spec."""
        resolution = self.append.resolved
        members = len(resolution.header.route.members)
        if members > resolution.replication:
            self._await_change = True
            return AppendEvent.TOO_MANY_REPLICAS
        if members < resolution.replication:
            return self._refused(Refuse(pb.INSUFFICIENT_JOURNAL_BROKERS, NO_REGISTERS))
        if not resolution.is_local:
            return AppendEvent.PRIMARY_IS_ELSEWHERE
        pipeline = self.held.pipeline
        if pipeline is not None:
            pipeline.mark_fitting(resolution)
            pipeline.adopt_demand(resolution.spec.labels)
        return AppendEvent.REPLICAS_SUFFICE

    # -- VALIDATE_PRECONDITIONS and UPDATE_SUSPEND: the decision ------------------------------------------------------

    async def _validate_preconditions(self) -> AppendEvent:
        """Decide the append, and carry out the decision or provide its `Need`."""
        resolution, content, pipeline = self.append.resolved, self.append.content, self._pipeline
        replica = resolution.require_replica
        store_problem: str | None = None
        while True:
            replica.demand_unmet, replica.refusal = pipeline.demand_unmet, pipeline.refusal
            replica.recorded = pipeline.recorded
            snapshot = snapshot_of(resolution, pipeline, self._host.clock.now())
            snapshot = replace(snapshot, store_problem=store_problem, loss_confirmed=self._loss_confirmed)
            found = decide(self.append.request, snapshot, content)
            match found:
                case Commit():
                    self.decided = found
                    return AppendEvent.MAY_STREAM
                case Refuse():
                    return self._refused(found)
                case Synchronize():
                    self._roll_to = found.offset
                    return AppendEvent.MUST_ROLL
                case ChangeSuspension():
                    await self.begin_fragment(found.roll)
                    self._suspend = found.suspend
                    return AppendEvent.SUSPENSION_MUST_CHANGE
            try:
                match found:
                    case Need.STORE:
                        url = resolution.spec.fragment.stores[0]  # New fragments go to the first store.
                        name, until = resolution.spec.name, resolution.invalidated
                        store_problem = await self._host.stores.problem(name, url, until)
                    case Need.LISTING:
                        await replica.wait_refreshed(resolution.invalidated)
                    case Need.EMPTY_APPEND if content is None:
                        self.decided = None
                        return AppendEvent.MAY_STREAM
                    case Need.EMPTY_APPEND:
                        self._loss_confirmed = True  # Buffered content is empty here.
                    case Need.RECORD:
                        if await self._record(pipeline, fell=True):
                            # Each replica must know the journal's new id before it accepts content after this offset.
                            self.held.shut_down()
                        return AppendEvent.ETCD_CHANGED
            except StoreError as error:
                return self._refused(Refuse(pb.FRAGMENT_STORE_UNHEALTHY, self.registers, error.public_text))

    async def _update_suspend(self) -> AppendEvent:
        """Change the suspension in the journal's spec, then resolve again at the resulting revision.

        If another change was faster, the later revision shows that change.
        """
        resolution = self.append.resolved
        assert resolution.item is not None
        spec = pb.JournalSpec()
        spec.CopyFrom(resolution.spec)
        spec.suspend.CopyFrom(self._suspend or pb.JournalSpec.Suspend())
        compares = [unmodified(resolution.item.kv), *(unmodified(each.kv) for each in resolution.assignments)]
        put = Put(resolution.item.kv.key, spec.SerializeToString(deterministic=True))
        pipeline = self.held.pipeline
        if spec.suspend.level == pb.JournalSpec.Suspend.FULL and pipeline is not None and pipeline.reading is not None:
            # No broker will hold the journal. The brokers that are assigned when it wakes continue at its end.
            reading, spool = pipeline.reading, pipeline.spool
            record = in_sync.closed(reading.record, reading.create_revision, spool.end, spool.registers)
            pipeline.recorded = False
            result, pipeline.reading = await self._host.in_sync.write(reading, record, compares, [put])
        else:
            result = await self._host.coordinator.txn(compares, [put])
        self._read_through = result.header.revision
        return AppendEvent.ETCD_CHANGED

    # -- Shared by several states -------------------------------------------------------------------------------------

    @property
    def _pipeline(self) -> Pipeline:
        assert self.held.pipeline is not None  # Earlier states acquired it.
        return self.held.pipeline

    def _refused(self, refusal: Refuse) -> AppendEvent:
        self._outcome = self.append.refused(refusal)
        return AppendEvent.REFUSED

    async def _takeover(self, pipeline: Pipeline) -> Takeover:
        """Decide whether the pipeline's synchronized replicas may continue the journal."""
        resolution, spool, reading, found = self.append.resolved, pipeline.spool, pipeline.reading, Takeover.LOST
        assert resolution.item is not None
        if reading is not None:
            found = in_sync.takeover(reading.record, pipeline.names, spool.stamp, spool.end)
        if reading is None or found is not Takeover.CLEAN:  # The record may have changed.
            reading = await self._host.in_sync.read(resolution.item.id, resolution.item.create_revision)
            pipeline.reading = reading
            found = in_sync.takeover(reading.record, pipeline.names, spool.stamp, spool.end)
            if found is Takeover.LOST and reading.record is not None:
                resolution.require_replica.index.note_head(reading.record.floor)
        record = reading.record
        if found is Takeover.CLEAN and record is not None and record.closed and spool.end > record.floor:
            # If it was closed after the replicas had checked their spools, content above was never acknowledged, and
            # perhaps no replica has it. Continuing after it could leave a gap.
            return found if pipeline.checked_record == record else Takeover.VERIFY
        return found

    async def _record(self, pipeline: Pipeline, advertise: Sequence[Put] = (), *, fell: bool = False) -> bool:
        """Record the pipeline's replicas as in sync, in one transaction with `advertise`.

        If the journal's head `fell`, the journal gets another id, since offsets after the replicas' end are reused.
        Returns False if another change was faster. Raises ReplicationFailed if a later Route was recorded.
        """
        records, resolution, reading, spool = self._host.in_sync, self.append.resolved, pipeline.reading, pipeline.spool
        assert reading is not None
        revision = pipeline.header.etcd.revision + resolution.require_replica.folder.base
        if reading.record is not None and reading.record.revision > revision:
            raise ReplicationFailed("a pipeline of a later Route than this one's was recorded")
        name = fallen_id(reading.journal_id, spool.end, revision) if fell else reading.journal_id
        record = in_sync.recorded(reading.record, reading.create_revision, revision, pipeline.names, spool.end, name)
        if advertise or record != reading.record:
            compares = [unmodified(each.kv) for each in resolution.assignments]
            result, pipeline.reading = await records.write(reading, record, compares, advertise)
            if advertise or not result.succeeded:
                self._read_through = result.header.revision
            if not result.succeeded:
                return False
        else:
            records.keep(reading)  # An earlier attempt may have written it without getting the response.
        pipeline.recorded = True
        spool.settle(spool.end)
        pipeline.show()
        return True

    async def begin_fragment(self, fragment: Fragment | None) -> None:
        """Let all replicas complete the current fragment and begin this empty one. Do nothing if it is None."""
        if fragment is None:
            return
        pipeline = self._pipeline
        # A completed fragment is visible immediately, so its content must be acknowledged first.
        await pipeline.settled()
        if pipeline.error is not None:
            raise pipeline.error  # A replica may lack content of the completed fragment.
        pipeline.propose(fragment, pipeline.spool.registers, acknowledge=False)
