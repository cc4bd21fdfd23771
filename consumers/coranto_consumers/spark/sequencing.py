"""The driver's part of sequencing. From summaries of ranges it decides what is committed, and where to read next.

Pure: it handles summaries (`scanning.py`), never rows. It uses the rules of `coranto.messages.columnar`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coranto.errors import CorruptData
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.columnar import ClockReset, resolve
from coranto.messages.pruning import Pruning
from coranto.messages.uuids import ProducerId
from coranto_consumers.spark.ranges import Range
from coranto_consumers.spark.scanning import ALWAYS_PIECE, RangeSummary, piece_of


@dataclass(frozen=True, slots=True)
class ClockWindow:
    """The committed rows of a piece: those with a clock in (lo, hi]."""

    piece: int
    lo: int
    hi: int


ALWAYS_WINDOW = ClockWindow(ALWAYS_PIECE, -1, 0)
"""The window of messages that opted out of sequencing. They have a zero clock, and are always committed."""


@dataclass(frozen=True, slots=True)
class Sequenced:
    """The result of sequencing the ranges of one journal.

    If `replay` is not None, the other fields are not final: read its range for its producers, and sequence again with
    that.
    """

    source: Source
    windows: tuple[ClockWindow, ...]
    resets: tuple[ClockReset, ...]
    replay: tuple[Range, Mapping[ProducerId, ProducerState]] | None


def sequence(
    journal: str,
    entry: Source,
    parts: Mapping[Range, RangeSummary],
    replayed: Mapping[Range, RangeSummary] | None = None,
    replayed_producers: Iterable[ProducerId] = (),
    pruning: Pruning | None = None,
) -> Sequenced:
    """Sequence adjacent ranges of a journal that begin at the entry's `read_through`.

    Forgets producers as `pruning` decides; without it, none. Raises CorruptData when the ranges are not one contiguous
    part of the journal.
    """
    read_through = read_end(journal, entry.read_through, parts)
    before = dict(replayed or {})
    if before:
        found = read_end(journal, min(part.begin for part in before), before)
        if found != entry.read_through:
            raise CorruptData(f"journal {journal}: the replay ended at {found} instead of {entry.read_through}")
    summaries = [before[part] for part in sorted(before)] + [parts[part] for part in sorted(parts)]
    resolution = resolve(
        [summary.segments for summary in summaries],
        entry.seen_producers,
        replayed=frozenset(replayed_producers),
        through=read_through,
    )
    windows = tuple(
        ClockWindow(piece_of(summary.number, index), lo, hi)
        for summary, windows in zip(summaries, resolution.windows, strict=True)
        for index, (lo, hi) in enumerate(zip(windows.lo, windows.hi, strict=True))
        if lo < hi
    )
    replay = None
    if resolution.replay:
        begin = min(state.begin for state in resolution.replay.values())
        replay = Range(journal, begin, entry.read_through, entry.read_through), resolution.replay
    states = resolution.states if pruning is None else pruning.prune(journal, resolution.states, read_through)
    return Sequenced(Source(read_through, states), windows, resolution.resets, replay)


def read_end(journal: str, begin: int, parts: Mapping[Range, RangeSummary]) -> int:
    """Return the offset after the last message of adjacent ranges. Raises CorruptData when a message is missing."""
    expected = begin
    for part in sorted(parts):
        summary = parts[part]
        if not summary.rows:
            continue
        if summary.first != expected:
            raise CorruptData(f"journal {journal}: the message behind {expected} was found at {summary.first}")
        expected = summary.end
    return expected


def windows_of(sequenced: Sequence[Sequenced]) -> list[ClockWindow]:
    """Return the windows of all journals of a transaction."""
    return [ALWAYS_WINDOW, *(window for each in sequenced for window in each.windows)]
