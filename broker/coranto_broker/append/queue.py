"""The queue of a journal's appends. The primary's replica owns it, and its order is the journal's order.

Every append is enqueued here: from a call, a stream, the HTTP gateway or a peer, or a pulse. If the queue is
empty, the pipeline is idle, and this broker is the only replica, an append that extends the fragment within a steady
range commits *inline*. Otherwise waiting appends are proposed in batches (`coranto_broker.append.batch`). A batch costs
one message to each replica, and one round trip for all of its appends.

The *committer* runs while appends wait. It waits for room for another proposal. If the append at the head needs more
than a decision, the state machine (`coranto_broker.append.fsm`) *prepares* it, and content that is not buffered is
streamed (`coranto_broker.append.receiving`).

Planning, writing and proposing a batch do not suspend. So an append whose client disconnects either still waits and is
dropped, or is proposed and no longer depends on its client.
"""

from __future__ import annotations

import asyncio
from typing import Final

from coranto.errors import Unavailable
from coranto.specs.durability import Durability
from coranto_broker.append.batch import (
    MAX_BATCH_APPENDS,
    MAX_BATCH_BYTES,
    PROPOSALS_IN_FLIGHT,
    SHUTTING_DOWN,
    AppendRange,
    Batch,
    steady_range,
)
from coranto_broker.append.decision import Refuse, apply_registers, is_torn
from coranto_broker.append.fsm import AppendFsm, HeldPipeline
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.receiving import Arrivals, ContentStream, charge, start_flow
from coranto_broker.append.states import AppendEvent, ProposalPath, State
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
        self._preparing: QueuedAppend | None = None  # The head, once it needs more than a decision.
        self._committer: asyncio.Task[None] | None = None
        self.arrivals = Arrivals(self)
        """The appends that are being received."""

    def __len__(self) -> int:
        return len(self._waiting)

    def enqueue(self, append: QueuedAppend) -> None:
        """Add an append at the end. Its resolution has this queue's replica."""
        append.queue = self
        if not self._waiting and self._committer is None:
            try:
                if self._commit_inline(append):
                    return
            except Exception as error:  # noqa: BLE001  # The error fails only this append.
                append.settle(error)
                return
        if append.state is State.RESOLVE:
            append.transition(AppendEvent.PRIMARY_IS_HERE)
        self._waiting[append] = None
        if self._committer is None:
            # The committer starts after this turn of the event loop, so appends that arrive together share a batch.
            self._committer = self._host.spawn(self._commit())

    def discard(self, append: QueuedAppend) -> None:
        """Drop an append whose client has left, unless it is proposed."""
        self._waiting.pop(append, None)
        if self._preparing is append:
            assert self._committer is not None
            self._committer.cancel()

    def _commit_inline(self, append: QueuedAppend) -> bool:
        """Commit an append immediately and return True, or return False. Raises RolledBack if writing fails."""
        content, pipeline = append.content, self._replica.pipeline.at_rest
        if not content or pipeline is None:
            return False
        if not pipeline.commits_inline or not pipeline.is_idle or self._steady(append, pipeline) is None:
            return False
        before = pipeline.spool.committed
        registers = before.registers if append.is_plain else apply_registers(append.request, before.registers)
        if registers is None or is_torn(content, pipeline.whole_lines):
            return False
        after = pipeline.commit(content, registers)
        self._host.proposed(ProposalPath.INLINE, 1)
        append.state = State.FINISHED
        append.settle(append.committed(after, AppendRange(before.fragment.end, after.end, registers), ALONE))
        return True

    def _steady(self, append: QueuedAppend, pipeline: Pipeline) -> Steady | None:
        """Return the steady range of a pipeline at rest, or None if its Route or replicas do not allow this append."""
        resolution, resolver = append.resolved, self._host.resolver
        if not resolver.is_current(resolution):
            known = resolver.known(self._replica.journal)
            if known is None or not _is_alike(resolution, known):
                return None
            append.resolution = resolution = known
        invalidated = resolution.invalidated
        if (invalidated is not None and invalidated.fired) or not pipeline.fits(resolution):
            return None
        if not pipeline.is_usable(self._host.clock.monotonic()):
            return None
        return steady_range(self._host, resolution, pipeline)

    # -- The committer -------------------------------------------------------------------------------------------------

    async def _commit(self) -> None:
        """Propose all waiting appends."""
        try:
            while self._waiting:
                head = next(iter(self._waiting))
                try:
                    await self._commit_next(head)
                except Exception as error:  # noqa: BLE001  # The error fails only this append.
                    self._settle(head, error)
        finally:
            self._committer = None
            for append in list(self._waiting):
                self._settle(append, rolled_back(Unavailable(SHUTTING_DOWN), "nothing was appended"))

    def _settle(self, append: QueuedAppend, outcome: AppendOutcome | Exception) -> None:
        self._waiting.pop(append, None)
        append.settle(outcome)

    async def _commit_next(self, head: QueuedAppend) -> None:
        """Propose the next batch, or prepare the append at the head."""
        pipeline = self._replica.pipeline.at_rest
        if pipeline is not None and head.content is not None and self._steady(head, pipeline) is not None:
            try:
                await pipeline.wait_for_capacity(PROPOSALS_IN_FLIGHT, head.resolved.invalidated)
            except Invalidated:
                return  # The next call resolves the head again.
            await self.arrivals.wait_for_arrivals()
            if head not in self._waiting or self._propose_next(head):
                return
        await self._prepare(head)

    def _propose_next(self, head: QueuedAppend) -> bool:
        """Propose the appends at the head that need only a decision. Return False if there are none."""
        pipeline = self._replica.pipeline.at_rest
        steady = None if pipeline is None else self._steady(head, pipeline)
        if steady is None:
            return False
        held = HeldPipeline(self._host, self._replica.pipeline.take_at_rest(), head.resolved)
        try:
            batch = Batch(self._host, held, steady)
            self._take(batch)
            if batch.members:
                batch.propose()
            return bool(batch.members)
        finally:
            held.release()

    def _take(self, batch: Batch, tokens: FlowControl | None = None) -> None:
        """Move appends from the head of the queue to the end of the batch, as far as limits and decisions allow."""
        members, taken = batch.members, len(batch.members)
        for append in self._waiting:
            content = append.content
            if content is None or not _is_alike(append.resolved, batch.resolution):
                break
            length = len(content)
            if members and (len(members) == MAX_BATCH_APPENDS or batch.size + length > MAX_BATCH_BYTES):
                break
            if tokens is not None and not tokens.can_spend(length):
                break
            found = batch.plan.admit(append.request, content)
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

    async def _prepare(self, append: QueuedAppend) -> None:
        """Prepare the append at the head with the state machine, and propose its content."""
        self._preparing = append
        fsm = AppendFsm(self._host, append)
        try:
            while (outcome := await fsm.run(self._replica)) is None and append.state is State.STREAM_CONTENT:
                if await self._propose_prepared(fsm):
                    return
            if outcome is not None:
                self._settle(append, outcome)
            else:
                del self._waiting[append]
                queue_of(append.resolved.require_replica).enqueue(append)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not append.has_left or task is None or task.uncancel() > 0:
                raise
        finally:
            self._preparing = None
            fsm.release()

    async def _propose_prepared(self, fsm: AppendFsm) -> bool:
        """Propose the content of a prepared append, if it is buffered together with the appends after it.

        Return False if an empty streamed append confirmed a loss. The state machine then continues.
        """
        append, decided, content, stream = fsm.append, fsm.decided, fsm.append.content, None
        if decided is not None:
            await fsm.begin_fragment(decided.roll)
        flow = start_flow(self._host, append.resolved)
        if content is None:
            stream = ContentStream(fsm)
            refusal = await stream.receive(self._host, flow)
            if refusal is not None:
                self._settle(append, append.refused(refusal))
                return True
            length = stream.end - stream.begin
        else:
            if length := len(content):
                await charge(self._host, append, flow, length)
            await self.arrivals.wait_for_arrivals()
        if decided is None:
            append.content, fsm.is_streaming = b"", False
            append.transition(AppendEvent.LOSS_CONFIRMED)
            return False
        batch = Batch(self._host, fsm.held)
        batch.add(append, batch.plan.commit(length, decided.registers))
        del self._waiting[append]
        if stream is None and (length or not append.request.HasField("durability")):
            self._take(batch, flow)  # A question of durability has its own batch.
        batch.propose(stream)
        return True


def queue_of(replica: Replica) -> JournalQueue:
    return replica.queue  # type: ignore[return-value]  # The replica host sets it.


def _is_alike(one: Resolution, other: Resolution) -> bool:
    """Return True if an append with one resolution may commit with the other."""
    if one is other:
        return True
    return one.invalidated is other.invalidated and (one.spec is other.spec or one.spec == other.spec)
