"""Decisions about the next rows of one journal, and the rows held in memory, for `columnar_sequencer.py`.

Rows of a journal come in pieces: batches with the segments of their rows (`columnar.py`). A `RowDecision` resolves the
segments of new rows together with the held pieces' segments, and changes nothing until it is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import structlog

from coranto.errors import InvalidInput
from coranto.messages.batches import POSITION
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.columnar import (
    CommittedWindows,
    Int32s,
    Int64s,
    Mask,
    PendingPart,
    RowSegment,
    SequencingResult,
    UInt16s,
    UInt64s,
    committed_mask,
    replay_mask,
    resolve,
    scan,
)
from coranto.messages.sequencer import ReplayRange
from coranto.messages.uuids import ProducerId

_log = structlog.get_logger(__name__)

Replay = Callable[[ReplayRange], Iterable[pa.RecordBatch]]
"""Reads a part of a journal again. It must fail rather than skip messages."""


class PositionColumns(NamedTuple):
    """The position columns of rows of one journal, as numpy arrays."""

    producers: UInt64s
    clocks: UInt64s
    flags: UInt16s
    offsets: Int64s

    def where(self, mask: Mask) -> PositionColumns:
        return PositionColumns(self.producers[mask], self.clocks[mask], self.flags[mask], self.offsets[mask])


@dataclass(slots=True)
class Piece:
    """Rows of one journal, in offset order, with their segments."""

    batch: pa.RecordBatch
    clocks: UInt64s
    offsets: Int64s
    row_segment: Int32s
    segments: list[RowSegment]
    alive: list[int]
    """The indices of the segments that are still needed, in order."""

    def row_at(self, offset: int) -> int:
        """Return the row that begins at an offset."""
        return int(np.searchsorted(self.offsets, offset))

    def part(self, index: int) -> int:
        """Return the index in `segments` of the needed segment number `index`."""
        return self.alive[index]


class JournalState:
    """The state of one journal."""

    __slots__ = ("in_hand", "name", "read_through", "states")

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.read_through = source.read_through
        self.states = dict(source.seen_producers)
        self.in_hand: set[ProducerId] = set()
        """The pending producers whose pending messages are all held."""


class RowDecision:
    """The decision about the next rows of one journal. It takes effect with `apply`."""

    def __init__(
        self, journal: JournalState, batch: pa.RecordBatch, held: Sequence[Piece], replay: Replay | None
    ) -> None:
        self.journal = journal
        columns = position_columns(batch)
        if len(columns.offsets) and (
            columns.offsets[0] < journal.read_through or (columns.offsets[1:] <= columns.offsets[:-1]).any()
        ):
            raise InvalidInput(
                f"rows of {journal.name} begin at offset {columns.offsets[0]}, and offsets must increase; "
                f"continue from offset {journal.read_through}"
            )
        self.new = piece_of(batch, columns)
        self._held = held
        pieces = [*held, self.new]
        through = int(batch.column("end")[-1].as_py()) if batch.num_rows else journal.read_through
        resolution = resolve(map(live_segments, pieces), journal.states, replayed=journal.in_hand, through=through)
        self.needed: Mapping[ProducerId, ProducerState] = {}
        """The states of producers whose earlier rows are needed but were not replayed."""
        if resolution.replay and replay is None:
            self.needed = resolution.replay
        elif resolution.replay and replay is not None:
            replayed = read_again(journal, resolution.replay, replay)
            pieces = [*replayed, *pieces]
            in_hand = journal.in_hand | resolution.replay.keys()
            resolution = resolve(map(live_segments, pieces), journal.states, replayed=in_hand, through=through)
        self.pieces = pieces
        self.resolution = resolution
        self._read_through = through
        self.decided = _decided(pieces, resolution)

    def committed(self) -> pa.RecordBatch:
        return self.decided.batch(self.new.batch)

    def pending_offsets(self) -> Int64s:
        """Return the offsets of the new rows that are pending after the step."""
        parts = self._new_parts()
        return self.new.offsets[_pending_mask(self.new, parts)] if parts else np.empty(0, dtype=np.int64)

    def apply(self) -> Piece | None:
        """Update the journal's state, and return the new pending rows to hold, if any."""
        journal, resolution = self.journal, self.resolution
        for reset in resolution.resets:
            _log.warning(
                "producer.reset",
                journal=journal.name,
                offset=reset.offset,
                producer=reset.producer.hex(),
                clock=reset.clock,
            )
        journal.read_through = self._read_through
        journal.states = resolution.states
        journal.in_hand = set(resolution.pending)
        alive: dict[int, list[int]] = {}
        for parts in resolution.pending.values():
            for part in parts:
                if part.range != len(self.pieces) - 1:
                    alive.setdefault(part.range, []).append(part.segment)
        first_held = len(self.pieces) - 1 - len(self._held)
        for number, piece in enumerate(self._held, first_held):
            piece.alive = sorted(piece.part(index) for index in alive.get(number, ()))
        new_parts = self._new_parts()
        return _pending_rows(self.new, new_parts, journal) if new_parts else None

    def _new_parts(self) -> list[PendingPart]:
        last = len(self.pieces) - 1
        found = (part for parts in self.resolution.pending.values() for part in parts if part.range == last)
        return sorted(found, key=lambda part: part.segment)


def position_columns(batch: pa.RecordBatch) -> PositionColumns:
    missing = [name for name in POSITION.names if batch.schema.get_field_index(name) < 0]
    if missing:
        raise InvalidInput(f"the batch lacks {', '.join(missing)}: it needs the columns {', '.join(POSITION.names)}")
    return PositionColumns(
        batch.column("producer").to_numpy(zero_copy_only=False).astype(np.uint64, copy=False),
        batch.column("clock").to_numpy(zero_copy_only=False).astype(np.uint64, copy=False),
        batch.column("flags").to_numpy(zero_copy_only=False).astype(np.uint16, copy=False),
        batch.column("offset").to_numpy(zero_copy_only=False).astype(np.int64, copy=False),
    )


def piece_of(batch: pa.RecordBatch, columns: PositionColumns) -> Piece:
    segments, row_segment = scan(*columns)
    return Piece(batch, columns.clocks, columns.offsets, row_segment, segments, list(range(len(segments))))


def live_segments(piece: Piece) -> list[RowSegment]:
    return [piece.segments[part] for part in piece.alive]


def range_of(journal: JournalState, needed: Mapping[ProducerId, ProducerState]) -> ReplayRange:
    return ReplayRange(journal.name, min(state.begin for state in needed.values()), journal.read_through)


def read_again(journal: JournalState, needed: Mapping[ProducerId, ProducerState], replay: Replay) -> list[Piece]:
    """Read again the rows before `read_through` that were pending for the needed producers."""
    wanted = range_of(journal, needed)
    pieces = []
    for batch in replay(wanted):
        columns = columns_of_replay(batch, wanted)
        counts = replay_mask(columns.producers, columns.clocks, columns.offsets, needed, journal.read_through)
        if counts.any():
            pieces.append(piece_of(batch.filter(pa.array(counts)), columns.where(counts)))
    return pieces


def columns_of_replay(batch: pa.RecordBatch, wanted: ReplayRange) -> PositionColumns:
    """Return the position columns of replayed rows. Raises InvalidInput for rows outside of the range."""
    columns = position_columns(batch)
    if len(columns.offsets) and not wanted.begin <= columns.offsets[0] <= columns.offsets[-1] < wanted.end:
        raise InvalidInput(
            f"rows at [{columns.offsets[0]}, {columns.offsets[-1]}] are not part of the replay of {wanted.journal} "
            f"at [{wanted.begin}, {wanted.end})"
        )
    return columns


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Committed rows of pieces, in the order of the pieces."""

    chosen: list[tuple[pa.RecordBatch, Mask]]
    when: Int64s
    """The commit offset of each row."""
    offsets: Int64s

    def batch(self, empty: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows in order of commit, or an empty slice of `empty` if there are none."""
        if not self.chosen:
            return empty.slice(0, 0)
        batches = [_kept(batch, mask) for batch, mask in self.chosen]
        together = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        order = np.lexsort((self.offsets, self.when))
        in_order = (order[1:] > order[:-1]).all()
        return together if in_order else together.take(pa.array(order))


def _decided(pieces: Sequence[Piece], resolution: SequencingResult) -> ChosenRows:
    """Choose the committed rows."""
    chosen: list[tuple[pa.RecordBatch, Mask]] = []
    when: list[Int64s] = [np.empty(0, dtype=np.int64)]
    offsets: list[Int64s] = [np.empty(0, dtype=np.int64)]
    for piece, windows, acknowledged in zip(pieces, resolution.windows, resolution.acknowledged_at, strict=True):
        count = len(piece.segments)
        lo, hi, at = [0] * count, [0] * count, [-1] * count
        for index, part in enumerate(piece.alive):
            lo[part], hi[part], at[part] = windows.lo[index], windows.hi[index], acknowledged[index]
        mask = committed_mask(piece.row_segment, CommittedWindows(tuple(lo), tuple(hi)), piece.clocks)
        rows: Int64s = np.flatnonzero(mask)
        if not len(rows):
            continue
        # Rows outside of transactions, and rows without a segment, are committed at their own offsets.
        by_segment = np.array([*at, -1, -1], dtype=np.int64)[piece.row_segment[rows]]
        chosen.append((piece.batch, mask))
        offsets.append(piece.offsets[rows])
        when.append(np.where(by_segment < 0, offsets[-1], by_segment))
    return ChosenRows(chosen, np.concatenate(when), np.concatenate(offsets))


def _pending_rows(piece: Piece, parts: Sequence[PendingPart], journal: JournalState) -> Piece:
    """Return a piece's pending rows, and set `begin` in the journal's states to the exact first pending row."""
    number = np.full(len(piece.segments) + 2, -1, dtype=np.int32)
    for index, part in enumerate(parts):
        number[part.segment] = index
    mask = _pending_mask(piece, parts)
    clocks, offsets = piece.clocks[mask], piece.offsets[mask]
    row_segment = number[piece.row_segment[mask]]
    first_row = np.unique(row_segment, return_index=True)[1]
    segments = []
    for part, row in zip(parts, first_row.tolist(), strict=True):
        old = piece.segments[part.segment]
        segment = old._replace(first_clock=int(clocks[row]), first_offset=int(offsets[row]))
        state = journal.states[old.producer]
        if state.begin == old.first_offset:
            journal.states[old.producer] = ProducerState(state.last_ack, segment.first_offset, state.seen_through)
        segments.append(segment)
    return Piece(_kept(piece.batch, mask), clocks, offsets, row_segment, segments, list(range(len(segments))))


def _kept(batch: pa.RecordBatch, mask: Mask) -> pa.RecordBatch:
    """Return the rows of a mask.

    Adjacent rows are not copied if they are more than half of the batch: a slice keeps the whole batch in memory.
    """
    rows = np.flatnonzero(mask)
    if 2 * len(rows) > len(mask) and rows[-1] - rows[0] + 1 == len(rows):
        return batch.slice(int(rows[0]), len(rows))
    return batch.filter(pa.array(mask))


def _pending_mask(piece: Piece, parts: Sequence[PendingPart]) -> Mask:
    """Return the mask of a piece's pending rows."""
    above = np.full(len(piece.segments) + 2, np.iinfo(np.uint64).max, dtype=np.uint64)
    for part in parts:
        above[part.segment] = part.above
    pending: Mask = piece.clocks > above[piece.row_segment]
    return pending
