"""Stored content and the brokers' index, compared fragment by fragment."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from coranto.audit.content import AuditStatus, audit_journal, uncovered
from coranto.client import JournalClient
from coranto.errors import StoreError
from coranto.fragments.stores import FragmentStore, StoreRegistry
from coranto.testing.fake_broker import FakeBroker


class UnavailableStores:
    """Stores that always fail."""

    requests = 0

    def get(self, url: str) -> FragmentStore:
        self.requests += 1
        raise StoreError(f"{url} is unavailable")


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda each: (each[0], sum(each))))


@given(spans, st.integers(0, 30), st.integers(0, 30))
def test_uncovered_offsets_are_those_that_no_span_has(found: list[tuple[int, int]], first: int, length: int) -> None:
    gaps = uncovered(found, first, first + length)
    missing = {at for at in range(first, first + length) if not any(begin <= at < end for begin, end in found)}
    assert {at for begin, end in gaps for at in range(begin, end)} == missing
    assert gaps == sorted(gaps)


async def test_missing_and_changed_objects_leave_their_offsets_uncovered(tmp_path: Path) -> None:
    async with FakeBroker() as broker, JournalClient(broker.endpoint) as client:
        journal = broker.create("a/journal")
        for content in (b"first", b"second", b"third"):
            await client.append("a/journal", content)
            journal.roll(tmp_path)
        await client.append("a/journal", b"live")
        stores = StoreRegistry(file_root=tmp_path)
        sound = await audit_journal(client, stores, "a/journal")
        assert (sound.problems, sound.first, sound.head, sound.persisted_head, sound.live_bytes) == ([], 0, 20, 16, 4)
        one, two, _ = (tmp_path / "fragments" / each.fragment.content_path for each in journal.stored)
        one.unlink()
        two.write_bytes(b"SECOND")
        damaged = await audit_journal(client, stores, "a/journal")
        statuses = [each.status for each in damaged.fragments]
        assert statuses == [AuditStatus.MISSING, AuditStatus.CORRUPT, AuditStatus.OK, AuditStatus.OK]
        assert not damaged.sound
        assert damaged.gaps == ((0, 11),)


async def test_an_unavailable_store_gets_one_request(tmp_path: Path) -> None:
    async with FakeBroker() as broker, JournalClient(broker.endpoint) as client:
        journal = broker.create("a/journal")
        for content in (b"first", b"second"):
            await client.append("a/journal", content)
            journal.roll(tmp_path)
        broken: set[str] = set()
        stores = UnavailableStores()
        found = await audit_journal(client, cast(StoreRegistry, stores), "a/journal", broken=broken)
        assert stores.requests == 1
        assert [each.status for each in found.fragments] == [AuditStatus.UNREADABLE] * 2
        assert "could not be used just now" in found.fragments[1].problem
        assert broken == {journal.stored[0].fragment.backing_store}
