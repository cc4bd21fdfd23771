"""Windows: consecutive ranges of offsets of several journals, each with a name for exactly these bytes. Pure.

Windows are numbered from 1. A window has the content [begin, end) of each journal that it covers. A journal's content
is covered without gap or overlap: where one window ends, the next one that has the journal begins. All ends are ends of
stored fragments, so a window consists of whole fragments.

The number of windows is bounded, because adjacent old windows are merged. For example, the windows 9 to 16 become one
window with the name `00000009-00000016`. It covers the same content, so that the earlier names resolve to it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coranto.errors import CorruptData, InvalidInput
from coranto.journal_ids import same_journal

DEFAULT_WINDOW_BYTES: Final = 256 << 20
DEFAULT_MAX_WINDOWS: Final = 500

_NAME = re.compile(r"(\d{8,})(?:-(\d{8,}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Span:
    """The content [begin, end) of a journal. `revision` is the etcd revision that created the journal.

    `journal_id` is the journal's id, empty if it is not known.
    """

    begin: int
    end: int
    revision: int = 0
    journal_id: str = ""

    @property
    def length(self) -> int:
        """The number of bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Window:
    """The windows `first` to `last`, merged if several. `created` is the time of the last one, in Unix seconds."""

    first: int
    last: int
    spans: Mapping[str, Span]
    created: float = 0.0

    @property
    def name(self) -> str:
        """The name, for exactly these bytes. Names of equal length sort by age."""
        return f"{self.first:08d}" if self.first == self.last else f"{self.first:08d}-{self.last:08d}"

    @property
    def length(self) -> int:
        """The number of bytes of all journals."""
        return sum(span.length for span in self.spans.values())

    def merged(self, following: Window) -> Window:
        """Return this window merged with the next one."""
        spans = dict(self.spans)
        for journal, span in following.spans.items():
            before = spans.get(journal)
            spans[journal] = Span(before.begin if before else span.begin, span.end, span.revision, span.journal_id)
        return Window(self.first, following.last, dict(sorted(spans.items())), following.created)


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored content of a journal, for new windows.

    `begin` is the first offset that can be read, and `ends` are the sorted possible ends of windows. `head` is the
    journal's write head.
    """

    begin: int
    ends: Sequence[int]
    head: int
    revision: int = 0
    journal_id: str = ""


def numbers_of(name: str) -> tuple[int, int]:
    """Return the first and the last number in a window's name. Raises InvalidInput for an invalid name."""
    found = _NAME.fullmatch(name)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if found is None or not 0 < first <= last:
        raise InvalidInput(
            f"{name!r} is not the name of a window, such as 00000012 or 00000009-00000016", field="window"
        )
    return first, last


def find(windows: Sequence[Window], name: str) -> Window:
    """Return the window of that name, or the one that it was merged into.

    Raises InvalidInput if there is no such window.
    """
    first, last = numbers_of(name)
    index = bisect.bisect_right(windows, first, key=lambda window: window.first) - 1
    if index < 0 or windows[index].last < last:
        known = f"the windows are {windows[0].name} to {windows[-1].name}" if windows else "there is no window yet"
        raise InvalidInput(f"there is no window {name}; {known}", field="window")
    return windows[index]


def positions(windows: Sequence[Window]) -> dict[str, Span]:
    """Return the last span of each journal: its `end` is where the next window with the journal begins."""
    found: dict[str, Span] = {}
    for window in windows:
        found |= window.spans
    return found


def check(windows: Sequence[Window]) -> None:
    """Raise CorruptData unless the windows are consecutive, and cover each journal without gap or overlap."""
    number = 1
    ends: dict[str, int] = {}
    for window in windows:
        if window.first != number or window.last < window.first:
            raise CorruptData(f"window {window.name} follows window {number - 1:08d}; windows must be consecutive")
        number = window.last + 1
        for journal, span in window.spans.items():
            if not 0 <= span.begin < span.end or ends.get(journal, span.begin) != span.begin:
                raise CorruptData(
                    f"window {window.name} has {journal} from {span.begin} to {span.end}, but the one before ends at "
                    f"{ends.get(journal, 0)}; windows must cover a journal without gap or overlap"
                )
            ends[journal] = span.end


def extend(
    windows: Sequence[Window],
    stored: Mapping[str, Stored],
    *,
    target: int,
    now: float,
    partial: bool = False,
    limit: int | None = None,
) -> list[Window]:
    """Return new windows that follow `windows`, made of whole fragments; at most `limit`.

    A window has about `target` bytes at most, with an even share for each journal; only a larger fragment makes a
    larger window. Content that does not fill a window is left for later, unless `partial`. Journals that no window has
    yet begin at their first offset that can be read.

    Raises InvalidInput for a target below 1, and CorruptData when content was lost before a window covered it, and for
    a journal that was deleted and created again.
    """
    if target < 1:
        raise InvalidInput(f"{target} is not a positive number of bytes, such as 67108864", field="window_bytes")
    before = positions(windows)
    at = {journal: _begin(journal, each, before.get(journal)) for journal, each in stored.items()}
    number = windows[-1].last if windows else 0
    made: list[Window] = []
    while limit is None or len(made) < limit:
        left = {
            journal: ends
            for journal, each in sorted(stored.items())
            if (ends := each.ends[bisect.bisect_right(each.ends, at[journal]) :])
        }
        total = sum(ends[-1] - at[journal] for journal, ends in left.items())
        if not total or (total < target and not partial):
            break
        number += 1
        chosen = _choose(left, at, target)
        spans = {
            journal: Span(at[journal], end, stored[journal].revision, stored[journal].journal_id)
            for journal, end in sorted(chosen.items())
        }
        made.append(Window(number, number, spans, now))
        at |= chosen
    return made


def _begin(journal: str, stored: Stored, before: Span | None) -> int:
    """Return the begin offset of a journal's next window."""
    restart = "To begin at the current content, start windows of another name."
    if before is None:
        return stored.begin
    is_same = same_journal(before.revision, before.journal_id, before.end, stored.revision, stored.journal_id)
    if not is_same or stored.head < before.end:
        raise CorruptData(
            f"journal {journal} ends at {stored.head} and windows cover it through {before.end}: it was deleted and "
            f"created again, or has lost content. {restart}"
        )
    if stored.begin > before.end:
        raise CorruptData(
            f"journal {journal}: the content from {before.end} to {stored.begin} is gone, and no window covers it. "
            f"{restart}"
        )
    return before.end


def _choose(left: Mapping[str, Sequence[int]], at: Mapping[str, int], target: int) -> dict[str, int]:
    """Return the end of each journal's part of the next window: the last end within its even share."""
    chosen: dict[str, int] = {}
    remaining = target
    # In order of size: a journal that needs less than its even share leaves the difference to the ones after it.
    for index, journal in enumerate(sorted(left, key=lambda journal: (left[journal][-1] - at[journal], journal))):
        ends = left[journal]
        fitting = bisect.bisect_right(ends, at[journal] + remaining // (len(left) - index))
        if fitting:
            chosen[journal] = ends[fitting - 1]
            remaining -= chosen[journal] - at[journal]
    if chosen:
        return chosen
    smallest = min(left, key=lambda journal: (left[journal][0] - at[journal], journal))
    return {smallest: left[smallest][0]}


def merge(windows: Sequence[Window], most: int) -> list[Window]:
    """Return at most `most` windows, by merging adjacent old ones.

    In the older half, the adjacent pair with the smallest total length is merged first, which keeps sizes even. The
    newer half is not merged. Raises InvalidInput if `most` is less than 2.
    """
    if most < 2:
        raise InvalidInput(f"{most} windows are too few; keep at least 2", field="max_windows")
    kept = list(windows)
    while len(kept) > most:
        old = max(2, len(kept) - most // 2)
        index = min(range(old - 1), key=lambda index: (kept[index].length + kept[index + 1].length, index))
        kept[index : index + 2] = [kept[index].merged(kept[index + 1])]
    return kept
