"""Sets of overlapping spans, and the choice of a span for an offset.

Brokers and stores may hold many files that cover the same part of a journal. A `CoverSet` keeps only the useful ones:
it drops every entry that lies wholly within another. So larger files win, and among equals the last one added: a file
in a store replaces the local one. The remaining entries are strictly increasing in `begin` and in `end`, but adjacent
entries may still overlap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar


class Cover(Protocol):
    """Anything that covers the offsets [begin, end)."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


EntryT = TypeVar("EntryT", bound=Cover)

_begin: Any = attrgetter("begin")
_end: Any = attrgetter("end")


class CoverSet(Generic[EntryT]):
    """Entries in offset order, none wholly within another."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[EntryT] = ()) -> None:
        self._entries: list[EntryT] = []
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[EntryT]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> EntryT:
        return self._entries[index]

    def following(self, index: int) -> Iterator[EntryT]:
        """Yield the entries from this index on."""
        return islice(self._entries, index, None)

    def __eq__(self, other: object) -> bool:
        return self._entries == other._entries if isinstance(other, CoverSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"CoverSet({self._entries!r})"

    @property
    def begin_offset(self) -> int:
        """The lowest covered offset; 0 when the set is empty."""
        return self._entries[0].begin if self._entries else 0

    @property
    def end_offset(self) -> int:
        """The highest covered offset plus one; 0 when the set is empty."""
        return self._entries[-1].end if self._entries else 0

    def add(self, entry: EntryT) -> bool:
        """Add an entry, and drop the entries within it. Return False if it is empty or lies within a larger entry."""
        begin, end = entry.begin, entry.end
        if begin >= end:
            return False
        entries = self._entries
        if not entries or (begin > entries[-1].begin and end > entries[-1].end):
            entries.append(entry)
            return True
        # Entries of [first, last) begin at or after `begin` and end at or before `end`: the new one replaces them.
        first = bisect_left(entries, begin, key=_begin)
        last = bisect_right(entries, end, key=_end)
        if first > 0 and entries[first - 1].end >= end:
            return False
        if first < len(entries) and entries[first].begin == begin and entries[first].end > end:
            return False
        entries[first:last] = [entry]
        return True

    def grow(self, before: EntryT, after: EntryT) -> bool:
        """Replace `before` by the longer `after` of the same begin. Return False if `before` is not the last entry."""
        entries = self._entries
        if not entries or entries[-1] is not before:
            return False
        entries[-1] = after
        return True

    def drop_through(self, end: int) -> None:
        """Drop the entries that end at or before `end`."""
        del self._entries[: bisect_right(self._entries, end, key=_end)]

    def query(self, offset: int) -> tuple[int, bool]:
        """Return the index of the entry that covers `offset` and reaches furthest beyond it, and True.

        If no entry covers it, return the index of the first entry that begins above it (`len(self)` if there is none),
        and False.
        """
        index = bisect_right(self._entries, offset, key=_begin) - 1
        if index >= 0 and self._entries[index].end > offset:
            return index, True
        return index + 1, False

    def difference(self, other: CoverSet[Any]) -> list[EntryT]:
        """Return the entries of this set with at least one offset that `other` does not cover."""
        return [entry for entry in self._entries if not other.covers(entry.begin, entry.end)]

    def covers(self, begin: int, end: int) -> bool:
        """Return True if every offset of [begin, end) is covered, by any number of entries."""
        while begin < end:
            index, found = self.query(begin)
            if not found:
                return False
            begin = self._entries[index].end
        return True

    def gaps(self) -> list[tuple[int, int]]:
        """Return the spans [begin, end) between `begin_offset` and `end_offset` that no entry covers."""
        pairs = zip(self._entries, self._entries[1:], strict=False)
        return [(left.end, right.begin) for left, right in pairs if left.end < right.begin]
