"""The states of an append before its content may stream: from RESOLVE to VALIDATE_PRECONDITIONS.

A handler does the work of one state and returns the next (`coranto_broker.append.states.TRANSITIONS`).
"""

from __future__ import annotations

from collections.abc import Sequence

from coranto.coordination.etcd import KeyValue, Op, Put, unmodified
from coranto.errors import StoreError
from coranto.specs.validation import may_write, routes_equivalent
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import preconditions
from coranto_broker.append.appending import Appending
from coranto_broker.append.group_commit import PROPOSALS_IN_FLIGHT
from coranto_broker.append.states import State
from coranto_broker.ownership import Invalidated
from coranto_broker.replication.pipeline import Pipeline, ReplicationFailed, rolled_back
from coranto_broker.replication.resolver import Resolution
from coranto_broker.replication.waiting_appends import Refusal, TakenAlong, WaitingAppend
from coranto_broker.spool import in_sync
from coranto_broker.spool.in_sync import Takeover


class Readying(Appending):
    """An append up to the point where its content may stream."""

    async def _resolve(self) -> State:
        """Find the primary in a key space that is recent enough."""
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
        # From here on, the append commits before anybody who sees changed flags looks at the journal's end.
        return State.START_PIPELINE if self._env.resolver.flags_hold(resolution) else State.RESOLVE

    async def _follow(self) -> State:
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
            self.status = answer.status
            return State.ERROR
        self.commit = member.commit
        self.total_chunks = member.whole.chunks
        return State.FINISHED

    async def _start_pipeline(self) -> State:
        """Use the pipeline if it follows our Route. Otherwise take the replica's spool and build a new pipeline."""
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
        """Read the replicas' answers to the proposal."""
        pipeline, owner = self._owned, self._require_owner
        result = await pipeline.gather_sync()
        problem = pipeline.error
        if problem is not None:
            self._pipeline = None
            self._synchronizing = False
            self._shut_down(pipeline, owner)
            raise rolled_back(problem, "replicas could not be synchronized, and nothing was proposed") from problem
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
        """Write to etcd that the Route is consistent, and its members to the in-sync record, unless etcd has both.

        One transaction writes both. When the allocator sees that it may remove a replica, the others can already go on
        without it.
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
            # This may lose against the allocator. Then the later revision shows the allocator's change, and we retry.
            compares = [unmodified(each.kv) for each in resolution.assignments]
            self._read_through = (await self._env.coordinator.txn(compares, advertise)).header.revision
        return State.RESOLVE

    async def _await_desired_replicas(self) -> State:
        """Go on only with as many replicas as the journal should have."""
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
        """Check registers and offsets. First wait until the stores work and have been listed once."""
        resolution, pipeline = self._resolved, self._owned
        replica = resolution.require_replica
        try:
            for url in resolution.spec.fragment.stores[:1]:  # New fragments go to the first store.
                problem = await self._env.store_problem(resolution.spec.name, url, resolution.invalidated)
                if problem:
                    self.status, self.store_health_error = pb.FRAGMENT_STORE_UNHEALTHY, problem
                    return State.ERROR
            if not replica.index.refreshed:
                await replica.wait_refreshed(resolution.invalidated)
        except Invalidated:
            return State.RESOLVE
        except StoreError as error:
            self.status, self.store_health_error = pb.FRAGMENT_STORE_UNHEALTHY, error.told
            return State.ERROR
        verdict = preconditions.check(
            self.request, resolution.spec, pipeline.spool.committed, replica.index.known, self._env.clock.now()
        )
        self._roll_to = verdict.roll_to
        matters = may_write(resolution.spec) or preconditions.is_strict(self.request)
        # Do not roll to a suspended journal's offset either: a replica that returns may end there, with the registers.
        lost = not pipeline.recorded and matters
        if lost and (not self.request.offset or verdict.status != pb.OK):
            # No replica is known to hold all acknowledged content, so the journal's head and registers are unknown.
            self.status = pb.INDEX_HAS_GREATER_OFFSET
            return State.ERROR
        if verdict.status != pb.OK:
            self.status = verdict.status
            return State.ERROR
        registers = pipeline.spool.registers
        too_many = preconditions.outgrown(registers, preconditions.next_registers(registers, self.request))
        if too_many is not None:
            raise too_many
        if lost:
            # By an empty append at an explicit offset, an operator confirms that no such replica need be waited for.
            if not self._loss_confirmed:
                self._roll_to, self._asks_loss = 0, True
                return State.STREAM_CONTENT
            if not verdict.resync and not await self._record(pipeline, []):
                return State.RESOLVE
        if verdict.suspend is not None:
            if verdict.roll_to:
                await self._roll_if_due()  # So that content that only this broker has gets stored.
            self._roll_to = 0
            self._suspend = verdict.suspend
            return State.UPDATE_SUSPEND
        return State.SEND_PIPELINE_SYNC if verdict.resync else State.STREAM_CONTENT

    async def _update_suspend(self) -> State:
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
        pipeline = self._pipeline
        if spec.suspend.level == pb.JournalSpec.Suspend.FULL and pipeline is not None and pipeline.reading is not None:
            # No broker will hold the journal. The brokers assigned when it wakes go on where it ends.
            reading, spool = pipeline.reading, pipeline.spool
            record = in_sync.closed(reading.record, reading.create_revision, spool.end, spool.registers)
            pipeline.recorded = False
            result, pipeline.reading = await self._env.in_sync.write(reading, record, compares, [put])
        else:
            result = await self._env.coordinator.txn(compares, [put])
        self._read_through = result.header.revision
        return State.RESOLVE

    # -- Their parts ---------------------------------------------------------------------------------------------------

    async def _take_over(self, pipeline: Pipeline) -> Takeover:
        """Decide whether the pipeline's replicas, which agree with each other, may go on with the journal."""
        resolution, spool = self._resolved, pipeline.spool
        assert resolution.item is not None
        found = Takeover.LOST
        if pipeline.reading is not None:
            found = in_sync.takeover(pipeline.reading.record, pipeline.names, spool.stamp, spool.end)
        if found is Takeover.CLEAN:
            return found
        # The record may have changed since it was read.
        reading = await self._env.in_sync.read(resolution.item.id, resolution.item.create_revision)
        pipeline.reading = reading
        found = in_sync.takeover(reading.record, pipeline.names, spool.stamp, spool.end)
        if found is Takeover.LOST and reading.record is not None:
            resolution.require_replica.index.note_head(reading.record.floor)
        return found

    async def _record(self, pipeline: Pipeline, ops: Sequence[Op]) -> bool:
        """Record the pipeline's replicas as in sync and apply `ops`. Returns False if something changed meanwhile."""
        reading, resolution, spool = pipeline.reading, self._resolved, pipeline.spool
        assert reading is not None
        revision = pipeline.header.etcd.revision + resolution.require_replica.folder.base
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
        pipeline.show()
        return True

    async def _line_up(self, resolution: Resolution) -> None:
        """Wait for the pipeline in the line, where leaders find members. Raises TakenAlong or Invalidated."""
        assert self.whole is not None
        replica, until = resolution.require_replica, resolution.invalidated
        self._member = member = WaitingAppend(self.request, self.whole, resolution)
        replica.line.join(member)
        try:
            self._pipeline = await replica.pipeline.take(until, member.waiter)
        finally:
            replica.line.leave(member)
        self._owner = resolution
        if self._pipeline is not None:
            # Appends that arrive meanwhile join the group.
            await self._pipeline.wait_for_room(PROPOSALS_IN_FLIGHT, until)
            await replica.line.gathered()
