"""The content that is left to read: journals up to the heads that were listed, without gaps. Does no I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from coranto.messages.checkpoints import Source
from coranto_consumers.journals.discovery import Extents, heads_of, open_journals
from coranto_consumers.journals.losses import Holes
from coranto_consumers.journals.ranges import Range, plan_transaction
from coranto_consumers.spark.committed.sequencing import LongTransactions, Sources


def ends_of(present: Extents) -> dict[str, object]:
    """Return values that change when there may be more to read: ends of journals, segments and journal ids."""
    return {journal: (extent.head, extent.segment, extent.journal_id) for journal, extent in present.items()}


class UnreadContent:
    """The unread content of the present journals, up to their `heads`."""

    def __init__(self, present: Extents) -> None:
        self.present = dict(present)
        self.heads = heads_of(present)
        self.holes = Holes()
        self.long = LongTransactions()
        self._behind = set(present)
        self._ended: dict[str, int] = {}
        """The heads of journals that end in an unfinished line."""

    def known(self, sources: Sources) -> dict[str, Source]:
        """Return the states of sources, and initial states of journals that may be read now."""
        begun = {
            journal: Source(extent.begin, journal_id=extent.journal_id)
            for journal in self._open(sources) - sources.keys()
            for extent in (self.present[journal],)
        }
        return {**begun, **sources}

    def _open(self, sources: Sources) -> frozenset[str]:
        read = {journal: source.read_through for journal, source in sources.items()}
        return open_journals(self.present, {**read, **self._ended})

    def has_successors(self, journals: Collection[str]) -> bool:
        """Return True if one of the journals is a segment with predecessors."""
        segments = [self.present[journal].segment for journal in self.present.keys() & set(journals)]
        return any(segment.predecessors for segment in segments if segment is not None)

    def plan(self, sources: Sources, max_bytes: int, without: Collection[str] = ()) -> list[Range]:
        """Return the ranges of the next transaction, which continues at the states of `sources`. Empty at the end."""
        ends = self.long.ends(self.holes.ends(self.heads))
        known = self.known(sources)
        journals = self._behind.difference(without) & self._open(known)
        begins = {journal: known[journal].read_through for journal in sorted(journals)}
        planned = plan_transaction({journal: (begin, ends[journal]) for journal, begin in begins.items()}, max_bytes)
        return [replace(each, journal_id=known[each.journal].journal_id) for each in planned]

    def processed(self, ranges: Sequence[Range], after: Sources) -> None:
        """Record that a transaction has read ranges, and left the sources in the states `after`."""
        # A journal may end in a line that its writer has not finished. The next run reads that line.
        ends = {each.journal: each.end for each in ranges}
        blocked = {
            journal for journal, offset in _unread(ranges, after).items() if self.holes.is_blocked(journal, offset)
        }
        self._behind -= blocked
        self._ended.update((name, self.heads[name]) for name in blocked if ends[name] >= self.heads[name])

    @property
    def is_clear(self) -> bool:
        """True if no lost content and no long transaction is waiting to be handled."""
        return not (self.holes or self.long)

    def plan_next(self, ranges: Sequence[Range], after: Sources, max_bytes: int) -> list[Range]:
        """Return the ranges that `plan` will return after `ranges` are processed. Empty if none is left, or unknown."""
        if not self.is_clear:
            return []
        return self.plan(after, max_bytes, _unread(ranges, after))


def _unread(ranges: Sequence[Range], after: Sources) -> dict[str, int]:
    """Return the begins, by journal, of ranges without any progress."""
    return {each.journal: each.begin for each in ranges if after[each.journal].read_through == each.begin}
