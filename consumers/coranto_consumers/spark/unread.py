"""The content that a run has left to read: journals up to the heads of its beginning, but for what it has met. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coranto.messages.checkpoints import Source
from coranto_consumers.spark.discovery import ContentExtent
from coranto_consumers.spark.long_transactions import LongTransactions
from coranto_consumers.spark.losses import Holes
from coranto_consumers.spark.ranges import Range, plan_transaction


def known_sources(present: Mapping[str, ContentExtent], sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the states of sources. One that is not known yet is read from its earliest offset."""
    return {**{journal: Source(extent.begin) for journal, extent in present.items()}, **sources}


class UnreadContent:
    """The content of journals up to `heads`, as far as it is not read."""

    def __init__(self, heads: Mapping[str, int]) -> None:
        self.heads = dict(heads)
        self.holes = Holes()
        self.long = LongTransactions()
        self._behind = set(heads)

    def plan(self, sources: Mapping[str, Source], max_bytes: int) -> list[Range]:
        """Return what the next transaction reads, which goes on at the states of `sources`. Empty at the end."""
        return self._plan(self._behind, sources, max_bytes)

    def processed(self, ranges: Sequence[Range], after: Mapping[str, Source]) -> None:
        """Take in that a transaction has read ranges, and left the sources in the states `after`."""
        unread = _unread(ranges, after)
        # A journal may end in a line that its writer has not finished. That line is left to the next run.
        ends = {each.journal: each.end for each in ranges}
        self._behind -= {
            journal
            for journal, offset in unread.items()
            if not self.long.found_nothing(journal, offset, ends[journal]) and self.holes.stuck(journal, offset)
        }

    @property
    def is_clear(self) -> bool:
        """True unless something that was met is not passed yet."""
        return not (self.holes or self.long)

    def plan_next(self, ranges: Sequence[Range], after: Mapping[str, Source], max_bytes: int) -> list[Range]:
        """Return what `plan` will return once these ranges are processed. Empty if that is the end, or not known yet.

        It is not known while something that was met is not passed yet.
        """
        if not self.is_clear:
            return []
        return self._plan(self._behind - _unread(ranges, after).keys(), after, max_bytes)

    def _plan(self, journals: set[str], sources: Mapping[str, Source], max_bytes: int) -> list[Range]:
        ends = self.long.ends(self.holes.ends(self.heads))
        begins = {journal: sources[journal].read_through for journal in sorted(journals)}
        return plan_transaction({journal: (begin, ends[journal]) for journal, begin in begins.items()}, max_bytes)


def _unread(ranges: Sequence[Range], after: Mapping[str, Source]) -> dict[str, int]:
    """Return the begins of ranges, by journal, of which nothing was read."""
    return {each.journal: each.begin for each in ranges if after[each.journal].read_through == each.begin}
