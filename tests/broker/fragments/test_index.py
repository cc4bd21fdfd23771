"""The fragment index: answers to offsets, waiting readers, and removal of local files."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.effects import LocalDisk
from coranto.errors import CorruptSpool, Unavailable
from coranto.fragments.cover_set import CoverSet
from coranto.fragments.fragment import Codec, Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.index import JUMP_AGE_SECONDS, WAKE_BATCH, FragmentIndex, IndexEntry, QueryResult, find
from coranto_broker.handlers.fragments import select
from coranto_broker.spool.durable_spool import Sealed
from coranto_broker.spool.shared_file import SharedFile
from tests.broker.running import ManualClock

NOW = 1_700_000_000.0
OLD = int(NOW) - JUMP_AGE_SECONDS - 1
RECENT = int(NOW) - 60


def fragment(begin: int, end: int, mod_time: int = 0) -> Fragment:
    store = "file:///frags/" if mod_time else ""
    return Fragment("a/journal", begin, end, b"s" * 20, Codec.NONE, store, mod_time)


def cover(*fragments: Fragment) -> CoverSet[IndexEntry]:
    return CoverSet(IndexEntry(each) for each in fragments)


@pytest.mark.parametrize(
    ("fragments", "offset", "expected"),
    [
        ([(0, 10, 0)], 0, (0, 0)),
        ([(0, 10, 0)], 9, (9, 0)),
        ([(0, 10, 0)], 10, (10, None)),
        ([(0, 10, 0)], -1, (10, None)),
        ([(0, 10, 0), (5, 20, 0)], 7, (7, 5)),  # The fragment that ends later.
        ([], 0, (0, None)),
        ([(50, 60, RECENT)], 0, (50, 50)),  # The first fragment: jump.
        ([(50, 60, 0)], 0, (0, None)),  # Local: its predecessor may be about to be stored.
        ([(0, 10, RECENT), (20, 30, RECENT)], 12, (12, None)),  # A gap that may close.
        ([(0, 10, RECENT), (20, 30, OLD)], 12, (20, 20)),  # A gap that stays.
        ([(0, 10, RECENT), (20, 30, 0)], 12, (12, None)),
    ],
)
def test_find(fragments: list[tuple[int, int, int]], offset: int, expected: tuple[int, int | None]) -> None:
    entries = cover(*(fragment(*each) for each in fragments))
    found = find(entries, offset, entries.end_offset, begin_mod_time=0, now=NOW)
    assert (found.offset, found.entry.begin if found.entry else None) == expected
    assert found.write_head == entries.end_offset


def test_find_skips_fragments_stored_before_the_wanted_time() -> None:
    entries = cover(fragment(0, 10, OLD), fragment(10, 20, RECENT), fragment(20, 30))
    assert find(entries, 0, 30, RECENT, NOW).offset == 10
    assert find(entries, 0, 30, RECENT + 1, NOW).offset == 20
    assert find(entries, 25, 30, RECENT + 1, NOW).offset == 25


def test_pages_of_a_listing() -> None:
    entries = cover(*(fragment(n * 10, n * 10 + 10, n + 1 if n < 4 else 0) for n in range(5)))

    def begins(**request: int) -> tuple[list[int], int]:
        page, token = select(entries, pb.FragmentsRequest(**request))
        return [entry.begin for entry in page], token

    assert begins() == ([0, 10, 20, 30, 40], 0)
    assert begins(page_limit=2) == ([0, 10], 20)
    assert begins(page_limit=2, next_page_token=20) == ([20, 30], 40)
    assert begins(page_limit=2, next_page_token=40) == ([40], 0)
    assert begins(next_page_token=15) == ([20, 30, 40], 0)
    assert begins(next_page_token=99) == ([], 0)
    assert begins(begin_mod_time=3) == ([20, 30, 40], 0)
    assert begins(begin_mod_time=2, end_mod_time=3) == ([10, 20], 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def index(clock: ManualClock) -> FragmentIndex:
    return FragmentIndex(clock)


def local(folder: Path, begin: int, content: bytes = b"0123456789") -> Sealed:
    disk = LocalDisk()
    files = [SharedFile(disk, folder / f"{begin}.{kind}") for kind in ("content", "commits")]
    for file in files:
        file.write_at(0, content)
        file.seal()
    return Sealed(fragment(begin, begin + len(content)), NOW, pb.LabelSet(), files[0], files[1])


async def waiting(index: FragmentIndex, offset: int) -> asyncio.Task[QueryResult]:
    task = asyncio.create_task(index.query(offset, block=True))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def test_stored_and_held_content_end_at_a_gap(index: FragmentIndex, tmp_path: Path) -> None:
    index.refresh([fragment(0, 10, RECENT), fragment(10, 25, RECENT), fragment(30, 40, RECENT)], 0.0)
    assert [index.stored_through(offset) for offset in (0, 12, 25, 30, 99)] == [25, 25, 25, 40, 99]
    files = [local(tmp_path, begin) for begin in (40, 60, 70)]  # 10 bytes each.
    for sealed in files:
        index.spool_complete(sealed)
    assert index.stored_through(30) == 40, "the next is here alone"
    assert index.held_from(80) == (60, [files[2], files[1]])
    assert index.held_from(90) == (90, [])
    files[1].quarantine_content()
    assert index.held_from(80) == (70, [files[2]])


async def test_a_commit_wakes_waiting_readers(index: FragmentIndex, tmp_path: Path) -> None:
    sealed = local(tmp_path, 0)
    task = await waiting(index, 0)
    index.spool_commit(fragment(0, 4), sealed.content)
    found = await task
    assert (found.offset, found.write_head) == (0, 4)
    further = await waiting(index, 4)
    index.spool_commit(fragment(0, 10), sealed.content)
    assert (await further).write_head == 10


async def test_a_commit_wakes_many_readers_in_turns_and_lets_others_run_between(
    index: FragmentIndex, tmp_path: Path
) -> None:
    sealed = local(tmp_path, 0)
    tasks = [asyncio.create_task(index.query(0, block=True)) for _ in range(5 * WAKE_BATCH)]
    await asyncio.sleep(0)
    order: list[int] = []
    for number, task in enumerate(tasks):
        task.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    tasks[1].cancel()
    index.spool_commit(fragment(0, 4), sealed.content)
    for _ in range(4):  # A wake, its task, its callback, and this task's own turn.
        await asyncio.sleep(0)
    assert 0 < len(order) <= 3 * WAKE_BATCH, "not all are woken in one turn"
    assert all(each.write_head == 4 for each in await asyncio.gather(tasks[0], *tasks[2:]))
    await asyncio.sleep(0)
    assert [each for each in order if each != 1] == [0, *range(2, len(tasks))]


async def test_a_cancelled_query_leaves_no_waiter(index: FragmentIndex) -> None:
    task = await waiting(index, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not index._waiters


async def test_a_blocking_read_of_the_head_begins_where_the_head_was(index: FragmentIndex, tmp_path: Path) -> None:
    sealed = local(tmp_path, 0)
    index.refresh([], 0.0)
    index.spool_commit(fragment(0, 4), sealed.content)
    task = await waiting(index, -1)
    index.spool_commit(fragment(0, 10), sealed.content)
    assert (await task).offset == 4


async def test_reads_that_do_not_block_wait_for_the_first_listing(index: FragmentIndex) -> None:
    task = asyncio.create_task(index.query(0, block=False))
    await asyncio.sleep(0)
    assert not task.done()
    index.refresh([fragment(0, 5, RECENT)], 0.0)
    assert (await task).write_head == 5
    assert (await index.query(5, block=False)).entry is None


async def test_a_read_below_the_head_without_a_fragment_is_reported(clock: ManualClock) -> None:
    gaps: list[int] = []
    index = FragmentIndex(clock, on_gap=lambda: gaps.append(1))
    index.refresh([fragment(0, 5, RECENT)], 0.0)
    index.note_head(10)
    assert (await index.query(3, block=False)).entry is not None
    assert (await index.query(10, block=False)).entry is None
    assert gaps == []
    assert (await index.query(7, block=False)).entry is None
    assert gaps == [1]


async def test_a_closed_index_ends_waiting_reads(index: FragmentIndex) -> None:
    task = await waiting(index, 0)
    index.close()
    with pytest.raises(Unavailable, match="no longer holds"):
        await task
    with pytest.raises(Unavailable):
        await index.query(0, block=False)


async def test_the_head_is_known_without_a_fragment_at_it(index: FragmentIndex) -> None:
    index.note_head(70)
    index.refresh([fragment(0, 5, RECENT)], 0.0)
    assert index.head == 70
    found = await index.query(-1, block=False)
    assert (found.offset, found.write_head, found.entry) == (70, 70, None)


async def test_a_local_file_stays_until_a_later_listing_covers_it(
    index: FragmentIndex, clock: ManualClock, tmp_path: Path
) -> None:
    sealed = local(tmp_path, 0)
    index.spool_complete(sealed)
    begun = clock.monotonic()
    clock.advance(1)
    index.stored(sealed, fragment(0, 10, RECENT))
    (entry,) = index.entries
    assert (entry.content, entry.fragment.mod_time) == (sealed.content, RECENT)

    # A listing that began before the fragment was stored does not matter.
    index.refresh([], begun)
    (entry,) = index.entries
    assert entry.fragment.mod_time == RECENT
    # A later one without it means that only this broker has it, so it is stored again. No other file is removed.
    assert index.refresh([], clock.monotonic() + 1) == [sealed]
    assert index.extent.unpersisted == 10
    index.drop_stored()
    (entry,) = index.entries
    assert (entry.content, entry.fragment.mod_time, entry.fragment.backing_store) == (sealed.content, 0, "")
    assert sealed.content.path.exists()

    index.refresh([fragment(0, 4, RECENT), fragment(4, 20, RECENT)], clock.monotonic() + 1)
    assert [entry.content for entry in index.entries] == [None, None]
    assert index.sealed_files() == []
    assert not sealed.content.path.exists()
    assert not sealed.log.path.exists()


async def test_the_head_stays_when_stored_fragments_are_deleted(
    index: FragmentIndex, clock: ManualClock, tmp_path: Path
) -> None:
    sealed = local(tmp_path, 0)
    index.spool_commit(fragment(0, 10), sealed.content)
    index.spool_complete(sealed)
    index.stored(sealed, fragment(0, 10, RECENT))
    clock.advance(1)
    index.refresh([fragment(0, 10, RECENT)], clock.monotonic())
    assert not sealed.content.path.exists()
    index.refresh([], clock.monotonic())  # All objects in the store were deleted.
    assert (index.head, index.known.end) == (10, 10)
    found = await index.query(-1, block=False)
    assert (found.offset, found.write_head, found.entry) == (10, 10, None)


async def test_a_read_does_not_jump_to_a_stored_fragment_that_no_listing_shows_yet(
    index: FragmentIndex, tmp_path: Path
) -> None:
    # Found by simulation: the broker before us stores [0, 10) just after our listing, and we store its successor.
    sealed = local(tmp_path, 10)
    index.refresh([], 0.0)
    index.spool_complete(sealed)
    index.stored(sealed, fragment(10, 20, RECENT))
    assert (await index.query(0, block=False)).entry is None
    index.refresh([fragment(0, 10, RECENT), fragment(10, 20, RECENT)], 1.0)
    assert (await index.query(0, block=False)).offset == 0


async def test_a_listing_does_not_hide_the_fragment_under_construction(index: FragmentIndex, tmp_path: Path) -> None:
    sealed = local(tmp_path, 10)
    index.spool_commit(fragment(10, 15), sealed.content)
    index.refresh([fragment(0, 10, RECENT)], 0.0)
    assert [(entry.begin, entry.end) for entry in index.entries] == [(0, 10), (10, 15)]
    assert (await index.query(12, block=False)).entry == IndexEntry(fragment(10, 15), sealed.content)


def listed(begin: int, end: int, file_bytes: int) -> Fragment:
    return replace(fragment(begin, end, RECENT), file_bytes=file_bytes)


async def test_a_local_file_stays_while_the_listed_file_cannot_have_its_content(
    index: FragmentIndex, clock: ManualClock, tmp_path: Path
) -> None:
    sealed = local(tmp_path, 0)
    index.spool_complete(sealed)
    # Replicas that have not tried to store it themselves need not do so.
    assert index.refresh([listed(0, 10, 9)], clock.monotonic()) == []
    index.stored(sealed, fragment(0, 10, RECENT))
    clock.advance(1)
    # Truncated: the local file is kept, served, and stored again.
    assert index.refresh([listed(0, 10, 9)], clock.monotonic()) == [sealed]
    (entry,) = index.entries
    assert (entry.local, entry.fragment.backing_store) == (sealed.content, "")
    assert index.refresh([listed(0, 10, 9)], clock.monotonic()) == [], "that is under way"
    index.stored(sealed, fragment(0, 10, RECENT))
    clock.advance(1)
    assert index.refresh([listed(0, 10, 9)], clock.monotonic()) == [], "it is not stored a third time"
    assert index.refresh([listed(0, 10, 9), listed(0, 20, 19), listed(20, 30, 0)], clock.monotonic()) == []
    # A listed fragment without an alternative is shown, so that its readers get an error that says why.
    assert [(each.begin, each.local) for each in index.entries] == [(0, sealed.content), (20, None)]
    assert index.refresh([listed(0, 10, 10)], clock.monotonic()) == []
    assert not sealed.content.path.exists()


async def test_a_local_file_stays_while_the_store_lists_other_content_at_its_offsets(
    index: FragmentIndex, clock: ManualClock, tmp_path: Path
) -> None:
    sealed = local(tmp_path, 0)
    index.spool_complete(sealed)
    other = replace(fragment(0, 10, RECENT), sum=b"t" * 20)
    index.refresh([other], clock.monotonic())
    assert sealed.content.path.exists()
    assert [entry.local for entry in index.entries] == [sealed.content]
    index.refresh([other, fragment(0, 10, RECENT)], clock.monotonic())
    assert not sealed.content.path.exists()


async def test_damaged_content_is_read_from_the_store_once_it_is_stored(index: FragmentIndex, tmp_path: Path) -> None:
    sealed = local(tmp_path, 0)
    index.spool_complete(sealed)
    sealed.quarantine_content()
    (entry,) = index.entries
    assert entry.local is sealed.content
    with pytest.raises(CorruptSpool, match="damaged"), sealed.content.borrow():
        pass
    index.stored(sealed, fragment(0, 10, RECENT))
    (entry,) = index.entries
    assert entry.local is None


async def test_gaps_in_written_content(index: FragmentIndex, tmp_path: Path) -> None:
    assert not index.has_gap(0)
    index.note_head(40)
    assert index.has_gap(0)
    index.refresh([fragment(10, 20, RECENT), fragment(30, 40, RECENT)], 0.0)
    assert [index.has_gap(*span) for span in ((0, 20), (0, 0), (20, 30), (30, 0), (40, 0))] == [
        False,  # Retention has removed earlier content.
        True,
        True,
        False,
        False,
    ]
    index.refresh([], 1.0)
    index.spool_complete(local(tmp_path, 30))
    assert index.has_gap(0), "content that is not stored yet was not removed before either"


async def test_a_wait_for_another_listing_ends_with_one_that_began_later(
    index: FragmentIndex, clock: ManualClock
) -> None:
    began = clock.monotonic() - 1.0
    waiting = asyncio.create_task(index.wait_listed_again(60.0))
    await asyncio.sleep(0)
    index.refresh([], began)
    await asyncio.sleep(0)
    assert not waiting.done()
    index.refresh([], clock.monotonic())
    assert await waiting
    clock.advance(1.0)
    assert not await index.wait_listed_again(0.01)
