"""Sequencing of Arrow batches: the `Sequencer` for columns.

`ColumnarSequencer` takes record batches of messages in reading order and returns the committed ones. It decides like
`Sequencer`, but much faster, because no message becomes a Python object. It holds pending messages as columns, up to a
number of rows. When an acknowledgement commits messages that are no longer held, the journal is read again.
`sequence_ranges` does the same for several ranges at once. Both are built on `columnar.py`.

Batches have the columns of `batches.POSITION`. Other columns are passed on. Needs pyarrow (the `consumers` extra).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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
from coranto.messages.pruning import Pruning
from coranto.messages.sequencer import ReplayRange
from coranto.messages.uuids import ProducerId

_log = structlog.get_logger(__name__)

DEFAULT_RING_ROWS: Final = 1 << 20

Replay = Callable[[ReplayRange], Iterable[pa.RecordBatch]]
"""Reads a part of a journal again. It must fail rather than skip messages."""


class _Columns(NamedTuple):
    """The position columns of rows of one journal, as numpy arrays."""

    producers: UInt64s
    clocks: UInt64s
    flags: UInt16s
    offsets: Int64s

    def where(self, mask: Mask) -> _Columns:
        return _Columns(self.producers[mask], self.clocks[mask], self.flags[mask], self.offsets[mask])


@dataclass(slots=True)
class _Piece:
    """Rows of one journal, in offset order, with their segments."""

    batch: pa.RecordBatch
    clocks: UInt64s
    offsets: Int64s
    row_segment: Int32s
    segments: list[RowSegment]
    alive: list[int]
    """The indices of the segments that still count, in order."""

    def part(self, index: int) -> int:
        """Return the index of the segment at place `index` among those that count."""
        return self.alive[index]


class _Journal:
    """The state of one journal."""

    __slots__ = ("in_hand", "name", "read_through", "states")

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.read_through = source.read_through
        self.states = source.seen_producers
        self.in_hand: set[ProducerId] = set()
        """The pending producers whose pending messages are all held."""


class ColumnarSequencer:
    """Decides which rows of batches are committed, for any number of journals.

    `replay` is called when rows are needed that `ring_rows` later ones have displaced, or that were pending in
    `sources`. Its batches need the same columns as the batches fed.
    """

    def __init__(
        self, replay: Replay, sources: Mapping[str, Source] | None = None, *, ring_rows: int = DEFAULT_RING_ROWS
    ) -> None:
        if ring_rows < 0:
            raise InvalidInput(f"{ring_rows} rows cannot be held; give 1 or more")
        self._replay = replay
        self._ring_rows = ring_rows
        self._journals = {name: _Journal(name, source) for name, source in (sources or {}).items()}
        self._held: deque[tuple[_Journal, _Piece]] = deque()

    @property
    def held_rows(self) -> int:
        """The number of rows in memory."""
        return sum(piece.batch.num_rows for _, piece in self._held)

    def read_through(self, journal: str) -> int:
        """Return the offset below which rows of the journal were fed, and the committed ones returned."""
        known = self._journals.get(journal)
        return known.read_through if known is not None else 0

    def feed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Feed the next messages, those of each journal in offset order, and return the rows that they commit.

        The returned rows of each journal are in the order in which they were committed. Rows of one transaction are in
        the order in which they were published. Acknowledgements are left out. All rows that one acknowledgement commits
        are returned together.

        Raises InvalidInput for rows below `read_through`, and the errors of `replay`. Nothing changes then.
        """
        names = batch.column(batch.schema.get_field_index("journal"))
        if isinstance(names, pa.DictionaryArray):
            names = names.cast(pa.string())
        found: list[str] = pc.unique(names).to_pylist()
        steps = []
        for name in found:
            of_one = batch if len(found) == 1 else batch.filter(pc.equal(names, name))
            journal = self._journals.get(name) or _Journal(name, Source())
            steps.append(
                _Sequencing(journal, of_one, [piece for of, piece in self._held if of is journal], self._replay)
            )
        committed = [piece for step in steps for piece in step.committed]
        for step in steps:
            self._journals[step.journal.name] = step.journal
            held = step.apply()
            if held is not None:
                self._held.append((step.journal, held))
        self._forget()
        if not committed:
            return batch.slice(0, 0)
        return committed[0] if len(committed) == 1 else pa.concat_batches(committed)

    def checkpoint(self, pruning: Pruning | None = None) -> dict[str, Source]:
        """Return the state to restore from, for each journal. A `Sequencer` can go on from it too.

        Forgets producers as `pruning` says; without it, none.
        """
        sources = {}
        for journal in self._journals.values():
            if pruning is not None:
                journal.states = pruning.prune(journal.name, journal.states, journal.read_through)
                journal.in_hand &= journal.states.keys()
            sources[journal.name] = Source(journal.read_through, dict(journal.states))
        self._forget()
        return sources

    def _forget(self) -> None:
        """Drop rows that are decided, and the oldest rows beyond the limit."""
        rows = 0
        kept: deque[tuple[_Journal, _Piece]] = deque()
        for journal, piece in reversed(self._held):  # The newest first, so that the oldest do not fit.
            piece.alive = [part for part in piece.alive if piece.segments[part].producer in journal.in_hand]
            if not piece.alive:
                continue
            rows += piece.batch.num_rows
            if rows > self._ring_rows:
                journal.in_hand -= {piece.segments[part].producer for part in piece.alive}
            else:
                kept.appendleft((journal, piece))
        for journal, piece in kept:
            piece.alive = [part for part in piece.alive if piece.segments[part].producer in journal.in_hand]
        self._held = deque(one for one in kept if one[1].alive)


def sequence_ranges(
    ranges: Sequence[pa.RecordBatch],
    source: Source,
    replay: Replay,
    run: Callable[[Callable[..., Any], Iterable[Any], Iterable[Any]], Iterable[Any]] = map,
) -> tuple[list[pa.RecordBatch], Source]:
    """Return the committed rows of adjacent ranges of one journal, and the source to go on from.

    `source` is the state before the ranges. `run` is `map` or, for instance, the `map` of a thread pool: it scans the
    ranges in parallel, and then filters their committed rows in parallel. The rows of each range are in the order in
    which they were read. Rows that were pending in `source` come before them, from `replay`.
    """
    pieces: list[_Piece] = list(run(_scanned, ranges, itertools.repeat(None)))
    ends = [batch.column("end")[-1].as_py() for batch in ranges if batch.num_rows]
    through = ends[-1] if ends else source.read_through
    resolution = resolve(map(_live, pieces), source.seen_producers, replayed=(), through=through)
    if resolution.replay:
        name = next(batch for batch in ranges if batch.num_rows).column("journal")[0].as_py()
        pieces = [*_read_again(name, source.read_through, resolution.replay, replay), *pieces]
        replayed = resolution.replay.keys()
        resolution = resolve(map(_live, pieces), source.seen_producers, replayed=replayed, through=through)
    committed = list(run(_chosen, pieces, resolution.windows))
    return committed, Source(through, resolution.states)


def _scanned(batch: pa.RecordBatch, _: None) -> _Piece:
    return _piece(batch, _columns(batch))


def _chosen(piece: _Piece, windows: CommittedWindows) -> pa.RecordBatch:
    return piece.batch.filter(pa.array(committed_mask(piece.row_segment, windows, piece.clocks)))


class _Sequencing:
    """The outcome of the next rows of one journal. `apply` puts it into effect."""

    def __init__(self, journal: _Journal, batch: pa.RecordBatch, held: Sequence[_Piece], replay: Replay) -> None:
        self.journal = journal
        columns = _columns(batch)
        if len(columns.offsets) and (
            columns.offsets[0] < journal.read_through or (columns.offsets[1:] <= columns.offsets[:-1]).any()
        ):
            raise InvalidInput(
                f"rows of {journal.name} begin at offset {columns.offsets[0]} and must grow; "
                f"go on from offset {journal.read_through}"
            )
        self._new = _piece(batch, columns)
        self._held = held
        pieces = [*held, self._new]
        through = int(batch.column("end")[-1].as_py()) if batch.num_rows else journal.read_through
        resolution = resolve(map(_live, pieces), journal.states, replayed=journal.in_hand, through=through)
        if resolution.replay:
            replayed = _read_again(journal.name, journal.read_through, resolution.replay, replay)
            pieces = [*replayed, *pieces]
            in_hand = journal.in_hand | resolution.replay.keys()
            resolution = resolve(map(_live, pieces), journal.states, replayed=in_hand, through=through)
        self._pieces = pieces
        self._resolution = resolution
        self._read_through = through
        for reset in resolution.resets:
            _log.warning(
                "producer.reset",
                journal=journal.name,
                offset=reset.offset,
                producer=reset.producer.hex(),
                clock=reset.clock,
            )
        self.committed = _committed(pieces, resolution)

    def apply(self) -> _Piece | None:
        """Change the journal's state, and return the new pending rows, which are to be held."""
        journal, resolution = self.journal, self._resolution
        journal.read_through = self._read_through
        journal.states = resolution.states
        journal.in_hand = set(resolution.pending)
        alive: dict[int, list[int]] = {}
        new_parts: list[PendingPart] = []
        for parts in resolution.pending.values():
            for part in parts:
                if part.range == len(self._pieces) - 1:
                    new_parts.append(part)
                else:
                    alive.setdefault(part.range, []).append(part.segment)
        first_held = len(self._pieces) - 1 - len(self._held)
        for number, piece in enumerate(self._held, first_held):
            piece.alive = sorted(piece.part(index) for index in alive.get(number, ()))
        return (
            _pending_rows(self._new, sorted(new_parts, key=lambda part: part.segment), journal) if new_parts else None
        )


def _columns(batch: pa.RecordBatch) -> _Columns:
    missing = [name for name in POSITION.names if batch.schema.get_field_index(name) < 0]
    if missing:
        raise InvalidInput(f"the batch lacks {', '.join(missing)}: it needs the columns {', '.join(POSITION.names)}")
    return _Columns(
        batch.column("producer").to_numpy(zero_copy_only=False).astype(np.uint64, copy=False),
        batch.column("clock").to_numpy(zero_copy_only=False).astype(np.uint64, copy=False),
        batch.column("flags").to_numpy(zero_copy_only=False).astype(np.uint16, copy=False),
        batch.column("offset").to_numpy(zero_copy_only=False).astype(np.int64, copy=False),
    )


def _piece(batch: pa.RecordBatch, columns: _Columns) -> _Piece:
    segments, row_segment = scan(*columns)
    return _Piece(batch, columns.clocks, columns.offsets, row_segment, segments, list(range(len(segments))))


def _live(piece: _Piece) -> list[RowSegment]:
    return [piece.segments[part] for part in piece.alive]


def _read_again(
    journal: str, read_through: int, needed: Mapping[ProducerId, ProducerState], replay: Replay
) -> list[_Piece]:
    """Read again the rows before `read_through` that were pending for the needed producers."""
    wanted = ReplayRange(journal, min(state.begin for state in needed.values()), read_through)
    pieces = []
    for batch in replay(wanted):
        columns = _columns(batch)
        if len(columns.offsets) and not wanted.begin <= columns.offsets[0] <= columns.offsets[-1] < wanted.end:
            raise InvalidInput(
                f"rows at [{columns.offsets[0]}, {columns.offsets[-1]}] are not part of the replay of {journal} "
                f"at [{wanted.begin}, {wanted.end})"
            )
        counts = replay_mask(columns.producers, columns.clocks, columns.offsets, needed, read_through)
        if counts.any():
            pieces.append(_piece(batch.filter(pa.array(counts)), columns.where(counts)))
    return pieces


def _committed(pieces: Sequence[_Piece], resolution: SequencingResult) -> list[pa.RecordBatch]:
    """Return the committed rows in order, as a list of one batch or none."""
    batches: list[pa.RecordBatch] = []
    when: list[Int64s] = []
    offsets: list[Int64s] = []
    for piece, windows, acknowledged in zip(pieces, resolution.windows, resolution.acknowledged_at, strict=True):
        count = len(piece.segments)
        lo, hi, at = [0] * count, [0] * count, [-1] * count
        for index, part in enumerate(piece.alive):
            lo[part], hi[part], at[part] = windows.lo[index], windows.hi[index], acknowledged[index]
        mask = committed_mask(piece.row_segment, CommittedWindows(tuple(lo), tuple(hi)), piece.clocks)
        rows: Int64s = np.flatnonzero(mask)
        if not len(rows):
            continue
        whole = len(rows) == piece.batch.num_rows
        batches.append(piece.batch if whole else piece.batch.filter(pa.array(mask)))
        # Rows outside of transactions, and rows without a segment, are committed at their own offsets.
        by_segment = np.array([*at, -1, -1], dtype=np.int64)[piece.row_segment[rows]]
        offsets.append(piece.offsets[rows])
        when.append(np.where(by_segment < 0, offsets[-1], by_segment))
    if not batches:
        return []
    together = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    order = np.lexsort((np.concatenate(offsets), np.concatenate(when)))
    in_order = (order[1:] > order[:-1]).all()
    return [together if in_order else together.take(pa.array(order))]


def _pending_rows(piece: _Piece, parts: Sequence[PendingPart], journal: _Journal) -> _Piece:
    """Return a piece's pending rows, and set `begin` in the journal's states to the exact first pending row."""
    above = np.full(len(piece.segments) + 2, np.iinfo(np.uint64).max, dtype=np.uint64)
    number = np.full(len(piece.segments) + 2, -1, dtype=np.int32)
    for index, part in enumerate(parts):
        above[part.segment] = part.above
        number[part.segment] = index
    mask: Mask = piece.clocks > above[piece.row_segment]
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
    return _Piece(
        piece.batch.filter(pa.array(mask)), clocks, offsets, row_segment, segments, list(range(len(segments)))
    )
