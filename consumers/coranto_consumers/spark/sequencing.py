"""The driver's part of sequencing: from the summaries of ranges to what is committed, and where the next read begins.

Pure: it sees summaries (`scanning.py`), never rows. The rules are those of `coranto.messages.columnar`.
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
class Window:
    """Of a piece, the rows whose clock lies in (lo, hi] are committed."""

    piece: int
    lo: int
    hi: int


ALWAYS_WINDOW = Window(ALWAYS_PIECE, -1, 0)
"""Messages that opted out of sequencing have a zero clock, and are committed."""


@dataclass(frozen=True, slots=True)
class Sequenced:
    """What the ranges of one journal amount to.

    When `replay` is not None the rest is not final: read that range for those producers, and sequence again with it.
    """

    source: Source
    windows: tuple[Window, ...]
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

    Forgets the producers that `pruning` does; without it, none.

    Raises CorruptData when ranges do not add up to one contiguous piece of the journal.
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
        Window(piece_of(summary.number, index), lo, hi)
        for summary, verdicts in zip(summaries, resolution.verdicts, strict=True)
        for index, (lo, hi) in enumerate(zip(verdicts.lo, verdicts.hi, strict=True))
        if lo < hi
    )
    replay = None
    if resolution.replay:
        begin = min(state.begin for state in resolution.replay.values())
        replay = Range(journal, begin, entry.read_through, entry.read_through), resolution.replay
    states = resolution.states if pruning is None else pruning.prune(journal, resolution.states, read_through)
    return Sequenced(Source(read_through, states), windows, resolution.resets, replay)


def read_end(journal: str, begin: int, parts: Mapping[Range, RangeSummary]) -> int:
    """The offset behind the last message of adjacent ranges, having checked that no message between is missing."""
    expected = begin
    for part in sorted(parts):
        summary = parts[part]
        if not summary.rows:
            continue
        if summary.first != expected:
            raise CorruptData(f"journal {journal}: the message behind {expected} was found at {summary.first}")
        expected = summary.end
    return expected


def windows_of(sequenced: Sequence[Sequenced]) -> list[Window]:
    """The windows of all journals of a transaction."""
    return [ALWAYS_WINDOW, *(window for each in sequenced for window in each.windows)]
