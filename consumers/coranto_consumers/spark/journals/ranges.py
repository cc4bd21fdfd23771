"""Planning of a transaction's input: byte ranges of journals, split into slices that tasks read.

A range [begin, end) stands for the lines that *start* within it. The `begin` of a whole range is the start of a line.
Slices may be split at any offset, and a line is read by the slice in which it starts. So each line is read exactly
once, however a range is split. The real end of a range is the end of its last line; it is known once the range was
read.

Nothing here does I/O.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coranto.errors import InvalidInput

WORTHWHILE_BYTES: Final = 1 << 20
"""Ranges of less are not split, because a task costs some tens of milliseconds."""
_SLACK: Final = 8
"""A slice may be larger by this part of an even share if it then ends where a fragment does."""


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
    """The id of the journal that the offsets are of; empty if it is not known. Another journal is not read."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def start(self) -> int:
        """The offset from which lines are read: the byte before a border tells if that is within a line."""
        return self.begin if self.aligned else self.begin - 1


Slice = tuple[Range, ...]
"""The ranges that one task reads, in order."""


def plan_transaction(heads: Mapping[str, tuple[int, int]], max_bytes: int) -> list[Range]:
    """Return ranges from each journal's (begin, head), of at most about `max_bytes` in total, sorted by journal.

    Each journal gets an even share of the bytes, so that a journal far behind does not delay the others. Bytes that one
    journal does not need go to the others. Journals with nothing to read are left out.
    """
    if max_bytes < 1:
        raise InvalidInput(
            f"{max_bytes} is not a positive number of bytes, such as 67108864", field="max_transaction_bytes"
        )
    behind = {journal: head - begin for journal, (begin, head) in heads.items() if head > begin}
    shares: dict[str, int] = {}
    left = max_bytes
    # In order of size: a journal that needs less than its even share leaves the difference to the ones after it.
    for index, (journal, lag) in enumerate(sorted(behind.items(), key=lambda item: (item[1], item[0]))):
        shares[journal] = min(lag, max(1, left // (len(behind) - index)))
        left -= shares[journal]
    return [
        Range(journal, heads[journal][0], heads[journal][0] + shares[journal], heads[journal][1])
        for journal in sorted(shares)
    ]


def split(whole: Range, max_bytes: int, cuts: Sequence[int] = (), slack: int = 0) -> list[Range]:
    """Split `whole` into adjacent ranges of at most about `max_bytes` each.

    `cuts` are sorted offsets at which to split if possible: the begins of fragments, so that two tasks do not fetch the
    same one. So only a fragment of more than `max_bytes` is split itself. A range may be larger by `slack` bytes if it
    then ends at a cut or at the end.
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
    """Put adjacent small parts together, up to `max_bytes`: each task costs some tens of milliseconds."""
    shared: list[list[Range]] = []
    room = 0
    for part in parts:
        if part.length > room:
            shared.append([])
            room = max_bytes
        shared[-1].append(part)
        room -= part.length
    return shared


def plan_slices(
    ranges: Iterable[Range],
    *,
    max_bytes: int | None,
    max_slices: int,
    cuts: Mapping[str, Sequence[int]] | None = None,
    worthwhile_bytes: int = WORTHWHILE_BYTES,
) -> list[Slice]:
    """Distribute ranges to at most `max_slices` tasks of similar size.

    Every task costs some tens of milliseconds. So small journals share a task, and ranges of less than
    `worthwhile_bytes` are not split. A slice is larger than `max_bytes` only if there would be more than `max_slices`
    otherwise. None: no range is split.
    """
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
    """A range of a plan, with the number that its rows and its summary carry."""

    number: int
    range: Range
    replay: Mapping[str, int] = field(default_factory=dict)
    """The only producers whose messages count, unless empty: begin offsets, by producer id in hex."""
    commits: bool = False
    """True if the summary is to tell where each segment was acknowledged."""


@dataclass(frozen=True)
class ReadPlan:
    """The plan of a sequenced read: slices of ranges. Ranges are numbered, so that limits can be joined to rows."""

    slices: tuple[Slice, ...]
    first_number: int = 0
    replay: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The only producers whose messages count, unless empty: begin offsets, by journal and producer id in hex."""
    commits: bool = False
    """True if summaries are to tell where each segment was acknowledged."""
    places: tuple[str, ...] = ()
    """The executor that is to read each slice (`placing.py`). Empty if any may."""

    @functools.cached_property
    def numbers(self) -> dict[Range, int]:
        """The numbers of ranges, ascending by journal and offset."""
        parts = sorted(part for slice_ in self.slices for part in slice_)
        return {part: number for number, part in enumerate(parts, self.first_number)}

    def numbered(self) -> list[tuple[NumberedRange, ...]]:
        """Return the slices with all that a task needs to read one of them."""
        return [
            tuple(
                NumberedRange(self.numbers[part], part, self.replay.get(part.journal, {}), self.commits)
                for part in slice_
            )
            for slice_ in self.slices
        ]

    def dumps(self) -> str:
        """Return the plan as the text of an option."""
        slices = [
            [(part.journal, part.begin, part.end, part.limit, part.aligned, part.journal_id) for part in slice_]
            for slice_ in self.slices
        ]
        fields = {
            "slices": slices,
            "first_number": self.first_number,
            "replay": {journal: dict(begins) for journal, begins in self.replay.items()},
            "commits": self.commits,
            "places": self.places,
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> ReadPlan:
        """Return the plan from a text of `dumps`. Raises InvalidInput."""
        try:
            raw = json.loads(text)
            slices = tuple(tuple(Range(*part) for part in slice_) for slice_ in raw["slices"])
            return cls(slices, raw["first_number"], raw["replay"], raw["commits"], tuple(raw["places"]))
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidInput(
                f"not a plan of slices: {error}; pass on what the planner returned", field="option slices"
            ) from error
