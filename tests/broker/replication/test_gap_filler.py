"""Gaps of a replica's index: what is fetched from peers, what waits meanwhile, and for how long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coranto.effects import LocalDisk
from coranto.fragments.codecs import Codec
from coranto.fragments.fragment import Fragment, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.index import FragmentIndex, OffsetSpan, uncovered
from coranto_broker.replication import gap_filler
from coranto_broker.replication.gap_filler import GapFiller
from coranto_broker.spool.durable_spool import FETCHED, Sealed, SpoolFolder
from coranto_broker.spool.recovery import LostSpan, recover
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.testing.running import ManualClock, eventually

J = "test/journal"
CONTENT = bytes(range(100))


def fragment(begin: int, end: int, *, stored: float = 0) -> Fragment:
    store = "file:///" if stored else ""
    return Fragment(J, begin, end, sum_of(CONTENT[begin:end]), Codec.NONE, store, int(stored))


class Peers:
    """Peers that hold these fragments of CONTENT."""

    def __init__(self, *held: tuple[int, int]) -> None:
        self.held = list(held)
        self.asked = 0

    async def fetch_last(self, journal: str, begin: int, end: int, target: SharedFile) -> tuple[Fragment, str] | None:
        self.asked += 1
        for first, last in self.held:
            if first < end <= last:
                target.write_at(0, CONTENT[max(begin, first) : end])
                return fragment(max(begin, first), end), "zone#other"
        return None


class Replica:
    """The parts of a replica around its gap filler."""

    def __init__(self, folder: Path, *held: tuple[int, int]) -> None:
        self.clock = ManualClock()
        self.folder = SpoolFolder(folder, J, 1, LocalDisk(), self.clock)
        self.index = FragmentIndex(self.clock)
        self.peers = Peers(*held)
        self.added: list[Sealed] = []
        self.held_at: int | None = None
        self.filler = GapFiller(self.folder, self.index, self.peers, add=self._add, hold=self._hold)

    def _add(self, sealed: Sealed) -> None:
        self.added.append(sealed)
        self.index.spool_complete(sealed)

    def _hold(self, offset: int | None) -> None:
        self.held_at = offset

    def has(self, begin: int, end: int) -> None:
        """Have a completed fragment in a local file."""
        content, log = self.folder.content(begin), self.folder.log(begin, 0)
        content.write_at(0, CONTENT[begin:end])
        content.seal()
        self.index.spool_complete(Sealed(fragment(begin, end), 0.0, pb.LabelSet(), content, log, 1))

    def list_stores(self, *stored: Fragment) -> None:
        self.index.refresh(stored, self.clock.monotonic())
        self.filler.look()

    async def read(self, offset: int) -> bytes | None:
        """Return the content from `offset` to the end of the entry that has it; None if it is not available yet."""
        found = await self.index.query(offset, block=False)
        if found.entry is None:
            return None
        assert found.offset == offset, f"jumped to {found.offset}"
        assert found.entry.content is not None
        return found.entry.content.read_at(offset - found.entry.begin, found.entry.end - offset)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.filler.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()


def fetched_files(replica: Replica) -> list[str]:
    return [name for name in replica.folder.disk.list(replica.folder.path) if name.endswith(FETCHED)]


async def test_a_gap_is_filled_from_all_that_peers_have_and_a_restart_forgets_it(tmp_path: Path) -> None:
    replica = Replica(tmp_path, (10, 40), (40, 80))
    replica.has(0, 20)
    replica.has(70, 100)
    async with replica.running():
        replica.list_stores()
        assert await replica.read(20) is None
        await eventually(lambda: len(replica.added) == 2)
    assert [(each.fragment.begin, each.fragment.end) for each in replica.added] == [(40, 70), (20, 40)]
    assert all(each.settled for each in replica.added)
    assert (await replica.read(20), await replica.read(40)) == (CONTENT[20:40], CONTENT[40:70])
    assert replica.index.holes() == []
    for sealed in replica.added:
        sealed.drop()
    assert fetched_files(replica) == []


async def test_what_the_journal_went_on_behind_is_fetched_too(tmp_path: Path) -> None:
    replica = Replica(tmp_path, (10, 60))
    replica.index.spool_skip(5)  # Nothing is here: a new replica has no gap.
    assert replica.index.holes() == []
    replica.has(0, 20)
    replica.index.spool_skip(60)
    async with replica.running():
        replica.list_stores()
        await eventually(lambda: replica.added)
    assert await replica.read(20) == CONTENT[20:60]
    assert replica.index.holes() == []


async def test_copies_do_not_survive_a_restart(tmp_path: Path) -> None:
    replica = Replica(tmp_path, (0, 100))
    replica.has(0, 20)
    replica.has(70, 100)
    async with replica.running():
        replica.list_stores()
        await eventually(lambda: len(replica.added) == 1)
    recover(replica.folder)
    assert fetched_files(replica) == []


async def test_lost_content_is_neither_skipped_nor_left_behind_by_the_stores(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.filler.expect([LostSpan(0, 60, 5.0)])
    replica.has(60, 80)
    stored = fragment(80, 100, stored=replica.clock.now())
    async with replica.running():
        replica.list_stores(stored)
        await eventually(lambda: replica.peers.asked)
        assert await replica.read(0) is None
        assert replica.held_at == 0
        replica.peers.held.append((0, 60))
        replica.filler.look()
        await eventually(lambda: replica.held_at is None)
        assert await replica.read(0) == CONTENT[:60]
        assert replica.added[0].first_append_time == 5.0


async def test_other_gaps_wait_for_a_listing_but_lost_content_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gap_filler, "_BACKOFF_SECONDS", (0.01,))
    replica = Replica(tmp_path, (0, 100))
    replica.has(30, 40)
    replica.has(50, 60)
    replica.filler.expect([LostSpan(0, 30)])
    async with replica.running():
        await eventually(lambda: replica.added)
        await eventually(lambda: replica.held_at is None)
        assert [(each.fragment.begin, each.fragment.end) for each in replica.added] == [(0, 30)]
        replica.list_stores(fragment(40, 50, stored=1))
        assert replica.index.holes() == []


async def test_nothing_waits_for_ever_for_content_that_nobody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gap_filler, "_BACKOFF_SECONDS", (0.01,))
    replica = Replica(tmp_path)
    replica.filler.expect([LostSpan(0, 60)])
    replica.has(60, 80)
    with capture_logs() as logs:
        async with replica.running():
            replica.list_stores(fragment(60, 80, stored=replica.clock.now()))
            await eventually(lambda: replica.peers.asked > 2)
            assert replica.held_at == 0
            assert (await replica.index.query(0, block=False)).entry is None
            replica.clock.advance(gap_filler.HOPE_SECONDS)
            await eventually(lambda: replica.held_at is None)
            assert (await replica.index.query(0, block=False)).offset == 60, "as if its beginning had been removed"
    assert [log["spans"] for log in logs if log["event"] == "journal.content_not_found"] == [[[0, 60]]]


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda each: OffsetSpan(*sorted(each))), max_size=6
)


@given(spans, spans)
def test_what_is_uncovered_is_in_the_spans_and_not_in_the_covers(
    wanted: list[OffsetSpan], covers: list[OffsetSpan]
) -> None:
    def offsets(spans: list[OffsetSpan]) -> set[int]:
        return {offset for begin, end in spans for offset in range(begin, end)}

    found = uncovered(wanted, covers)
    assert offsets(found) == offsets(wanted) - offsets(covers)
    assert all(begin < end for begin, end in found)
    assert all(one.end <= two.begin for one, two in itertools.pairwise(found))
