"""Sequencing of a shard's sources in columns: the `Intake` for batches. Pure.

It has the interface of `intake.Intake`, and returns batches of committed rows. The rows that one acknowledgement
commits in a journal are usually in one batch, together with rows of other acknowledgements. If there are too many rows,
or if they must be read again, the acknowledgement is sequenced alone, and its rows are split into several batches. In
any case, a checkpoint covers exactly the consumed batches, and a shard may also continue from it message by message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from coranto.errors import InvalidInput
from coranto.messages import ProducerId, Pruning, ReplayRange, Source
from coranto.messages.columnar_replay import ReplayedRows
from coranto.messages.columnar_sequencer import DEFAULT_RING_ROWS, ColumnarSequencer, SequencingStep
from coranto_consumers.runtime import intake

MAX_ROWS: Final = 1 << 16
"""The maximum number of rows in a returned batch."""
_JOINED_BYTES: Final = 4 << 20
"""Read batches are sequenced together up to this size, because each step has a fixed cost."""


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Committed rows to consume. Empty for an acknowledgement without further rows."""

    journal: str
    rows: pa.RecordBatch
    size: int
    """The bytes of the rows in the journal."""
    mark_consumed: Callable[[], None]
    """Records that the rows were consumed."""


class ColumnIntake:
    """Sequences the batches of one shard."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        ring_rows: int = DEFAULT_RING_ROWS,
        atomic_bytes: int | None = None,
    ) -> None:
        self._atomic_bytes = atomic_bytes
        self._in_parts = self._was_in_partial_set = False
        self.in_partial_set = False
        """True if only a part of a set of messages that were committed together was pulled."""
        self._sequencer = ColumnarSequencer(sources=sources, ring_rows=ring_rows)
        self._read: deque[tuple[str, pa.RecordBatch]] = deque()
        self._read_rows = self._read_bytes = 0
        self._pulled: CommittedRows | None = None
        self._ready: deque[CommittedRows] = deque()
        """The rest of the current delivery."""
        self._delivering = False
        self._replay: ReplayRange | None = None
        self._replayed: Callable[[pa.RecordBatch], None] = lambda batch: None
        self._replay_ended: Callable[[], None] = lambda: None
        self._journals: set[str] = set()
        self._open_since_checkpoint: set[tuple[str, ProducerId]] = set()
        self.max_rows = MAX_ROWS
        """The maximum number of rows in a returned batch. May be changed at any time."""
        self.resets = 0
        """The number of acknowledgements that were below an earlier one of their producer."""
        self.skipped_ends: dict[str, int] = {}
        """The end offsets, by journal, of messages that commit nothing and open nothing, such as duplicates."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the messages that were added and not sequenced yet."""
        return self._read_bytes

    @property
    def size(self) -> int:
        """The number of messages that were added and not sequenced yet."""
        return self._read_rows

    @property
    def is_ready(self) -> bool:
        """True if `pull` has rows to work on."""
        return bool(self._read) or self._delivering

    @property
    def has_pending(self) -> bool:
        """True if a transaction that is still open was read since the last checkpoint."""
        return bool(self._open_since_checkpoint)

    @property
    def replay_range(self) -> ReplayRange | None:
        """The range to read again before `pull` can continue. None when nothing has to be read again."""
        return self._replay if not self._ready else None

    def read_through(self, journal: str) -> int:
        return self._sequencer.read_through(journal)

    def add(self, journal: str, batch: pa.RecordBatch) -> None:
        """Add rows that were read from a source, in order: batches of `batches.line_batch`."""
        if batch.num_rows:
            self._journals.add(journal)
            self._read.append((journal, batch))
            self._read_rows += batch.num_rows
            self._read_bytes += _size(batch)

    def add_replayed(self, batch: pa.RecordBatch) -> None:
        """Add rows of `replay_range`, in order."""
        self._replayed(batch)

    def end_replay(self) -> None:
        """End the replay, after all rows of `replay_range` were added and pulled. Raises InvalidInput before."""
        if self._ready:
            raise InvalidInput(f"{len(self._ready)} replayed batches were not pulled yet")
        self._replay = None
        self._replay_ended()

    def pull(self) -> CommittedRows | None:
        """Return the next committed rows. None when more has to be read first.

        The previously returned rows then count as consumed.
        """
        self._mark_consumed()
        while True:
            if self._ready:
                self._pulled = self._ready.popleft()
                self._was_in_partial_set = self.in_partial_set
                self.in_partial_set = self._in_parts and self._pulled.rows.num_rows > 0  # The last one has no rows.
                return self._pulled
            if self._replay is not None or not self._read:
                return None
            self._begin()

    def put_back(self, rows: CommittedRows) -> None:
        """Put back the rows that were pulled last and not consumed. The next `pull` returns them again."""
        self._pulled = None
        self.in_partial_set = self._was_in_partial_set
        self._ready.appendleft(rows)

    def checkpoint(self, pruning: Pruning | None) -> dict[str, Source]:
        """Return the states of the sources in columns. Rows that were pulled and not put back count as consumed."""
        self._mark_consumed()
        self._open_since_checkpoint.clear()
        # During a delivery, no producer is pruned: the rest of the delivery depends on its producer.
        sources = self._sequencer.checkpoint(None if self._delivering else pruning)
        return {journal: source for journal, source in sources.items() if journal in self._journals}

    def _mark_consumed(self) -> None:
        pulled, self._pulled = self._pulled, None
        if pulled is not None:
            pulled.mark_consumed()

    def _begin(self) -> None:
        """Sequence the next rows that were read."""
        journal, batch = self._next()
        step = self._sequencer.prepare(journal, batch)
        while batch.num_rows > 1 and (step.replay is not None or step.committed_rows() > self.max_rows):
            place = step.split_row(self.max_rows)
            self._put_off(journal, batch.slice(place))
            batch = batch.slice(0, place)
            step = self._sequencer.prepare(journal, batch)
        if len(step.states) > intake.MAX_PRODUCERS:
            raise InvalidInput(
                f"{journal} has messages of more than {intake.MAX_PRODUCERS} producers: one more is before offset "
                f"{_end(batch)}. Do writers use each producer id only once? Skip their content with the "
                "source's min_offset, or let them write to another journal"
            )
        if step.replay is None and step.committed_rows() <= self.max_rows:
            self._deliver_inline(journal, batch, step)
        else:
            self._deliver_in_parts(journal, batch, step)

    def _deliver_inline(self, journal: str, batch: pa.RecordBatch, step: SequencingStep) -> None:
        committed, self._in_parts = step.committed(), False
        if committed.num_rows or step.advances:
            self._delivering = True
            self._ready.append(CommittedRows(journal, committed, _size(batch), lambda: self._apply(journal, step)))
            return
        settled = step.settled_end()
        if settled is not None:
            self.skipped_ends[journal] = settled
        self._apply(journal, step)

    def _deliver_in_parts(self, journal: str, batch: pa.RecordBatch, step: SequencingStep) -> None:
        """Deliver the rows of one acknowledgement in several batches. A checkpoint may cover only some of them."""
        self._delivering = self._in_parts = True
        producer = ProducerId(batch.column("producer")[0].as_py().to_bytes(6, "big"))
        begin = step.entry[producer].begin if producer in step.entry else -1
        if begin >= 0:
            intake.require_short(journal, producer, begin, _end(batch), self._atomic_bytes)
        last = CommittedRows(journal, batch.slice(0, 0), _size(batch), lambda: self._apply(journal, step))

        def add(rows: pa.RecordBatch) -> None:
            for at in range(0, rows.num_rows, self.max_rows):
                part = rows.slice(at, self.max_rows)
                clock, end = part.column("clock")[-1].as_py(), _end(part)

                def mark_consumed(clock: int = clock, end: int = end) -> None:
                    self._sequencer.delivered(journal, producer, clock, end)

                self._ready.append(CommittedRows(journal, part, _size(part), mark_consumed))

        if step.replay is None:
            add(step.committed())
            self._ready.append(last)
            return
        self._replay = step.replay
        clock = batch.column("clock")[0].as_py()
        replayed = ReplayedRows(step.replay, producer, step.entry[producer], clock)
        self._replayed = lambda rows: add(replayed.committed(rows))
        self._replay_ended = lambda: self._ready.append(last)

    def _apply(self, journal: str, step: SequencingStep) -> None:
        begun = step.begun
        step.apply()
        self.resets += step.resets
        self._delivering = False
        self._open_since_checkpoint.update((journal, producer) for producer in begun)
        states = step.states
        self._open_since_checkpoint -= {
            (of, producer)
            for of, producer in self._open_since_checkpoint
            if of == journal and not states[producer].is_pending
        }

    def _next(self) -> tuple[str, pa.RecordBatch]:
        """Take consecutive batches of one journal, joined up to a size."""
        journal, batch = self._read.popleft()
        batches, size = [batch], _size(batch)
        while self._read and self._read[0][0] == journal and size + _size(self._read[0][1]) <= _JOINED_BYTES:
            batches.append(self._read.popleft()[1])
            size += _size(batches[-1])
        self._read_bytes -= size
        self._read_rows -= sum(each.num_rows for each in batches)
        return journal, batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _put_off(self, journal: str, batch: pa.RecordBatch) -> None:
        self._read.appendleft((journal, batch))
        self._read_rows += batch.num_rows
        self._read_bytes += _size(batch)


def _size(batch: pa.RecordBatch) -> int:
    """Return the bytes of rows of a journal, from the first to the last."""
    return _end(batch) - int(batch.column("offset")[0].as_py()) if batch.num_rows else 0


def _end(batch: pa.RecordBatch) -> int:
    return int(batch.column("end")[-1].as_py())
