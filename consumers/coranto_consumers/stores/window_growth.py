"""Adds windows as journals grow, according to the stored content that brokers report, and merges old windows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from coranto.client import Chunk, FragmentInfo, SyncJournalClient
from coranto.errors import InvalidInput, Unavailable
from coranto.fragments.windows import (
    DEFAULT_MAX_WINDOWS,
    DEFAULT_WINDOW_BYTES,
    Stored,
    Window,
    extend,
    merge,
    positions,
)
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.stores.windows import KnownWindow, WindowLog

DEFAULT_NEW_WINDOWS: Final = 16


def grow(
    log: WindowLog,
    client: SyncJournalClient,
    selectors: Iterable[str | pb.LabelSelector],
    *,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    max_windows: int = DEFAULT_MAX_WINDOWS,
    partial: bool = False,
    limit: int = DEFAULT_NEW_WINDOWS,
    now: float | None = None,
) -> list[KnownWindow]:
    """Add windows for the stored content of the selectors' journals, merge old windows, and return all windows.

    Content gets a window once it is stored and fills `window_bytes`, or, if `partial`, once it is stored. A window
    never ends within a line. To check that, the last byte of each journal's content in the window is read, so one call
    adds at most `limit` windows. Raises

    * InvalidInput for selectors without journals and for sizes out of range,
    * CorruptData when content was lost before a window covered it,
    * Unavailable when no broker knows a journal's head, and other errors of the client,
    * Fenced when another process changed the windows concurrently; try again.
    """
    known = log.load()
    before = [each.window for each in known]
    stored = stored_of(client, selectors, before)
    at = time.time() if now is None else now
    checked: set[tuple[str, int]] = set()
    while True:
        made = extend(before, stored, target=window_bytes, now=at, partial=partial, limit=limit)
        chosen = {(journal, span.end) for window in made for journal, span in window.spans.items()}
        within = [each for each in sorted(chosen - checked) if not ends_line(client, *each)]
        checked |= chosen
        if not within:
            break
        # Rare: a writer has appended a part of a line. The window must end with another fragment.
        for journal, end in within:
            stored[journal] = replace(stored[journal], ends=[each for each in stored[journal].ends if each != end])
    after = merge([*before, *made], max_windows)
    return known if after == before else log.replace(known, after)


def stored_of(
    client: SyncJournalClient, selectors: Iterable[str | pb.LabelSelector], windows: list[Window]
) -> dict[str, Stored]:
    """Return the stored content of journals, as far as brokers know. Raises InvalidInput if no journal matches.

    It has no new content of suspended journals, nor of journals whose stores the broker has not listed yet.
    """
    wanted = list(selectors)
    done = positions(windows)
    found: dict[str, Stored] = {}
    for selector in wanted:
        for each in client.heads(selector):
            if not each.known:
                raise Unavailable(f"no broker knows the head of {each.journal}: {each.problem}")
            before = done.get(each.journal)
            begin, ends = before.end if before else 0, list[int]()
            if each.status == pb.OK and each.listed:
                # Usually most journals have no new content, and need no separate call.
                begin = each.begin
                if before is None or each.persisted_head > before.end:
                    begin, ends = coverage(client.fragments(each.journal))
            later = [end for end in ends if before is None or end > before.end]
            found[each.journal] = Stored(begin, later, each.head, each.create_revision, each.journal_id)
    if not found:
        raise InvalidInput("no journal matches the sources; `coranto journals list` shows the existing ones")
    return found


def coverage(fragments: Iterable[FragmentInfo]) -> tuple[int, list[int]]:
    """Return the first readable offset, and the ends of fragments within the contiguously stored content."""
    listed = sorted(fragments, key=lambda info: (info.fragment.begin, info.fragment.end))
    if not listed:
        return 0, []
    begin = through = listed[0].fragment.begin
    ends: set[int] = set()
    for info in listed:
        if not info.persisted:
            continue
        if info.fragment.begin > through:
            break
        through = max(through, info.fragment.end)
        ends.add(info.fragment.end)
    return begin, sorted(end for end in ends if end > begin)


def stored_times(client: SyncJournalClient, windows: Sequence[Window]) -> dict[str, tuple[float, float]]:
    """Return the first and last storage time of each window's content, by window name, in seconds since 1970.

    The first is the time when the fragments before the window were stored, or, without any, when the window's first
    fragment was stored. Windows are left out if the stores of their fragments report no times.
    """
    found: dict[str, tuple[float, float]] = {}
    for journal in sorted({journal for window in windows for journal in window.spans}):
        fragments = [info.fragment for info in client.fragments(journal)]
        ends = sorted((each.end, float(each.mod_time)) for each in fragments if each.mod_time > 0)
        for window in windows:
            span = window.spans.get(journal)
            own = [at for end, at in ends if span is not None and span.begin < end <= span.end]
            if span is None or not own:
                continue
            since = max((at for end, at in ends if end <= span.begin), default=min(own))
            first, last = found.get(window.name, (since, max(own)))
            found[window.name] = min(first, since), max(last, max(own))
    return found


def ends_line(client: SyncJournalClient, journal: str, end: int) -> bool:
    """Return True if the content before `end` ends with a newline."""
    chunks: Iterable[Chunk] = client.read(journal, end - 1, end_offset=end, block=True, fail_on_jump=True)
    return b"".join(chunk.content for chunk in chunks) == b"\n"
