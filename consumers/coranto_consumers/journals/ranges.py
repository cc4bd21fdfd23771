"""Planning of a transaction's input: byte ranges of journals, split into slices that tasks read. Pure.

A range [begin, end) has the lines that *start* within it. So slices may be split at any offset, and each line is read
once. The end of a range's last line is only known after reading it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import ProducerState
from coranto.messages.uuids import ProducerId

WORTHWHILE_BYTES: Final = 1 << 20
"""Smaller ranges are not split, because a task costs some tens of milliseconds."""
_SLACK: Final = 8
"""A slice may exceed an even share by 1/8 if it then ends where a fragment ends."""


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Lines of `journal` that start in [begin, end). The last of them may reach up to `limit` >= `end`."""

    journal: str
    begin: int
    end: int
    limit: int
    aligned: bool = True
    """True if a line starts at `begin`. Otherwise the line that contains `begin` belongs to another slice."""
    journal_id: str = field(default="", compare=False)
    """The id of the journal that the offsets refer to; empty if unknown. A journal with another id is not read."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def start(self) -> int:
        """The offset to read from. The byte before a split shows if the split is within a line."""
        return self.begin if self.aligned else self.begin - 1


Slice = tuple[Range, ...]
States = Mapping[ProducerId, ProducerState]
Cuts = Mapping[str, Sequence[int]]
"""The sorted begin offsets of fragments, by journal. Splitting ranges there is cheap."""


def plan_transaction(heads: Mapping[str, tuple[int, int]], max_bytes: int) -> list[Range]:
    """Return ranges of at most about `max_bytes` in total, from each journal's (begin, head), sorted by journal.

    Shares are even, so that a journal far behind does not delay others. Unused bytes go to other journals.
    """
    if max_bytes < 1:
        raise InvalidInput(
            f"{max_bytes} is not a positive number of bytes, such as 67108864", field="max_transaction_bytes"
        )
    behind = {journal: head - begin for journal, (begin, head) in heads.items() if head > begin}
    shares: dict[str, int] = {}
    left = max_bytes
    # In order of size, so that a journal with less than an even share leaves the difference to later ones.
    for index, (journal, lag) in enumerate(sorted(behind.items(), key=lambda item: (item[1], item[0]))):
        shares[journal] = min(lag, max(1, left // (len(behind) - index)))
        left -= shares[journal]
    return [
        Range(journal, heads[journal][0], heads[journal][0] + shares[journal], heads[journal][1])
        for journal in sorted(shares)
    ]


def split(whole: Range, max_bytes: int, cuts: Sequence[int] = (), slack: int = 0) -> list[Range]:
    """Split `whole` into ranges of about `max_bytes`, if possible at `cuts`, the sorted begin offsets of fragments.

    Then two tasks do not fetch the same fragment. A range may be larger by up to `slack` bytes if it then ends at a cut
    or at the end.
    """
    if max_bytes < 1:
        raise InvalidInput(
            f"{max_bytes} is not a positive number of bytes, such as 67108864", field="maxBytesPerPartition"
        )
    parts = []
    begin, aligned = whole.begin, whole.aligned
    while begin < whole.end:
        end = min(whole.end, begin + max_bytes)
        if whole.end - end <= slack:
            end = whole.end
        else:
            index = bisect.bisect_right(cuts, end + slack) - 1
            if index >= 0 and cuts[index] > begin:
                end = cuts[index]
        parts.append(Range(whole.journal, begin, end, whole.limit, aligned, whole.journal_id))
        begin, aligned = end, False
    return parts


def share(parts: Sequence[Range], max_bytes: int) -> list[list[Range]]:
    """Group adjacent small parts, up to `max_bytes`."""
    shared: list[list[Range]] = []
    remaining = 0
    for part in parts:
        if part.length > remaining:
            shared.append([])
            remaining = max_bytes
        shared[-1].append(part)
        remaining -= part.length
    return shared


def plan_slices(
    ranges: Iterable[Range],
    *,
    max_bytes: int | None,
    max_slices: int,
    cuts: Cuts | None = None,
    worthwhile_bytes: int = WORTHWHILE_BYTES,
) -> list[Slice]:
    """Distribute ranges to at most `max_slices` tasks of similar size. If `max_bytes` is None, ranges are not split."""
    ranges = [found for found in ranges if found.length > 0]
    total = sum(found.length for found in ranges)
    if not total:
        return []
    if max_slices < 1:
        raise InvalidInput(f"{max_slices} is not a positive number of slices, such as 8", field="max_slices")
    # Parts of at most an even share go to the least loaded slice, so that tasks have similar sizes.
    even = min(max_bytes or total, max(worthwhile_bytes, -(-total // max_slices)))
    wanted = min(max_slices, -(-total // even))
    parts = ranges
    if max_bytes is not None:
        slack = min(even // _SLACK, max_bytes - even)
        parts = [part for found in ranges for part in split(found, even, (cuts or {}).get(found.journal, ()), slack)]
    loads = [0] * wanted
    dealt: list[list[Range]] = [[] for _ in loads]
    for part in sorted(parts, key=lambda part: (-part.length, part)):
        index = loads.index(min(loads))
        dealt[index].append(part)
        loads[index] += part.length
    return [tuple(sorted(slice_)) for slice_ in dealt if slice_]


@dataclass(frozen=True, slots=True)
class NumberedRange:
    """A range of a plan, with the number that marks its rows and its summary."""

    number: int
    range: Range
    replay: States = field(default_factory=dict)
    """The only producers whose pending messages count. Empty: all messages count."""
    commits: bool = False
    """True if the summary should have the offset that acknowledged each segment."""


@dataclass(frozen=True)
class ReadPlan:
    """The plan of a sequenced read: slices of ranges. Ranges are numbered, so that limits can be joined to rows."""

    slices: tuple[Slice, ...]
    first_number: int = 0
    replay: Mapping[str, States] = field(default_factory=dict)
    commits: bool = False
    places: tuple[str, ...] = ()
    """The preferred executor of each slice. Empty without preferences."""

    @functools.cached_property
    def numbers(self) -> dict[Range, int]:
        """The numbers of ranges, ascending by journal and offset."""
        parts = sorted(part for slice_ in self.slices for part in slice_)
        return {part: number for number, part in enumerate(parts, self.first_number)}

    def numbered(self) -> list[tuple[NumberedRange, ...]]:
        """Return the slices with everything that a task needs to read them."""
        return [
            tuple(
                NumberedRange(self.numbers[part], part, self.replay.get(part.journal, {}), self.commits)
                for part in slice_
            )
            for slice_ in self.slices
        ]
