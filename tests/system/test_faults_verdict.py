"""Verdicts after faults: audits wait for the brokers' next listing, and lost content remains a problem."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coranto.client import JournalClient
from coranto.fragments.stores import StoreRegistry
from coranto.testing.fake_broker import CallPoint, FakeBroker, FakeJournal
from tests.faults.verdict import settled_audit

J = "a/journal"


async def three_fragments(broker: FakeBroker, client: JournalClient, root: Path) -> FakeJournal:
    journal = broker.create(J)
    for content in (b"first", b"second", b"third"):
        await client.append(J, content)
        journal.roll(root)
    return journal


async def test_a_fragment_in_the_next_listing_is_not_a_problem(tmp_path: Path) -> None:
    async with FakeBroker() as broker, JournalClient(broker.endpoint) as client:
        journal = await three_fragments(broker, client, tmp_path)
        unlisted = journal.stored.pop(1)
        audit = asyncio.create_task(settled_audit(client, StoreRegistry(file_root=tmp_path), J, 30.0))
        await broker.reached(CallPoint.FRAGMENTS, 2)
        journal.stored.insert(1, unlisted)
        assert (await audit).problems == []


async def test_a_lasting_gap_is_a_problem(tmp_path: Path) -> None:
    async with FakeBroker() as broker, JournalClient(broker.endpoint) as client:
        journal = await three_fragments(broker, client, tmp_path)
        del journal.stored[1]
        audit = await settled_audit(client, StoreRegistry(file_root=tmp_path), J, 2.0)
        assert audit.problems == ["a/journal: no content covers [5, 11)"]
        assert broker.count("ListFragments") > 1


async def test_a_missing_file_is_immediately_a_problem(tmp_path: Path) -> None:
    async with FakeBroker() as broker, JournalClient(broker.endpoint) as client:
        journal = await three_fragments(broker, client, tmp_path)
        (tmp_path / "fragments" / journal.stored[1].fragment.content_path).unlink()
        audit = await settled_audit(client, StoreRegistry(file_root=tmp_path), J, 30.0)
        assert audit.gaps == ((5, 11),)
        assert len(audit.problems) == 2
        assert broker.count("ListFragments") == 1
