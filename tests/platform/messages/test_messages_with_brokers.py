"""Messages on real brokers while one is killed: all readers get the committed messages."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.committed import async_committed_reader, committed_reader
from coranto.client.publishing import publisher, sync_publisher
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines, RendezvousMapping
from coranto.messages.batches import line_batch, parse_lines
from coranto.messages.columnar_sequencer import ColumnarSequencer
from coranto.messages.mapping import by_key
from coranto.messages.sequencer import ReplayRange
from coranto.wire import protocol_pb2 as pb

LINES = JsonLines()
JOURNALS = ("messages/part-000", "messages/part-001")
TRANSACTIONS = 12
PER_TRANSACTION = 50


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path, brokers=2, etcd_fsync=False) as cluster:
        changes = []
        for name in JOURNALS:
            spec = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
            spec.fragment.length = 16 << 10
            spec.fragment.compression_codec = pb.GZIP
            spec.fragment.stores.append("file:///")
            spec.fragment.refresh_interval.FromSeconds(1)
            changes.append(pb.ApplyRequest.Change(upsert=spec))
        with SyncJournalClient(cluster.info.endpoint) as client:
            client.apply(changes)
            for name in JOURNALS:
                client.append(name, b"")
        yield cluster


async def test_all_readers_agree_on_committed_messages(cluster: EmbeddedCluster) -> None:
    info = cluster.info
    destination = by_key(lambda message: str(message["number"]).encode(), RendezvousMapping(JOURNALS))
    async with JournalClient(info.endpoint, file_root=info.file_root) as client:
        one = publisher(client, LINES, max_batch_bytes=2000)
        number = 0
        async with one:
            for transaction in range(TRANSACTIONS):
                is_committed = transaction % 3 != 1
                for _ in range(PER_TRANSACTION):
                    await one.add(destination, {"number": number if is_committed else -1})
                    number += is_committed
                if transaction == TRANSACTIONS // 2:
                    cluster.kill_broker(0)
                if is_committed:
                    await one.commit()
                else:
                    await one.rollback()

        expected = {name: [n for n in range(number) if destination({"number": n}) == name] for name in JOURNALS}
        for name in JOURNALS:
            reader = async_committed_reader(client, name, LINES, ring_size=20)
            async with contextlib.aclosing(reader):
                transactions = [one async for one in reader.transactions()]
            read = [[envelope.message["number"] for envelope in one.messages] for one in transactions]
            assert [n for numbers in read for n in numbers] == expected[name]
            # Each is complete: all messages of a transaction in this journal.
            assert [Counter(n // PER_TRANSACTION for n in numbers).keys() for numbers in read] == [
                {transaction} for transaction in range(TRANSACTIONS * 2 // 3)
            ]

    with SyncJournalClient(info.endpoint, file_root=info.file_root) as blocking:
        for name in JOURNALS:
            assert [one.message["number"] for one in committed_reader(blocking, name, LINES)] == expected[name]

            def replay(wanted: ReplayRange) -> Iterator[object]:
                piece = blocking.read_all(wanted.journal, wanted.begin, wanted.end)
                yield line_batch(LINES, wanted.journal, piece, wanted.begin)[0]

            sequencer = ColumnarSequencer(replay, ring_rows=30)
            content, at, numbers = blocking.read_all(name, 0, blocking.head(name)), 0, []
            while at < len(content):
                batch, consumed = line_batch(LINES, name, content[at : at + 3000], at)
                numbers += parse_lines(sequencer.feed(batch)).to_pydict().get("number", [])
                at += consumed
            assert numbers == expected[name]

        alone = sync_publisher(blocking, LINES)
        uuid = alone.publish(JOURNALS[0], {"number": number})
        alone.flush()
        assert list(committed_reader(blocking, JOURNALS[0], LINES))[-1].uuid == uuid
