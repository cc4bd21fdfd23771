"""Batches: appends at the head of a journal's queue that commit with one proposal.

`BatchPlan` tracks the journal's state after all admitted appends, and decides the next one from it
(`coranto_broker.append.decision`). So a batch has the same outcome as its appends one by one. A batch ends before an
append that needs more than a decision: a new fragment, an explicit offset that the replicas must roll to, a change of
the journal's suspension, or tokens of a limited rate. docs/architecture.md ("An append") has the rule for all batches.

A batch does not depend on its members' clients. If its proposal fails, the outcome of all members is unknown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from coranto.effects import Bytes
from coranto.errors import CorantoError, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.specs.durability import NO_DEMAND, Durability
from coranto.tracing import Tracer, TraceSpan
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.decision import Commit, JournalSnapshot, Refuse, apply_registers, decide, is_torn, steady
from coranto_broker.append.states import AppendEvent, ProposalPath
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.replication.pipeline import Ask, Pipeline, SteadyPipeline, Turn, rolled_back
from coranto_broker.replication.resolver import Resolution
from coranto_broker.spool.spool import CommittedState
from coranto_broker.spool.steady import Steady

if TYPE_CHECKING:
    from coranto_broker.append.fsm import HeldPipeline
    from coranto_broker.append.host import AppendHost
    from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
    from coranto_broker.append.receiving import ContentStream

SHUTTING_DOWN: Final = "this broker is shutting down"

MAX_BATCH_BYTES: Final = 1 << 20
"""The maximum content of a batch, which must fit into one message to each replica."""

MAX_BATCH_APPENDS: Final = 256
"""The maximum number of appends in a batch, because planning blocks the event loop."""

PROPOSALS_IN_FLIGHT: Final = 2
"""The maximum number of unacknowledged proposals of buffered appends. While they are in flight, a batch grows."""

_FINAL_REFUSALS: Final = (pb.REGISTER_MISMATCH, pb.WRONG_APPEND_OFFSET)
"""The refusals that need only a status and registers. The state machine handles all others."""


class AppendRange(NamedTuple):
    """The range [begin, end) of an admitted append, and the registers after its commit."""

    begin: int
    end: int
    registers: pb.LabelSet


class BatchPlan:
    """The journal's state after all admitted appends."""

    def __init__(self, snapshot: JournalSnapshot, steady: Steady | None = None) -> None:
        """`steady` is the steady range of the snapshot, if known."""
        self._first = snapshot
        self._end = snapshot.committed.fragment.end
        self._steady = steady
        self.registers = snapshot.committed.registers
        """The registers after all of them."""

    def admit(self, request: pb.AppendRequest, content: Bytes) -> AppendRange | Refuse | None:
        """Admit or refuse an append. Return None if it needs more than a decision."""
        length = len(content)
        if not length and request.HasField("durability"):
            return None  # Only the replicas can report durability.
        try:
            is_steady = length and self._steady is not None and self._end <= self._steady.end
            if is_steady and not is_torn(content, self._first.whole_lines):
                registers = apply_registers(request, self.registers)
                if registers is not None:
                    return self.commit(length, registers)
            found = decide(request, self._snapshot(), content)
        except Exception:  # noqa: BLE001  # The state machine raises the error again, for this append only.
            return None
        if isinstance(found, Refuse) and found.status in _FINAL_REFUSALS:
            return found
        if not isinstance(found, Commit) or found.roll is not None:
            return None
        return self.commit(length, found.registers)

    def commit(self, length: int, registers: pb.LabelSet) -> AppendRange:
        """Admit an append that commits with these registers."""
        begin, self._end = self._end, self._end + length
        if length:
            self.registers = registers
        return AppendRange(begin, self._end, registers)

    def _snapshot(self) -> JournalSnapshot:
        before, known, end = self._first.committed, self._first.known, self._end
        if end == (fragment := before.fragment).end:
            return self._first
        # No decision needs the sum of unwritten content.
        extended = Fragment(fragment.journal, fragment.begin, end, fragment.sum, fragment.codec)
        committed = CommittedState(extended, self.registers, before.first_append_time or self._first.now)
        grown = IndexSummary(fragment.begin if known.empty else known.begin, max(known.end, end), empty=False)
        return replace(self._first, committed=committed, known=grown)


def snapshot_of(resolution: Resolution, pipeline: Pipeline, now: float) -> JournalSnapshot:
    """Return the journal's state for a decision by the owner of its pipeline. Assumes that its store is healthy."""
    index = resolution.require_replica.index
    return JournalSnapshot(
        resolution.spec,
        pipeline.spool.committed,
        index.known,
        now,
        listed=index.refreshed,
        recorded=pipeline.recorded,
        refusal=pipeline.refusal,
        whole_lines=pipeline.whole_lines,
    )


def steady_range(host: AppendHost, resolution: Resolution, pipeline: Pipeline) -> Steady | None:
    """Return the range where appends extend the fragment without waiting, or None. The pipeline caches it.

    The pipeline must fit the resolution.
    """
    committed, now = pipeline.spool.committed, host.clock.now()
    changes = resolution.require_replica.index.changes
    found = pipeline.steady
    if found is None or found.changes != changes or not found.range.holds(committed.fragment, now):
        spec = resolution.spec
        if host.max_append_rate or spec.max_append_rate:
            return None  # The rate limit charges appends one at a time.
        decided = steady(snapshot_of(resolution, pipeline, now))
        store = spec.fragment.stores[0] if spec.fragment.stores else ""  # New fragments go to the first store.
        found = pipeline.steady = None if decided is None else SteadyPipeline(decided, changes, store)
        if found is None:
            return None
    if found.store and not host.stores.is_healthy(resolution.spec.name, found.store):
        return None
    return found.range


class Batch:
    """Appends that commit with one proposal, and appends that are refused when it commits."""

    def __init__(self, host: AppendHost, held: HeldPipeline, steady: Steady | None = None) -> None:
        """`held` owns the pipeline, whose steady range is `steady`, if known. `propose` hands it over."""
        assert held.pipeline is not None
        assert held.owner is not None
        self._host = host
        self._held = held
        self.resolution = held.owner
        self.pipeline = held.pipeline
        self.plan = BatchPlan(snapshot_of(held.owner, held.pipeline, host.clock.now()), steady)
        self.members: list[tuple[QueuedAppend, AppendRange]] = []
        self.refused: list[tuple[QueuedAppend, Refuse]] = []
        self.size = 0
        """The bytes of the members' content."""
        self._proposal = self.pipeline.spool.fragment
        self._demand = self.pipeline.demand  # The demand at the time of the proposal.
        self._since: int | None = None  # The only member asks for the durability of content from this offset on.
        self._stored_end = 0
        self._undone: CorantoError | None = None  # The error that kept the proposal from all replicas.
        self._span: TraceSpan | None = None  # If a member is traced.

    def add(self, append: QueuedAppend, place: AppendRange) -> None:
        """Add an append that the plan has admitted."""
        self.members.append((append, place))
        self.size += place.end - place.begin

    def propose(self, stream: ContentStream | None = None) -> None:
        """Send all replicas a proposal that commits the members. Hand the pipeline over.

        Buffered content is sent with it. The content of `stream`, the only member, was sent before.
        Does not raise: each append gets its outcome now or with the answers.
        """
        pipeline, registers = self.pipeline, self.plan.registers
        try:
            if self.pipeline.error is not None:
                raise rolled_back(self.pipeline.error)
            for append, _ in self.members:
                append.transition(AppendEvent.PROPOSED)
            if self._host.tracer is not None:
                self._begin_span(self._host.tracer)
            if stream is not None:
                self._proposal = pipeline.spool.next_fragment()
                stream.append.sum = stream.sum_in(self._proposal)
            contents = [append.content for append, _ in self.members if append.content is not None]
            ask, traceparent = self._question(), "" if self._span is None else self._span.traceparent
            if self.size and contents:
                content = contents[0] if len(contents) == 1 else b"".join(contents)
                self._proposal = pipeline.extend(content, registers, ask, traceparent)
            else:
                pipeline.propose(self._proposal, registers, acknowledge=True, ask=ask, traceparent=traceparent)
            if pipeline.error is not None and pipeline.local_only:
                self._undone = rolled_back(pipeline.error)
            if appends := sum(not append.is_pulse for append, _ in self.members):
                batch = ProposalPath.BATCH if appends > 1 else ProposalPath.ALONE
                self._host.proposed(batch if stream is None else ProposalPath.STREAMED, appends)
            turn, is_broken = self._held.hand_over()
        except Exception as error:  # noqa: BLE001  # The error fails only this batch.
            self._held.shut_down()
            self._held.release()
            if self._span is not None:
                self._span.end(error)
            self._fail(error)
        else:
            self._host.spawn(self._await_acks(turn, is_broken))

    def _begin_span(self, tracer: Tracer) -> None:
        """Begin the proposal's span as a child of the first traced append's span, and link it with the others."""
        spans = [append.span for append, _ in self.members if append.span is not None]
        if spans:
            journal, replicas = self._proposal.journal, len(self.pipeline.names)
            self._span = tracer.span(
                "commit", journal, within=spans[0], links=spans[1:], appends=len(self.members), replicas=replicas
            )
            for each in spans:
                each.link(self._span)

    def _question(self) -> Ask.ValueType:
        """Return the durability question to the replicas: the only member's own, or the one of the journal's demand."""
        request = self.members[0][0].request
        if self.size or not request.HasField("durability"):
            return Ask.SYNC if self._demand.synced else Ask.NOTHING
        question = request.durability
        self._since = question.since
        self._stored_end = self.resolution.require_replica.index.stored_through(question.since)
        return Ask.SYNC if question.sync else Ask.HELD

    async def _await_acks(self, turn: Turn, is_broken: bool) -> None:
        """Read every replica's answer to the proposal when its turn has come, and settle the appends."""
        pipeline = self.pipeline
        problem: Exception | None = Unavailable(f"{SHUTTING_DOWN}; the proposed append may be applied")
        outcomes: list[tuple[QueuedAppend, AppendOutcome]] = []
        try:
            await turn.wait()
            durability = await pipeline.gather_ok(self._proposal, self._since)
            problem = self._undone or pipeline.error or self._below_demand(durability)
            if is_broken:
                await pipeline.gather_end()
            if problem is None:
                outcomes = self._outcomes(durability)
        except Exception as error:  # noqa: BLE001  # The appends fail with it.
            problem = error
        finally:
            turn.done()
            if self._span is not None:
                self._span.end(problem, end=self._proposal.end)
            if problem is not None:
                self._fail(problem)
            for append, outcome in outcomes:
                append.settle(outcome)

    def _below_demand(self, durability: Durability) -> CorantoError | None:
        """Count appends below the durability that the journal's labels demand. Return the error for them, if any."""
        appends = sum(place.end > place.begin for _, place in self.members)
        if self._demand is NO_DEMAND or not appends or durability.meets(self._demand):
            return None
        self.resolution.require_replica.acknowledged_below_demand += appends
        self._host.metrics.acknowledged_below_demand.inc(appends)
        if not self._demand.refuses:
            return None
        return Unavailable(f"the append is in the journal, but {durability}; its labels demand {self._demand}")

    def _fail(self, error: Exception) -> None:
        """Settle all appends with an error. Refused appends were certainly not applied."""
        for append, _ in self.members:
            append.settle(error)
        for append, _ in self.refused:
            append.settle(rolled_back(error))

    def _outcomes(self, durability: Durability) -> list[tuple[QueuedAppend, AppendOutcome]]:
        """Return the appends with their outcomes, after the commit of the members."""
        outcomes = []
        for append, place in self.members:
            append.transition(AppendEvent.COMMITTED)
            outcomes.append((append, append.committed(self._proposal, place, durability, self._stored_end)))
        for append, refusal in self.refused:
            append.transition(AppendEvent.REFUSED)
            outcomes.append((append, append.refused(refusal)))
        return outcomes
