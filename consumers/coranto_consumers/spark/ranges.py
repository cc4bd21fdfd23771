"""Planning what a transaction reads: byte ranges of journals, split into slices that tasks read.

A range [begin, end) stands for the lines that *start* within it. `begin` of a whole range is where a line starts; the
borders of slices fall anywhere, and the slice in which a line starts reads all of it. So any way of splitting a range
reads each line exactly once, and where a range really ends, which is where its last line does, is known once it was
read.

Nothing here does I/O.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from coranto.errors import InvalidInput


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Lines of `journal` that start in [begin, end). `limit` >= `end` is how far the last of them may reach."""

    journal: str
    begin: int
    end: int
    limit: int
    aligned: bool = True
    """Whether a line starts at `begin`. Otherwise the line that `begin` falls into belongs to another slice."""

    @property
    def length(self) -> int:
        return self.end - self.begin


Slice = tuple[Range, ...]
"""What one task reads, in order."""


def plan_transaction(heads: Mapping[str, tuple[int, int]], max_bytes: int) -> list[Range]:
    """Ranges from each journal's (begin, head), together at most about `max_bytes`, sorted by journal.

    The bytes are shared out evenly, so that a journal far behind does not hold up the others; what one does not need
    goes to the rest. Journals with nothing to read are left out.
    """
    if max_bytes < 1:
        raise InvalidInput(f"{max_bytes} is not a positive number of bytes", field="max_transaction_bytes")
    behind = {journal: head - begin for journal, (begin, head) in heads.items() if head > begin}
    shares: dict[str, int] = {}
    left = max_bytes
    # From the smallest: whoever needs less than its even share leaves the difference to those after it.
    for index, (journal, lag) in enumerate(sorted(behind.items(), key=lambda item: (item[1], item[0]))):
        shares[journal] = min(lag, max(1, left // (len(behind) - index)))
        left -= shares[journal]
    return [
        Range(journal, heads[journal][0], heads[journal][0] + shares[journal], heads[journal][1])
        for journal in sorted(shares)
    ]


def split(whole: Range, max_bytes: int, cuts: Sequence[int] = ()) -> list[Range]:
    """Adjacent ranges that together are `whole`, each of about `max_bytes` at most.

    `cuts` are offsets, sorted, where a border is welcome (the begins of fragments, so that two tasks do not decompress
    the same one). One is taken where it makes a part of at least half the size.
    """
    if max_bytes < 1:
        raise InvalidInput(f"{max_bytes} is not a positive number of bytes", field="maxBytesPerPartition")
    parts = []
    begin, aligned = whole.begin, whole.aligned
    while begin < whole.end:
        end = min(whole.end, begin + max_bytes)
        if end < whole.end:
            index = bisect.bisect_right(cuts, end) - 1
            if index >= 0 and cuts[index] > begin + max_bytes // 2:
                end = cuts[index]
        parts.append(Range(whole.journal, begin, end, whole.limit, aligned))
        begin, aligned = end, False
    return parts


def plan_slices(
    ranges: Iterable[Range],
    *,
    max_bytes: int,
    max_slices: int,
    cuts: Mapping[str, Sequence[int]] | None = None,
    worthwhile_bytes: int = 1 << 20,
) -> list[Slice]:
    """Ranges dealt out to at most `max_slices` tasks of similar size.

    Every task costs some tens of milliseconds, so small journals share one, and less than `worthwhile_bytes` is not
    split. A slice grows beyond `max_bytes` only when there would be more than `max_slices` otherwise.
    """
    ranges = [found for found in ranges if found.length > 0]
    total = sum(found.length for found in ranges)
    if not total:
        return []
    if max_slices < 1:
        raise InvalidInput(f"{max_slices} is not a positive number of slices", field="max_slices")
    # Parts of at most an even share, dealt to the least loaded slice, keep tasks of similar size.
    share = min(max_bytes, max(worthwhile_bytes, -(-total // max_slices)))
    wanted = min(max_slices, -(-total // share))
    parts = [part for found in ranges for part in split(found, share, (cuts or {}).get(found.journal, ()))]
    loads = [0] * wanted
    dealt: list[list[Range]] = [[] for _ in loads]
    for part in sorted(parts, key=lambda part: (-part.length, part)):
        index = loads.index(min(loads))
        dealt[index].append(part)
        loads[index] += part.length
    return [tuple(sorted(slice_)) for slice_ in dealt if slice_]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a read in sequenced isolation reads: slices, whose ranges have numbers by which rows and verdicts meet."""

    slices: tuple[Slice, ...]
    first_number: int = 0
    replay: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """When not empty only messages of these producers count: offsets to begin at, by journal and producer id in hex."""

    @property
    def numbers(self) -> dict[Range, int]:
        """Numbers of ranges: they count up by journal and offset."""
        parts = sorted(part for slice_ in self.slices for part in slice_)
        return {part: number for number, part in enumerate(parts, self.first_number)}

    def dumps(self) -> str:
        """The plan as the text of an option."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> Plan:
        """The plan of `dumps`. Raises InvalidInput."""
        try:
            raw = json.loads(text)
            slices = tuple(tuple(Range(**part) for part in slice_) for slice_ in raw["slices"])
            return cls(slices, raw["first_number"], raw["replay"])
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidInput(f"not a plan of slices: {error}", field="option slices") from error
