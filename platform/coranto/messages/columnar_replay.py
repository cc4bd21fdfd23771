"""The rows that one acknowledgement commits, from a journal that is read again piece by piece.

For transactions that are too large to hold: `columnar_sequencer.SequencingStep.replay` requests them. The rules come
from `sequencer.Sequencer.replay`, applied to columns by `columnar.resolve`.
"""

from __future__ import annotations

import pyarrow as pa

from coranto.messages.checkpoints import ProducerState
from coranto.messages.columnar import RowSegment, committed_mask, replay_mask, resolve, scan
from coranto.messages.columnar_steps import columns_of_replay
from coranto.messages.sequencer import ReplayRange
from coranto.messages.uuids import Flags, ProducerId


class ReplayedRows:
    """Chooses the rows of `wanted` that an acknowledgement of `producer` with a clock commits.

    `state` is the producer's state before the acknowledgement.
    """

    def __init__(self, wanted: ReplayRange, producer: ProducerId, state: ProducerState, clock: int) -> None:
        self._wanted = wanted
        self._producer = producer
        self._state = state
        self._acknowledgement = RowSegment(producer, Flags.ACK_TXN, clock, clock, wanted.end)
        self._max_clock = state.last_ack
        """The largest clock of the transaction's rows so far: rows with smaller clocks are duplicates."""

    def committed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the committed rows among the next rows of the range. Raises InvalidInput for rows outside of it."""
        columns = columns_of_replay(batch, self._wanted)
        pending = {self._producer: self._state}
        mask = replay_mask(columns.producers, columns.clocks, columns.offsets, pending, self._wanted.end)
        mask &= columns.flags == Flags.CONTINUE_TXN
        if not mask.any():
            return batch.slice(0, 0)
        rows, columns = batch.filter(pa.array(mask)), columns.where(mask)
        segments, row_segment = scan(*columns)
        before = {self._producer: ProducerState(self._max_clock)}
        result = resolve([segments, [self._acknowledgement]], before, replayed=())
        self._max_clock = max(self._max_clock, int(columns.clocks.max()))
        return rows.filter(pa.array(committed_mask(row_segment, result.windows[0], columns.clocks)))
