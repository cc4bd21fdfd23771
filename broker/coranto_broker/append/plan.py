"""Plans of batches: the appends at the head of a journal's queue that commit with one proposal.

`BatchPlan` tracks the journal's state after all admitted appends, and decides the next one from it
(`coranto_broker.append.decision`). So a batch has the same outcome as its appends one by one. A batch ends before an
append that needs more than a decision: a new fragment, an explicit offset that the replicas must roll to, a change of
the journal's suspension, or tokens of a limited rate. docs/architecture.md ("An append") has the rule of all batchers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from coranto.effects import Bytes
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.decision import Commit, JournalSnapshot, Refuse, apply_registers, decide, is_torn, steady
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.replication.pipeline import Pipeline, SteadyPipeline
from coranto_broker.replication.resolver import Resolution
from coranto_broker.spool.spool import CommittedState
from coranto_broker.spool.steady import Steady

if TYPE_CHECKING:
    from coranto_broker.append.host import AppendHost

MAX_BATCH_BYTES: Final = 1 << 20
"""The most content of a batch, which must fit into one message to each replica."""

MAX_BATCH_APPENDS: Final = 256
"""The most appends of a batch, because planning blocks the event loop."""

PROPOSALS_IN_FLIGHT: Final = 2
"""The most unacknowledged proposals of buffered appends. While they are in flight, the next batch gathers."""

_FINAL_REFUSALS: Final = (pb.REGISTER_MISMATCH, pb.WRONG_APPEND_OFFSET)
"""The refusals that need no more than their status and registers. The state machine answers the others."""


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
        self._fragment = snapshot.committed.fragment
        self._end = self._fragment.end
        self._steady = steady
        self.registers = snapshot.committed.registers
        """The registers after all of them."""

    def admit(self, request: pb.AppendRequest, content: Bytes) -> AppendRange | Refuse | None:
        """Admit or refuse an append. Return None if it needs more than a decision."""
        length = len(content)
        if not length and request.HasField("durability"):
            return None  # The replicas have to answer.
        try:
            is_steady = length and self._steady is not None and self._end <= self._steady.end
            if is_steady and not is_torn(content, self._first.whole_lines):
                registers = apply_registers(request, self.registers)
                if registers is not None:
                    return self.commit(length, registers)
            found = decide(request, self._snapshot(), content)
        except Exception:  # noqa: BLE001  # The state machine raises it again, for this append only.
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
        before, known, fragment, end = self._first.committed, self._first.known, self._fragment, self._end
        if end == fragment.end:
            return self._first
        # No decision needs the sum of unwritten content.
        extended = Fragment(fragment.journal, fragment.begin, end, fragment.sum, fragment.codec)
        committed = CommittedState(extended, self.registers, before.first_append_time or self._first.now)
        grown = IndexSummary(fragment.begin if known.empty else known.begin, max(known.end, end), empty=False)
        return replace(self._first, committed=committed, known=grown)


def snapshot_of(
    resolution: Resolution,
    pipeline: Pipeline,
    now: float,
    store_problem: str | None = "",
    *,
    loss_confirmed: bool = False,
) -> JournalSnapshot:
    """Return the journal's state for a decision by the owner of its pipeline. `now` is wall time in seconds."""
    index = resolution.require_replica.index
    return JournalSnapshot(
        resolution.spec,
        pipeline.spool.committed,
        index.known,
        now,
        store_problem,
        index.refreshed,
        pipeline.recorded,
        loss_confirmed,
        pipeline.refusal,
        pipeline.whole_lines,
    )


def steady_range(host: AppendHost, resolution: Resolution, pipeline: Pipeline) -> Steady | None:
    """Return the range where appends extend the fragment without waiting, or None. The pipeline caches it.

    The pipeline fits the resolution.
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
