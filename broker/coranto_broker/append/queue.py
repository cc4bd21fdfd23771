"""The queue of a journal's appends. The primary's replica owns it, and its order is the journal's order.

Every append is enqueued here: of a call, a stream or the HTTP gateway, forwarded by a peer, or a pulse. If the queue is
empty, the pipeline is idle, and this broker is the only replica, an append that extends the fragment within a steady
range commits *inline*. Otherwise waiting appends are proposed in batches (`coranto_broker.append.batch`). A batch costs
one message to each replica, and one round trip for all of its appends.

The *committer* runs while appends wait. It waits for room for another proposal. If the append at the head needs more
than a decision, the state machine (`coranto_broker.append.fsm`) *prepares* it, and content that is not buffered is
streamed (`coranto_broker.append.streaming`).

Planning, writing and proposing a batch do not suspend. So an append whose client disconnects either still waits and is
dropped, or is proposed and no longer depends on its client.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

from coranto.effects import Bytes
from coranto.errors import Unavailable
from coranto.specs.durability import Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.batch import SHUTTING_DOWN, Batch
from coranto_broker.append.decision import Refuse, apply_registers, is_torn
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.held_pipeline import HeldPipeline
from coranto_broker.append.host import AppendHost
from coranto_broker.append.plan import (
    MAX_BATCH_APPENDS,
    MAX_BATCH_BYTES,
    PROPOSALS_IN_FLIGHT,
    AppendRange,
    BatchPlan,
    snapshot_of,
    steady_range,
)
from coranto_broker.append.queued_append import AppendOutcome, BufferedContent, QueuedAppend
from coranto_broker.append.receiving import Arrivals
from coranto_broker.append.states import AppendEvent, ProposalPath, State
from coranto_broker.append.streaming import ContentStream, charge, start_flow
from coranto_broker.ownership import Invalidated
from coranto_broker.replication.flow_control import FlowControl
from coranto_broker.replication.pipeline import Pipeline, rolled_back
from coranto_broker.replication.replica import Replica
from coranto_broker.replication.resolver import Resolution
from coranto_broker.spool.steady import Steady

ALONE: Final = Durability(1, 1)
"""The durability of an append that commits inline: one replica has it, perhaps not on disk."""


class JournalQueue:
    """The unproposed appends of one replica's journal, in order."""

    def __init__(self, host: AppendHost, replica: Replica) -> None:
        self._host = host
        self._replica = replica
        self._waiting: dict[QueuedAppend, None] = {}
        self._preparing: QueuedAppend | None = None
        self._committer: asyncio.Task[None] | None = None
        self._is_due = False  # `_run` will be called.
        self.arrivals = Arrivals(self)
        """The appends that are being received."""

    def __len__(self) -> int:
        return len(self._waiting) + (self._preparing is not None)

    def enqueue(self, append: QueuedAppend) -> None:
        """Add an append at the end. Its resolution has this queue's replica."""
        append.queue = self
        if not self._waiting and self._committer is None:
            try:
                if self._commit_inline(append):
                    return
            except Exception as error:  # noqa: BLE001  # The append fails, and no other.
                append.settle(error)
                return
        if append.state is State.RESOLVE:
            append.on(AppendEvent.PRIMARY_IS_HERE)
        self._waiting[append] = None
        if self._committer is None and not self._is_due:
            # At the end of this turn of the event loop, appends that arrived together wait together.
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run)

    def discard(self, append: QueuedAppend) -> None:
        """Drop an append whose client has left, unless it is proposed."""
        if append in self._waiting:
            del self._waiting[append]
        elif self._preparing is append:
            assert self._committer is not None
            self._committer.cancel()

    # -- Inline --------------------------------------------------------------------------------------------------------

    def _commit_inline(self, append: QueuedAppend) -> bool:
        """Commit an append immediately and return True, or return False. Raises RolledBack if writing fails."""
        resolution, content, pipeline = append.resolution, append.content, self._replica.pipeline.at_rest
        if resolution is None or content is None or not content.content or pipeline is None:
            return False
        if not pipeline.answers_at_once or not pipeline.is_idle or not self._is_ready(pipeline, resolution):
            return False
        if steady_range(self._host, resolution, pipeline) is None or is_torn(content.content, pipeline.whole_lines):
            return False
        before = pipeline.spool.committed
        registers = apply_registers(append.request, before.registers)
        if registers is None:
            return False
        after = pipeline.commit(content.content, registers)
        self._host.proposed(ProposalPath.INLINE, 1)
        digest = hashlib.sha1(content.content, usedforsecurity=False).digest()
        begin, finished = before.fragment.end, State.FINISHED
        append.state = finished
        append.settle(
            AppendOutcome(
                finished, resolution, pb.OK, registers, after, begin, after.end, digest, content.chunks, 0, ALONE
            )
        )
        return True

    def _is_ready(self, pipeline: Pipeline, resolution: Resolution) -> bool:
        """Return True if Route and replicas of a pipeline at rest allow content by a resolution."""
        invalidated = resolution.invalidated
        if (invalidated is not None and invalidated.fired) or not pipeline.fits(resolution):
            return False
        return self._host.resolver.is_current(resolution) and pipeline.is_usable(self._host.clock.monotonic())

    # -- Batches -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Propose batches while that needs no waiting. Start the committer for the rest."""
        self._is_due = False
        if self._committer is not None:
            return
        try:
            while self._waiting and not self.arrivals.coming and self._propose_next():
                pass
        except Exception as error:  # noqa: BLE001
            self._fail_head(error)
        if self._waiting:
            self._committer = self._host.spawn(self._commit())

    async def _commit(self) -> None:
        """Propose all waiting appends."""
        try:
            while self._waiting:
                try:
                    await self._commit_next()
                except Exception as error:  # noqa: BLE001
                    self._fail_head(error)
        finally:
            self._committer = None
            waiting, self._waiting = self._waiting, {}
            for append in waiting:
                append.settle(rolled_back(Unavailable(SHUTTING_DOWN), "nothing was appended"))

    def _fail_head(self, error: Exception) -> None:
        """Fail the append at the head, so that the others continue."""
        append = next(iter(self._waiting), None)
        if append is not None:
            del self._waiting[append]
            append.settle(error)

    async def _commit_next(self) -> None:
        """Propose the next batch, or prepare the append at the head."""
        if (ready := self._ready()) is not None:
            pipeline, _ = ready
            if not pipeline.has_room(PROPOSALS_IN_FLIGHT):
                head = next(iter(self._waiting))
                try:
                    await pipeline.wait_for_room(PROPOSALS_IN_FLIGHT, head.resolved.invalidated)
                except Invalidated:
                    return  # The next call resolves the head again.
            await self.arrivals.gathered()
            if not self._waiting or self._propose_next():
                return
        await self._prepare(next(iter(self._waiting)))

    def _ready(self) -> tuple[Pipeline, Steady] | None:
        """Return the pipeline and its steady range if a decision may suffice for the append at the head."""
        pipeline, head, resolver = self._replica.pipeline.at_rest, next(iter(self._waiting)), self._host.resolver
        if pipeline is None or head.content is None:
            return None
        own = head.resolved
        if not resolver.is_current(own):
            found = resolver.known(self._replica.journal)
            if found is None or not _is_alike(own, found):
                return None
            head.resolution = own = found
        steady = steady_range(self._host, own, pipeline) if self._is_ready(pipeline, own) else None
        return (pipeline, steady) if steady is not None else None

    def _propose_next(self) -> bool:
        """Propose the appends at the head that need only a decision. Return False if there are none."""
        ready = self._ready()
        if ready is None or not ready[0].has_room(PROPOSALS_IN_FLIGHT):
            return False
        resolution = next(iter(self._waiting)).resolved
        held = HeldPipeline(self._host.spawn)
        held.acquired(self._replica.pipeline.take_at_rest(), resolution)
        try:
            plan = BatchPlan(snapshot_of(resolution, ready[0], self._host.clock.now()), ready[1])
            batch = Batch(self._host, self._replica, held)
            self._take(batch, plan, resolution)
            if batch.members:
                batch.propose(plan.registers)
            return bool(batch.members)
        finally:
            held.release()

    def _take(self, batch: Batch, plan: BatchPlan, resolution: Resolution, tokens: FlowControl | None = None) -> None:
        """Move appends from the head of the queue to the end of the batch, as far as limits and decisions allow."""
        members, taken = batch.members, len(batch.members)
        for append in self._waiting:
            content = append.content
            if content is None or not _is_alike(append.resolved, resolution):
                break
            length = len(content.content)
            if members and (len(members) == MAX_BATCH_APPENDS or batch.size + length > MAX_BATCH_BYTES):
                break
            if tokens is not None and not tokens.affords(length):
                break
            found = plan.admit(append.request, content.content)
            if found is None or (not members and isinstance(found, Refuse)):
                break
            if isinstance(found, Refuse):
                batch.refused.append((append, found))
                continue
            batch.add(append, found)
            if tokens is not None:
                tokens.spend(length)
        for append, _ in (*members[taken:], *batch.refused):
            del self._waiting[append]

    # -- Appends that need more than a decision ------------------------------------------------------------------------

    async def _prepare(self, append: QueuedAppend) -> None:
        """Prepare the append at the head by the state machine, and propose its content with the appends after it.

        An empty streamed append may confirm a loss. The state machine then continues.
        """
        del self._waiting[append]
        self._preparing = append
        fsm = AppendFsm(self._host, append)
        try:
            while append.outcome is None and await self._reach_content(fsm):
                if fsm.decided is not None:
                    await fsm.begin_fragment(fsm.decided.roll)
                if append.content is not None:
                    await self._propose_prepared(fsm, append.content.content)
                    break
                stream = ContentStream(fsm)
                problem = await stream.receive(self._host)
                if problem is not None:
                    append.settle(problem)
                elif fsm.decided is not None:
                    batch, registers = Batch(self._host, self._replica, fsm.held), fsm.decided.registers
                    batch.add(append, AppendRange(stream.begin, stream.end, registers))
                    batch.propose(registers, stream)
                    break
                else:
                    append.content, fsm.is_streaming = BufferedContent(b"", 0), False
                    append.on(AppendEvent.LOSS_CONFIRMED)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if append.has_left and task is not None and task.uncancel() == 0:
                return
            append.settle(rolled_back(Unavailable(SHUTTING_DOWN), "nothing was appended"))
            raise
        except Exception as error:  # noqa: BLE001  # The append fails, and no other.
            append.settle(error)
        finally:
            self._preparing = None
            fsm.release()

    async def _reach_content(self, fsm: AppendFsm) -> bool:
        """Run until content may be proposed. Return False if the append was settled or enqueued elsewhere."""
        append = fsm.append
        while await fsm.run(State.ACQUIRE_PIPELINE, State.STREAM_CONTENT):
            if append.state is State.STREAM_CONTENT:
                return True
            if append.resolved.replica is not self._replica:
                queue_of(append.resolved.require_replica).enqueue(append)
                return False
            await fsm.step()
        append.settle(fsm.outcome)
        return False

    async def _propose_prepared(self, fsm: AppendFsm, content: Bytes) -> None:
        """Propose the buffered content of a prepared append, and the content of appends after it."""
        append, decided, length = fsm.append, fsm.decided, len(content)
        assert decided is not None
        resolution = append.resolved
        flow = start_flow(self._host, resolution)
        if length:
            await charge(self._host, append, flow, length)
        await self.arrivals.gathered()
        batch = Batch(self._host, self._replica, fsm.held)
        plan = BatchPlan(snapshot_of(resolution, batch.pipeline, self._host.clock.now()))
        batch.add(append, plan.commit(length, decided.registers))
        if length or not append.request.HasField("durability"):  # A question of durability has a batch of its own.
            self._take(batch, plan, resolution, flow)
        batch.propose(plan.registers)


def queue_of(replica: Replica) -> JournalQueue:
    return replica.queue  # type: ignore[return-value]  # The replica host sets it.


def _is_alike(one: Resolution, other: Resolution) -> bool:
    """Return True if an append with one resolution may commit by the other."""
    if one is other:
        return True
    return one.invalidated is other.invalidated and (one.spec is other.spec or one.spec == other.spec)
