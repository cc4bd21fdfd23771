"""Sequencing of Arrow batches: the `Sequencer` for columns.

`ColumnarSequencer` takes record batches of messages in reading order and returns the committed ones. It decides like
`Sequencer`, but much faster, because no message becomes a Python object. It holds pending messages as columns, up to a
number of rows. When an acknowledgement commits messages that are no longer held, the journal is read again.
`sequence_ranges` does the same for several ranges together. Both are built on `columnar.py`.

A caller that may defer rows, or replays them piece by piece, works in steps: `prepare` decides about rows, and `apply`
of the returned step accepts them. `columnar_replay.ReplayedRows` selects the rows of a replay.

Batches have the columns of `batches.POSITION`. Other columns are passed on. Needs pyarrow (the `consumers` extra).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from coranto.extras import with_install_advice

try:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.columnar import CommittedWindows, RowSegment, committed_mask, resolve
from coranto.messages.columnar_steps import (
    JournalState,
    Piece,
    Replay,
    RowDecision,
    live_segments,
    piece_of,
    position_columns,
    range_of,
    read_again,
)
from coranto.messages.pruning import Pruning
from coranto.messages.uuids import Flags, ProducerId

__all__ = ["ColumnarSequencer", "Replay", "SequencingStep", "sequence_ranges"]

DEFAULT_RING_ROWS: Final = 1 << 20
DEFAULT_RING_BYTES: Final = 256 << 20
"""The maximum size of the held rows in bytes. A limit on their number is not enough, because sizes vary."""


class ColumnarSequencer:
    """Decides which rows of batches are committed, for any number of journals.

    `replay` is called when rows are needed that are no longer held, or that were pending in `sources`. Its batches need
    the same columns as the batches fed. Up to `ring_rows` rows with up to `ring_bytes` are held.
    """

    def __init__(
        self,
        replay: Replay | None = None,
        sources: Mapping[str, Source] | None = None,
        *,
        ring_rows: int = DEFAULT_RING_ROWS,
        ring_bytes: int = DEFAULT_RING_BYTES,
    ) -> None:
        """Create a sequencer. `replay` may be omitted if only `prepare` is used, and not `feed`."""
        if ring_rows < 0:
            raise InvalidInput(f"{ring_rows} rows cannot be held; give 0 or more")
        self._replay = replay
        self._ring_rows = ring_rows
        self._ring_bytes = ring_bytes
        self._journals = {name: JournalState(name, source) for name, source in (sources or {}).items()}
        self._held: deque[tuple[JournalState, Piece]] = deque()

    @property
    def held_rows(self) -> int:
        """The number of rows in memory."""
        return sum(piece.batch.num_rows for _, piece in self._held)

    def read_through(self, journal: str) -> int:
        """Return the end offset of the rows that were fed and, if committed, returned."""
        known = self._journals.get(journal)
        return known.read_through if known is not None else 0

    def feed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Feed the next messages, each journal's in offset order, and return the rows that they commit.

        The returned rows of each journal are in order of commit. Rows of one transaction are in
        order of publication. Acknowledgements are omitted. All rows that one acknowledgement commits
        are returned together.

        Raises InvalidInput for rows below `read_through`, and the errors of `replay`. The state is then unchanged.
        """
        names = batch.column(batch.schema.get_field_index("journal"))
        if isinstance(names, pa.DictionaryArray):
            names = names.cast(pa.string())
        found: list[str] = pc.unique(names).to_pylist()
        steps = []
        for name in found:
            of_one = batch if len(found) == 1 else batch.filter(pc.equal(names, name))
            step = self._step(name, of_one, self._replay)
            if step.needed:
                raise InvalidInput("messages have to be replayed; give `replay`, or take rows in steps", field="replay")
            steps.append(step)
        committed = [rows for step in steps if (rows := step.committed()).num_rows]
        self._take(*steps)
        if not committed:
            return batch.slice(0, 0)
        return committed[0] if len(committed) == 1 else pa.concat_batches(committed)

    def prepare(self, journal: str, batch: pa.RecordBatch) -> SequencingStep:
        """Decide about the next rows of a journal (at least one). Applying the returned step accepts them.

        Nothing is replayed: if the step's `replay` is not None, the committed rows of that range are not among
        `committed`. Applying a step invalidates all other prepared steps. Raises InvalidInput for rows below
        `read_through`.
        """
        step = self._step(journal, batch, None)
        return SequencingStep(step, lambda: self._take(step))

    def delivered(self, journal: str, producer: ProducerId, clock: int, end: int) -> None:
        """Record that the rows of `producer` were delivered up to `clock`, whose row ends at the offset `end`.

        Call this before a step of exactly one acknowledgement is applied. A checkpoint then covers these rows, and a
        reader that continues from it reads the acknowledgement again and gets the remaining rows.
        """
        states = self._journals[journal].states
        states[producer] = ProducerState(clock, end, states[producer].seen_through)

    def _step(self, name: str, batch: pa.RecordBatch, replay: Replay | None) -> RowDecision:
        journal = self._journals.get(name) or JournalState(name, Source())
        return RowDecision(journal, batch, [piece for of, piece in self._held if of is journal], replay)

    def _take(self, *steps: RowDecision) -> None:
        for step in steps:
            self._journals[step.journal.name] = step.journal
            held = step.apply()
            if held is not None:
                self._held.append((step.journal, held))
        self._forget()

    def checkpoint(self, pruning: Pruning | None = None) -> dict[str, Source]:
        """Return the state to restore from, for each journal. A `Sequencer` can continue from it too.

        Forgets producers according to `pruning`, if given.
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
        rows = size = 0
        kept: deque[tuple[JournalState, Piece]] = deque()
        for journal, piece in reversed(self._held):  # Newest first, so that the oldest exceed the limits.
            piece.alive = [part for part in piece.alive if piece.segments[part].producer in journal.in_hand]
            if not piece.alive:
                continue
            rows += piece.batch.num_rows
            size += piece.batch.nbytes
            if rows > self._ring_rows or size > self._ring_bytes:
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
    """Return the committed rows of adjacent ranges of one journal, and the next source.

    `source` is the state before the ranges. `run` is `map` or, for instance, the `map` of a thread pool: it scans the
    ranges in parallel, and then filters their committed rows in parallel. The rows of each range are in
    order of reading. Rows that were pending in `source` come before them, from `replay`.
    """
    pieces: list[Piece] = list(run(_scanned, ranges, itertools.repeat(None)))
    ends = [batch.column("end")[-1].as_py() for batch in ranges if batch.num_rows]
    through = ends[-1] if ends else source.read_through
    resolution = resolve(map(live_segments, pieces), source.seen_producers, replayed=(), through=through)
    if resolution.replay:
        name = next(batch for batch in ranges if batch.num_rows).column("journal")[0].as_py()
        pieces = [*read_again(JournalState(name, source), resolution.replay, replay), *pieces]
        replayed = resolution.replay.keys()
        resolution = resolve(map(live_segments, pieces), source.seen_producers, replayed=replayed, through=through)
    committed = list(run(_chosen, pieces, resolution.windows))
    return committed, Source(through, resolution.states)


def _scanned(batch: pa.RecordBatch, _: None) -> Piece:
    return piece_of(batch, position_columns(batch))


def _chosen(piece: Piece, windows: CommittedWindows) -> pa.RecordBatch:
    return piece.batch.filter(pa.array(committed_mask(piece.row_segment, windows, piece.clocks)))


class SequencingStep:
    """The decision about the next rows of a journal. `ColumnarSequencer.prepare` returns it."""

    def __init__(self, step: RowDecision, take: Callable[[], None]) -> None:
        self._step = step
        self._take = take
        needed = step.needed
        self.replay = None if not needed else range_of(step.journal, needed)
        """The part of the journal to replay, since these rows commit earlier rows that are not held; or None."""

    @property
    def resets(self) -> int:
        """The number of acknowledgements below an earlier one of their producer."""
        return len(self._step.resolution.resets)

    @property
    def states(self) -> Mapping[ProducerId, ProducerState]:
        """The producer states after the step."""
        return self._step.resolution.states

    @property
    def entry(self) -> Mapping[ProducerId, ProducerState]:
        """The producer states before the step."""
        return self._step.journal.states

    @property
    def begun(self) -> list[ProducerId]:
        """The producers whose pending transactions begin in these rows."""
        last = len(self._step.pieces) - 1
        return [producer for producer, parts in self._step.resolution.pending.items() if parts[0].range == last]

    @property
    def advances(self) -> bool:
        """True if `last_ack` of a producer increases. Without committed rows, an acknowledgement increased it."""
        firsts: dict[ProducerId, int] = {}
        for segment in self._step.new.segments:
            firsts.setdefault(segment.producer, segment.first_clock)
        for producer, first in firsts.items():
            known = self.entry.get(producer)
            if self.states[producer].last_ack > (first - 1 if known is None else known.last_ack):
                return True
        return False

    def split_row(self, most: int) -> int:
        """Return the number of rows to sequence first if these rows commit too much: at least 1, but not all rows.

        Repeated cuts isolate an acknowledgement that needs a replay or commits more than `most` rows.
        """
        new, needed = self._step.new, self._step.needed
        if needed:
            place = min(new.row_at(each.first_offset) for each in new.segments if _acknowledges(each, needed))
        else:
            when, counts = np.unique(self._step.decided.when, return_counts=True)
            largest = int(np.argmax(counts))
            place = new.row_at(int(when[largest])) if counts[largest] > most else new.batch.num_rows // 2
        return max(place, 1)

    def committed_rows(self) -> int:
        """Return the number of rows that `committed` has."""
        return len(self._step.decided.when)

    def committed(self) -> pa.RecordBatch:
        """Return the committed rows, as `ColumnarSequencer.feed` does."""
        return self._step.committed()

    def apply(self) -> None:
        """Accept the rows. This invalidates other prepared steps of the same sequencer."""
        self._take()

    def settled_end(self) -> int | None:
        """Return the end offset of the last row that is not pending after the step, or None if all are pending."""
        new, offsets = self._step.new, self._step.pending_offsets()
        settled = np.flatnonzero(~np.isin(new.offsets, offsets))
        return int(new.batch.column("end")[int(settled[-1])].as_py()) if len(settled) else None


def _acknowledges(segment: RowSegment, needed: Mapping[ProducerId, ProducerState]) -> bool:
    return segment.flags is Flags.ACK_TXN and segment.producer in needed
