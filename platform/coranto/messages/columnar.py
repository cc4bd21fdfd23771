"""Sequencing of whole columns of messages, spread over any number of workers.

The rules come from `sequencer.py`. This module applies them to columns instead of single messages, and in steps that
let workers read parts of one journal at the same time:

1.  Each worker **scans** the rows of its range: one contiguous part of a journal, in offset order. The effect of a
    producer's rows depends on earlier ranges, which the worker does not know. But it can compress the rows to
    *segments*, in order: a run of CONTINUE_TXN or of OUTSIDE_TXN rows with increasing clocks, or one ACK_TXN. A row
    whose clock does not exceed the largest earlier clock of its run is always a duplicate, and is dropped.
2.  The driver **resolves** the segments of all ranges in order, starting from the checkpoint's producer states. Each
    segment gets a window of clocks, and each producer its next state.
3.  The workers apply the windows: a row is committed when its clock lies within its segment's window.

A range may be scanned in batches of any size (`RangeScanner`), and scanning again yields the same segment numbers.

**Replay.** Messages that were pending at the checkpoint are below its `read_through`. They are needed only when an
acknowledgement commits them: `SequencingResult.replay` then has their producers. Scan the journal from the smallest of
their `begin` offsets up to `read_through`, filtered by `replay_mask`. Prepend those ranges to the others, and resolve
again.

A producer is a `uint64` here: the six bytes of its id as a big-endian number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coranto.messages.checkpoints import ProducerState
from coranto.messages.uuids import Flags, ProducerId

UInt64s: TypeAlias = NDArray[np.uint64]
UInt16s: TypeAlias = NDArray[np.uint16]
Int64s: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]
Bytes: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]

DROPPED: Final = -1
"""The value in `row_segment` for a duplicate or an acknowledgement, which is never a content row."""
ALWAYS: Final = -2
"""The value in `row_segment` for a message with a zero clock, which is always committed."""

_FLAGS_OF: Final = (Flags.OUTSIDE_TXN, Flags.CONTINUE_TXN, Flags.ACK_TXN)


class RowSegment(NamedTuple):
    """A run of one producer's rows. An ACK_TXN is a run of its own."""

    producer: ProducerId
    flags: Flags
    first_clock: int
    last_clock: int
    """The largest clock: the clock of the last row that was not dropped."""
    first_offset: int
    """The journal offset of the first row."""


class RangeScan(NamedTuple):
    """A scanned range: its segments by first offset, and for each row its segment's index, or DROPPED or ALWAYS."""

    segments: list[RowSegment]
    row_segment: Int32s


class CommittedWindows(NamedTuple):
    """The windows of one range: the rows of segment i with a clock in (lo[i], hi[i]] are committed."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]


class PendingPart(NamedTuple):
    """A segment with rows that are pending after the last range: rows whose clock is larger than `above`."""

    range: int
    segment: int
    above: int


class ClockReset(NamedTuple):
    """An acknowledgement with a clock below an earlier one: its producer recovered an outdated checkpoint.

    Messages that the producer publishes again are delivered again: for them exactly-once semantics are lost.
    """

    producer: ProducerId
    offset: int
    clock: int
    last_ack: int


@dataclass(frozen=True, slots=True)
class SequencingResult:
    """The result of `resolve` for all ranges.

    When `replay` is not empty, the other fields are not final. It holds the entry states of producers with messages
    from before the checkpoint that an acknowledgement in these ranges commits. Add those messages to the ranges and
    resolve again.
    """

    windows: tuple[CommittedWindows, ...]
    """The windows of each range."""
    states: dict[ProducerId, ProducerState]
    """The producer states after the last range.

    `begin` is the offset of the first pending message. It is an earlier offset of the same segment if duplicates of
    acknowledged messages are right before that message. Reading again from there has the same result.
    """
    replay: dict[ProducerId, ProducerState]
    resets: tuple[ClockReset, ...]
    acknowledged_at: tuple[tuple[int, ...], ...]
    """For each range and each of its segments, the offset of the acknowledgement that committed the segment, or -1."""
    pending: dict[ProducerId, tuple[PendingPart, ...]]
    """The parts with pending messages, by producer. Producers with pending messages before the ranges are omitted."""


def producer_number(producer: ProducerId) -> int:
    """Return the number that represents a producer in columns."""
    return int.from_bytes(producer, "big")


def scan(producers: UInt64s, clocks: UInt64s, flags: UInt16s, offsets: Int64s) -> RangeScan:
    """Scan a range of rows in offset order."""
    scanner = RangeScanner()
    row_segment = scanner.feed(producers, clocks, flags, offsets)
    return RangeScan(scanner.segments(), row_segment)


class RangeScanner:
    """Scans one range batch by batch. The result does not depend on where batches end."""

    def __init__(self) -> None:
        # The segments' columns; a few values change while a segment continues in a later batch.
        self._producers: list[int] = []
        self._flags: list[int] = []
        self._first_clocks: list[int] = []
        self._last_clocks: list[int] = []
        self._first_offsets: list[int] = []
        self._open: dict[int, int] = {}  # By producer, the index of its last segment.

    def feed(self, producers: UInt64s, clocks: UInt64s, flags: UInt16s, offsets: Int64s) -> Int32s:
        """Scan the next rows, in offset order. Return the segment of each, numbered from the beginning of the range."""
        row_segment = np.full(len(clocks), DROPPED, dtype=np.int32)
        zero = clocks == 0
        if zero.any():
            row_segment[zero] = ALWAYS
            rows = np.flatnonzero(~zero)
        else:
            rows = np.arange(len(clocks))
        if not len(rows):
            return row_segment

        # Group the rows by producer, in offset order.
        if len(rows) != len(clocks) or not (producers == producers[0]).all():
            rows = rows[np.argsort(producers[rows], kind="stable")]
            producers, clocks, flags, offsets = producers[rows], clocks[rows], flags[rows], offsets[rows]
        known = np.where(flags <= Flags.ACK_TXN, flags, np.uint16(Flags.OUTSIDE_TXN))

        # Runs: rows of one producer with equal flags. Each acknowledgement is a run of its own.
        new_producer = np.ones(len(rows), dtype=np.bool_)
        new_producer[1:] = producers[1:] != producers[:-1]
        starts = new_producer.copy()
        starts[1:] |= (known[1:] != known[:-1]) | (known[1:] == Flags.ACK_TXN)
        run_of_row = np.cumsum(starts) - 1
        first_row = np.flatnonzero(starts)
        kept, largest = _keep_growing(clocks, starts, run_of_row, first_row)

        # Number runs by their first offset, so that numbers do not depend on batches. Join runs that continue from
        # earlier batches.
        continued, floor = self._continued(new_producer, first_row, producers, known, clocks, largest, offsets)
        number = np.empty(len(first_row), dtype=np.int32)
        number[continued >= 0] = continued[continued >= 0]
        new = np.flatnonzero(continued < 0)
        new = new[np.argsort(rows[first_row[new]])]
        number[new] = np.arange(len(self._flags), len(self._flags) + len(new), dtype=np.int32)
        heads = first_row[new]
        self._producers += producers[heads].tolist()
        self._flags += known[heads].tolist()
        self._first_clocks += clocks[heads].tolist()
        self._last_clocks += largest[new].tolist()
        self._first_offsets += offsets[heads].tolist()
        last_run = np.flatnonzero(np.append(new_producer[first_row[1:]], True))
        self._open.update(zip(producers[first_row[last_run]].tolist(), number[last_run].tolist(), strict=True))

        kept &= (clocks > floor[run_of_row]) & (known != Flags.ACK_TXN)
        row_segment[rows[kept]] = number[run_of_row[kept]]
        return row_segment

    def _continued(
        self,
        new_producer: Mask,
        first_row: Int64s,
        producers: UInt64s,
        known: UInt16s,
        clocks: UInt64s,
        largest: UInt64s,
        offsets: Int64s,
    ) -> tuple[Int32s, UInt64s]:
        """Return for each run the earlier batch's segment that it continues, or -1, and that segment's last clock."""
        continued = np.full(len(first_row), -1, dtype=np.int32)
        floor = np.zeros(len(first_row), dtype=np.uint64)
        for run in np.flatnonzero(new_producer[first_row]).tolist():
            row = first_row[run]
            index = self._open.get(int(producers[row]))
            if index is None or self._flags[index] != known[row] or known[row] == Flags.ACK_TXN:
                continue
            continued[run] = index
            floor[run] = self._last_clocks[index]
            self._last_clocks[index] = max(self._last_clocks[index], int(largest[run]))
        return continued, floor

    def segments(self) -> list[RowSegment]:
        """Return the segments of all rows so far, by first offset."""
        ids = {number: ProducerId(number.to_bytes(6, "big")) for number in self._open}
        return [
            RowSegment(ids[producer], _FLAGS_OF[flags], first_clock, last_clock, first_offset)
            for producer, flags, first_clock, last_clock, first_offset in zip(
                self._producers,
                self._flags,
                self._first_clocks,
                self._last_clocks,
                self._first_offsets,
                strict=True,
            )
        ]


def resolve(
    ranges: Iterable[Sequence[RowSegment]],
    entry: Mapping[ProducerId, ProducerState],
    *,
    replayed: Collection[ProducerId],
    through: int = 0,
) -> SequencingResult:
    """Decide which rows adjacent ranges of one journal commit, given the producer states `entry` before them.

    `replayed` are the pending producers of `entry` whose messages from before the checkpoint are part of the ranges.
    `through` is the end offset of the ranges. It becomes the `seen_through` of the producers in them.
    """
    tracks = {
        producer: _Track(
            state.last_ack, -1 if producer in replayed else state.begin, state.seen_through, producer not in replayed
        )
        for producer, state in entry.items()
    }
    windows: list[tuple[list[int], list[int]]] = []
    acknowledged: list[list[int]] = []
    replay: dict[ProducerId, ProducerState] = {}
    resets: list[ClockReset] = []

    for number, segments in enumerate(ranges):
        lo, hi = [0] * len(segments), [0] * len(segments)
        windows.append((lo, hi))
        acknowledged.append([-1] * len(segments))
        for index, segment in enumerate(segments):
            track = tracks.get(segment.producer)
            if track is None:
                track = tracks[segment.producer] = _Track(segment.first_clock - 1, -1, through, False)
            track.seen_through = through
            if segment.flags is Flags.CONTINUE_TXN:
                if segment.last_clock > track.top:
                    track.pending.append(PendingPart(number, index, track.top))
                    track.top = segment.last_clock
                    if track.begin == -1:
                        track.begin = segment.first_offset
            elif segment.flags is Flags.OUTSIDE_TXN:
                if segment.last_clock > track.last_ack:
                    lo[index], hi[index] = track.last_ack, segment.last_clock
                    track.decide(segment.last_clock)
            else:
                clock = segment.first_clock
                if clock > track.last_ack:
                    if track.is_unread and track.begin != -1:
                        replay[segment.producer] = entry[segment.producer]
                    for part, index_in_part, above in track.pending:
                        windows[part][0][index_in_part], windows[part][1][index_in_part] = above, clock
                        acknowledged[part][index_in_part] = segment.first_offset
                elif clock < track.last_ack:
                    resets.append(ClockReset(segment.producer, segment.first_offset, clock, track.last_ack))
                track.decide(clock)

    committed = tuple(CommittedWindows(tuple(lo), tuple(hi)) for lo, hi in windows)
    states = {producer: track.state() for producer, track in tracks.items()}
    pending = {
        producer: tuple(track.pending) for producer, track in tracks.items() if track.pending and not track.is_unread
    }
    return SequencingResult(committed, states, replay, tuple(resets), tuple(map(tuple, acknowledged)), pending)


class _Track:
    """The state of one producer while segments are resolved."""

    __slots__ = ("begin", "is_unread", "last_ack", "pending", "seen_through", "top")

    def __init__(self, last_ack: int, begin: int, seen_through: int, is_unread: bool) -> None:
        self.last_ack = last_ack
        self.begin = begin
        self.seen_through = seen_through
        self.is_unread = is_unread and begin != -1  # Pending messages of the entry state are not in the ranges.
        self.top = last_ack  # The largest clock among pending messages in the ranges.
        self.pending: list[PendingPart] = []

    def decide(self, clock: int) -> None:
        """Record that everything up to `clock` is committed or dropped, and nothing is pending."""
        self.last_ack = self.top = clock
        self.begin = -1
        self.is_unread = False
        self.pending.clear()

    def state(self) -> ProducerState:
        return ProducerState(self.last_ack, self.begin, self.seen_through)


def committed_mask(row_segment: Int32s, windows: CommittedWindows, clocks: UInt64s) -> Mask:
    """Return the mask of a range's committed content rows, from their segments (`scan`) and the range's windows."""
    # DROPPED and ALWAYS are negative indices: they select the two windows added here, which contain no clock.
    lo = np.array([*windows.lo, 0, 0], dtype=np.uint64)
    hi = np.array([*windows.hi, 0, 0], dtype=np.uint64)
    committed: Mask = (clocks > lo[row_segment]) & (clocks <= hi[row_segment])
    committed |= row_segment == ALWAYS
    return committed


def replay_mask(
    producers: UInt64s,
    clocks: UInt64s,
    offsets: Int64s,
    replay: Mapping[ProducerId, ProducerState],
    read_through: int,
) -> Mask:
    """Return the mask of rows to scan: those from `read_through` on, and earlier ones that were pending in `replay`.

    Remove the other rows before scanning.
    """
    counts: Mask = offsets >= read_through
    if not counts.all():
        for producer, state in replay.items():
            if state.is_pending:
                counts |= (producers == producer_number(producer)) & (offsets >= state.begin) & (clocks != 0)
    return counts


def _keep_growing(clocks: UInt64s, starts: Mask, run_of_row: Int64s, first_row: Int64s) -> tuple[Mask, UInt64s]:
    """Return the mask of rows whose clock exceeds all earlier clocks of their run, and each run's largest clock."""
    kept = np.ones(len(clocks), dtype=np.bool_)
    falls = np.flatnonzero(~starts[1:] & (clocks[1:] <= clocks[:-1])) + 1
    if not len(falls):
        return kept, clocks[np.append(first_row[1:], len(clocks)) - 1]

    # A running maximum for each run: rank the clocks, and lift each run's ranks above the run before.
    affected = np.zeros(len(first_row), dtype=np.bool_)
    affected[run_of_row[falls]] = True
    rows = np.flatnonzero(affected[run_of_row])
    ranks = np.unique(clocks[rows], return_inverse=True)[1].astype(np.int64)
    lifted = run_of_row[rows] * len(rows) + ranks
    highest = np.maximum.accumulate(lifted)
    kept[rows[1:]] = lifted[1:] > highest[:-1]
    return kept, np.maximum.reduceat(clocks, first_row)
