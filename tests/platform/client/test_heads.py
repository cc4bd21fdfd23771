"""Heads of many journals at brokers without that call: each journal is queried separately."""

from __future__ import annotations

import asyncio

import pytest

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.heads import JournalHead
from coranto.errors import CorruptData
from coranto.testing.fake_broker import FakeBroker
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import JournalHead as WireHead


async def test_gazettes_brokers_are_queried_for_each_journal(broker: FakeBroker) -> None:
    for name in ("other/journal", "some/journal-1", "some/journal-2"):
        broker.create(name)
    await broker.write("some/journal-2", b"content")
    async with JournalClient(broker.endpoint) as client:
        heads = await client.heads("name:prefix=some/")
        assert [(head.journal, head.status, head.head) for head in heads] == [
            ("some/journal-1", pb.OK, 0),
            ("some/journal-2", pb.OK, 7),
        ]
        assert [head.registers for head in heads] == [None, None]
        assert not heads.unknown
        assert not (await client.heads("name=nothing/here")).journals


async def test_heads_of_the_blocking_client(broker: FakeBroker) -> None:
    broker.create("some/journal")
    with SyncJournalClient(broker.endpoint) as client:
        heads = await asyncio.to_thread(client.heads, "name=some/journal")
    assert [head.journal for head in heads] == ["some/journal"]


@pytest.mark.parametrize(("begin", "persisted", "head"), [(5, 4, 9), (0, 9, 8), (-1, 0, 0)])
def test_inconsistent_offsets_are_refused(begin: int, persisted: int, head: int) -> None:
    wire = WireHead(journal="some/journal", status=pb.OK, begin=begin, persisted_head=persisted, head=head)
    with pytest.raises(CorruptData, match="some/journal has begin"):
        JournalHead.of(wire)
