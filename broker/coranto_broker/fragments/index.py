"""The fragment index of a replica: finds the fragment that has the content of an offset.

It joins local spool files with the listings of the fragment stores. A local fragment keeps its file until a listing,
begun after the fragment was stored, shows its content in the stores: under its own offsets and SHA-1, or within larger
fragments directly in the journal's folder. A larger fragment in a subfolder is not enough, because it may belong to
another journal (see `coranto.fragments.journal_folders`). A listed fragment is ignored if its length is not plausible,
or if it is other content of exactly the same offsets. The index does not compare content with its SHA-1; readers and
audits do.

Rules for choosing the entry of an offset (`find` is pure):

* -1 stands for the write head.
* Of the entries that cover the offset, the one with the greatest end is used.
* If no entry covers the offset but a *listed* fragment begins above it, the read jumps there if that fragment is the
  first of all, or was stored more than six hours ago. Below a younger one, another broker may still be uploading a
  fragment, so the read waits. A fragment that this broker has stored itself is not listed yet: only the next listing
  shows which fragments other brokers stored before it.
* Stored fragments older than the read's `begin_mod_time` are skipped.

Content that has committed here becomes an entry only once every replica is known to have it, because until then the
journal may continue without it. The head includes it, because the head must not be below an acknowledged append. A read
of it waits, a non-blocking one only for a limited time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from coranto.effects import Clock
from coranto.errors import Unavailable
from coranto.fragments.codecs import can_hold
from coranto.fragments.cover_set import CoverSet
from coranto.fragments.fragment import Fragment
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.spool.durable_spool import Sealed
from coranto_broker.spool.shared_file import SharedFile

JUMP_AGE_SECONDS = 6 * 60 * 60
FIRST_REFRESH_TIMEOUT_SECONDS = 5.0
READABLE_TIMEOUT_SECONDS = 5.0
"""The time that a non-blocking read waits for content of this replica that other replicas may not have yet.

The primary reports that within the latency of one message, unless it has just died.
"""
SOUND_JUMP_SECONDS = 60.0
"""The time during which reads may jump to an offset, after no other broker had the content before it."""
WAKE_BATCH = 16
"""The maximum number of reads that a change wakes in one turn of the event loop."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A fragment of the index. `content` is its local file, or None if it is known from a listing of the stores."""

    fragment: Fragment
    content: SharedFile | None = None

    @property
    def begin(self) -> int:
        return self.fragment.begin

    @property
    def end(self) -> int:
        return self.fragment.end

    @property
    def is_damaged(self) -> bool:
        """True if the content is in no store, and its local file was found to be damaged and is not replaced yet."""
        return self.content is not None and self.content.is_quarantined and not self.fragment.backing_store

    @property
    def local(self) -> SharedFile | None:
        """The local file to read from, or None to read from the store."""
        damaged = self.content is not None and self.content.is_quarantined
        return None if damaged and self.fragment.backing_store else self.content


class Extent(NamedTuple):
    """The extent of a journal according to its index: offsets, and unstored bytes.

    `begin` is the first offset with content, `persisted` the end of stored content. Both are `head` if there is none.
    `unpersisted_since` is the time of the first append that waits to be stored (Unix seconds; 0: none), except for the
    fragment under construction.
    """

    begin: int
    persisted: int
    head: int
    unpersisted: int
    unpersisted_since: float


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query. `entry` is None if nothing is available at `offset` (yet).

    `gap` is the span from the requested offset on that was written, but that no usable entry covers. If there is an
    entry, the read jumps over that span to it, or the span is in the entry and its local file is damaged.
    """

    offset: int
    write_head: int
    entry: IndexEntry | None
    gap: range = range(0)


def find(entries: CoverSet[IndexEntry], offset: int, write_head: int, begin_mod_time: int, now: float) -> QueryResult:
    """Find the entry to read `offset` from, by the module's rules. `now` is wall time in seconds."""
    if offset == -1:
        offset = write_head
    while True:
        index, covered = entries.query(offset)
        if not covered:
            if index == len(entries):
                return QueryResult(offset, write_head, None)
            above = entries[index]
            mod_time = above.fragment.mod_time
            if above.content is not None or not mod_time or (index != 0 and mod_time >= now - JUMP_AGE_SECONDS):
                return QueryResult(offset, write_head, None)
            offset = above.begin
        entry = entries[index]
        if entry.fragment.mod_time and entry.fragment.mod_time < begin_mod_time:
            offset = entry.end
            continue
        return QueryResult(offset, write_head, entry)


def is_plausible(fragment: Fragment) -> bool:
    """Return True if the file length of a listed fragment is plausible or unknown."""
    size = fragment.file_bytes
    return size is None or can_hold(fragment.codec, size, fragment.length)


def _spans(fragments: Iterable[Fragment]) -> dict[tuple[int, int], set[bytes]]:
    """Return the sums of fragments by their offsets."""
    found: dict[tuple[int, int], set[bytes]] = {}
    for fragment in fragments:
        found.setdefault((fragment.begin, fragment.end), set()).add(fragment.sum)
    return found


def _wake_in_batches(waiters: deque[asyncio.Future[None]]) -> None:
    """Wake WAKE_BATCH waiters now and the rest later, in order: thousands must not delay an append's response."""
    for _ in range(min(WAKE_BATCH, len(waiters))):
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_result(None)
    if waiters:
        waiters[0].get_loop().call_soon(_wake_in_batches, waiters)


class FragmentIndex:
    """All known fragments of one replica. Implements `SpoolObserver` except for handing fragments to the persister."""

    def __init__(self, clock: Clock, on_gap: Callable[[], None] = lambda: None) -> None:
        """`on_gap` is called when a read below the head finds no entry (yet)."""
        self._clock = clock
        self._on_gap = on_gap
        self._all: CoverSet[IndexEntry] = CoverSet()
        self._current: IndexEntry | None = None  # The visible part of the fragment under construction.
        # Completed fragments by begin, each with its visible part and the time when it was stored (inf: not yet).
        self._sealed: dict[int, tuple[Sealed, IndexEntry | None, float]] = {}
        self._stored_again: set[int] = set()  # Begins of fragments in `_sealed`.
        self._noted_head = 0
        self._ahead = 0  # End of this replica's content that readers wait for.
        self._jump = (-1, 0.0)  # The last jump that is known to skip nothing: its end, and the time of that finding.
        self.changes = 0
        """Counts all changes of the index except growth of the fragment under construction."""
        self.appended_at = 0.0
        """The time of the last append that this broker has seen or knows from its files (Unix seconds)."""
        self._refreshed = asyncio.Event()
        self._listed_from = -math.inf  # Monotonic start time of the last listing.
        self._waiters: dict[asyncio.Future[None], None] = {}  # Ordered, because simulations must be deterministic.
        self._closed = False

    @property
    def entries(self) -> CoverSet[IndexEntry]:
        """All entries. Do not modify them."""
        return self._all

    @property
    def head(self) -> int:
        """The end of all content known to have been written: one past its highest offset."""
        return max(self._all.end_offset, self._noted_head, self._ahead)

    @property
    def known(self) -> IndexSummary:
        """The summary that preconditions of appends use."""
        count = len(self._all)
        return IndexSummary(
            self._all.begin_offset, self.head, count == 0, self._all[count - 1].fragment.mod_time if count else 0
        )

    @property
    def extent(self) -> Extent:
        """The journal's extent. Its cost does not grow with the number of stored fragments."""
        entries, head = self._all, self.head
        begin = entries.begin_offset if len(entries) else head
        persisted = begin
        for position in range(len(entries) - 1, -1, -1):  # Unstored fragments are mostly at the end.
            if entries[position].fragment.backing_store:
                persisted = entries[position].end
                break
        waiting = [sealed for sealed, _, stored_at in self._sealed.values() if stored_at == float("inf")]
        size = sum(sealed.fragment.length for sealed in waiting)
        size += self._current.fragment.length if self._current is not None else 0
        since = min((sealed.first_append_time for sealed in waiting), default=0.0)
        return Extent(begin, persisted, head, size, since)

    @property
    def refreshed(self) -> bool:
        """True once the stores have been listed."""
        return self._refreshed.is_set()

    def note_head(self, offset: int) -> None:
        """Record that content up to `offset` was written, even if no fragment has it any more."""
        if offset > self._noted_head:
            self._noted_head = offset
            self.changes += 1
            self._wake()

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        """Make this extent of the fragment under construction visible to readers."""
        self.appended_at = self._clock.now()
        before, self._current = self._current, IndexEntry(fragment, content)
        if before is None or before.content is not content or not self._all.grow(before, self._current):
            self._all.add(self._current)
        if fragment.end >= self._ahead:
            self._ahead = 0
        if self._waiters:
            self._wake()

    def spool_complete(self, sealed: Sealed) -> None:
        """Keep a completed fragment's file until a listing covers it."""
        begin, entry = sealed.fragment.begin, None
        if self._current is not None and self._current.begin == begin:
            entry, self._current = self._current, None
        self._sealed[begin] = (sealed, entry, float("inf"))
        if sealed.readable:
            self._show(sealed)
        else:
            self.spool_ahead(sealed.fragment.end)

    def spool_ahead(self, end: int) -> None:
        """Record that content up to `end` has committed but must not be visible yet."""
        self._ahead = max(self._ahead, end)

    def spool_readable(self, end: int) -> None:
        """Make completed fragments up to `end` visible to readers."""
        for sealed, entry, _ in list(self._sealed.values()):
            if sealed.fragment.end <= end and (entry is None or entry.end < sealed.fragment.end):
                self._show(sealed)

    def _show(self, sealed: Sealed) -> None:
        entry = IndexEntry(sealed.fragment, sealed.content)
        self._sealed[entry.begin] = (sealed, entry, float("inf"))
        self._all.add(entry)
        if entry.end >= self._ahead:
            self._ahead = 0
        self._changed()

    def stored(self, sealed: Sealed, fragment: Fragment) -> None:
        """Record that a local fragment is now in a store, as `fragment`. Its local file stays in use."""
        found = self._sealed.get(sealed.fragment.begin)
        if found is None or found[0] is not sealed:
            return
        entry = IndexEntry(fragment, sealed.content)
        self._sealed[fragment.begin] = (sealed, entry, self._clock.monotonic())
        self._all.add(entry)
        self._changed()

    def refresh(self, listed: Iterable[Fragment], begun_at: float) -> list[Sealed]:
        """Replace the entries of the stores by a listing that began at monotonic time `begun_at`.

        Returns local fragments to store again, because the store no longer has them, or has files of implausible length
        under their names.
        """
        sound: list[Fragment] = []
        unsound: list[Fragment] = []
        for fragment in listed:
            (sound if is_plausible(fragment) else unsound).append(fragment)
        entries: CoverSet[IndexEntry] = CoverSet(map(IndexEntry, sound))
        if self._sealed:
            self._drop_listed(sound)
        again: list[Sealed] = []
        for begin, (sealed, known, stored_at) in list(self._sealed.items()):
            entry = known
            if entry is None:
                continue
            # The fragment was stored, but a later listing does not have it: it was removed or damaged, so only the
            # local file is left. It counts as not stored, so that this file is not removed.
            if stored_at < begun_at:
                entry = IndexEntry(replace(entry.fragment, backing_store="", mod_time=0), entry.content)
                self._sealed[begin] = (sealed, entry, float("inf"))
                if begin not in self._stored_again:
                    self._stored_again.add(begin)  # Only once, since a store may lose it again and again.
                    again.append(sealed)
            entries.add(entry)
        if self._current is not None:
            entries.add(self._current)
        for fragment in unsound:
            # A read of this fragment gets an error with the reason. It must not hide valid fragments.
            if not any(entry.begin < fragment.end and fragment.begin < entry.end for entry in entries):
                entries.add(IndexEntry(fragment))
        self._all = entries
        self._listed_from = begun_at
        self._refreshed.set()
        self._changed()
        return again

    def _drop_listed(self, sound: list[Fragment]) -> None:
        """Remove the local files of fragments whose content the stores certainly have."""
        spans = _spans(sound)
        own: CoverSet[IndexEntry] = CoverSet(IndexEntry(fragment) for fragment in sound if not fragment.path_postfix)
        for begin, (sealed, _, _) in list(self._sealed.items()):
            ours = sealed.fragment
            sums = spans.get((ours.begin, ours.end))
            has = ours.sum in sums if sums is not None else own.covers(ours.begin, ours.end)
            if has:
                del self._sealed[begin]
                self._stored_again.discard(begin)
                # Its content was acknowledged, so the head never falls below it, even if the store loses the file.
                self._noted_head = max(self._noted_head, ours.end)
                sealed.drop()

    def forget(self, sealed: Sealed) -> None:
        """Remove a fragment that is not part of the journal."""
        found = self._sealed.get(sealed.fragment.begin)
        if found is not None and found[0] is sealed:
            del self._sealed[sealed.fragment.begin]
            self._all = CoverSet(entry for entry in self._all if entry.content is not sealed.content)
            if sealed.fragment.end >= self._ahead:
                self._ahead = 0
            self.changes += 1

    def found_missing(self) -> None:
        """Request another listing, because a fragment was not in its store."""
        self._on_gap()

    def forget_through(self, end: int) -> None:
        """Drop entries that end at or before `end`: their files are about to be removed from the stores."""
        self.note_head(self._all.end_offset)
        self._all.drop_through(end)
        self._changed()

    def stored_through(self, offset: int) -> int:
        """Return the end of the content from `offset` on that the stores have without a gap."""
        position = self._all.query(offset)[0]
        for entry in self._all.following(position):
            if entry.begin > offset or not entry.fragment.backing_store:
                break
            offset = entry.end
        return offset

    def held_from(self, end: int) -> tuple[int, list[Sealed]]:
        """Return the begin of the contiguous local content that ends at `end`, and its completed fragments.

        `end` is the begin of the fragment under construction.
        """
        held: list[Sealed] = []
        for sealed in sorted(self.sealed_files(), key=lambda each: each.fragment.end, reverse=True):
            if sealed.fragment.end < end or sealed.content.is_quarantined:
                break
            held.append(sealed)
            end = min(end, sealed.fragment.begin)
        return end, held

    def sealed_files(self) -> list[Sealed]:
        """Return the completed fragments whose local files are still kept."""
        return [sealed for sealed, _, _ in self._sealed.values()]

    def drop_stored(self) -> None:
        """Remove the local files of stored fragments. Call it once this index has no more readers."""
        for begin, (sealed, _, stored_at) in list(self._sealed.items()):
            if stored_at != float("inf"):
                del self._sealed[begin]
                sealed.drop()

    def jump_is_sound(self, offset: int) -> bool:
        """Return True if `note_sound_jump` was last called for `offset`, within SOUND_JUMP_SECONDS."""
        end, at = self._jump
        return end == offset and self._clock.monotonic() < at + SOUND_JUMP_SECONDS

    def note_sound_jump(self, offset: int) -> None:
        """Record that no broker has the content that a jump to `offset` skips."""
        self._jump = offset, self._clock.monotonic()

    def _gap(self, offset: int, found: QueryResult, begin_mod_time: int) -> range:
        """Return the gap that a read of `offset` has met. Reads that skip old fragments jump over gaps unnoticed."""
        entry = found.entry
        if entry is not None and entry.is_damaged:
            return range(found.offset, entry.end)
        if entry is not None and (begin_mod_time or offset == -1):
            return range(0)
        begin = found.offset if entry is None else offset
        position, covered = self._all.query(begin)
        if covered:
            return range(0)
        # The gap may be content that is here but not visible yet. Another replica may know that all replicas have it.
        return range(begin, self._all[position].begin if position < len(self._all) else self._noted_head)

    async def query(self, offset: int, *, block: bool, begin_mod_time: int = 0, until_gap: bool = False) -> QueryResult:
        """Find the entry to read `offset` (-1: the write head) from. With `block`, wait until there is one.

        With `until_gap`, the wait ends at a gap. Even a non-blocking read waits briefly for the first listing, because
        the content of the stores is unknown before it, and for committed content that other replicas may not have yet.
        Raises Unavailable when the index is closed.
        """
        deadline = self._clock.monotonic() + FIRST_REFRESH_TIMEOUT_SECONDS
        readable_until = self._clock.monotonic() + READABLE_TIMEOUT_SECONDS
        if offset == -1 and not self.refreshed:
            await self.wait_refreshed(FIRST_REFRESH_TIMEOUT_SECONDS)
        while True:
            self._check_open()
            found = find(self._all, offset, self.head, begin_mod_time, self._clock.now())
            found = replace(found, gap=gap) if (gap := self._gap(offset, found, begin_mod_time)) else found
            if found.entry is not None:
                return found
            ahead = self._all.end_offset <= found.offset < self._ahead
            if found.offset < found.write_head and not ahead:
                self._on_gap()
            if offset == -1:
                offset = found.offset  # Stay at the first head, even if the head moves on.
            if block and not (until_gap and found.gap):
                await self.changed()
            elif not self.refreshed and self._clock.monotonic() < deadline:
                await self.wait_refreshed(deadline - self._clock.monotonic())
            elif ahead and self._clock.monotonic() < readable_until:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(readable_until - self._clock.monotonic()):
                        await self.changed()
            else:
                return found

    async def wait_refreshed(self, timeout: float | None = None) -> bool:
        """Wait for the first listing of the stores. Returns False if `timeout` seconds pass before it."""
        try:
            async with asyncio.timeout(timeout):
                while not self.refreshed:
                    self._check_open()
                    await self.changed()
        except TimeoutError:
            return False
        return True

    async def wait_listed_again(self, timeout: float) -> bool:
        """Wait for a listing of the stores that begins after this call. Returns False if `timeout` seconds pass before.

        This listing has everything that any broker stored before the call.
        """
        asked_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(timeout):
                while self._listed_from < asked_at:
                    self._check_open()
                    self._on_gap()
                    await self.changed()
        except TimeoutError:
            return False
        return True

    def has_gap(self, begin: int, end: int = 0) -> bool:
        """Return True if some of [begin, end) was written but has no entry. An `end` of 0 is the head.

        Content removed by retention is not a gap: it comes before the first entry, if that is stored.
        """
        entries = self._all
        is_begin_removed = len(entries) > 0 and bool(entries[0].fragment.backing_store)
        first = entries.begin_offset if is_begin_removed else 0
        return not entries.covers(max(begin, first), end or max(self._noted_head, entries.end_offset))

    async def changed(self) -> None:
        """Wait for the next change of the index, or until it is closed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    def close(self) -> None:
        """Close the index because the replica is gone, and wake all waiters."""
        self._closed = True
        self._wake()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this broker no longer holds the journal; ask again to be routed to one that does")

    def _changed(self) -> None:
        self.changes += 1
        self._wake()

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            _wake_in_batches(deque(waiters))
