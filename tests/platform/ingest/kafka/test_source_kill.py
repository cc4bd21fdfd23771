"""Kafka becomes a stream, and the stream two tables, while all processes and brokers of both are killed.

Producers commit and abort transactions. DuckDB compares the tables with the committed records, row by row.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks.kafka import KafkaServer
from coranto.client import JournalClient
from coranto.streams.control.lifecycle import Streams, default_template
from tests.consumers.tables.killed import KilledTables, differences, rows_of
from tests.consumers.tables.shop import table_file
from tests.platform.ingest.kafka.topics import Topics
from tests.platform.ingest.killing import Killing, crash_broker, two_brokers
from tests.platform.ingest.lists import events

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "6"))
STREAM = "kill/orders"
PARTITIONS, TRANSACTIONS = 4, 12
"""The partitions of the topic, and the transactions written before each turn."""
KEYS, IDS = 5, 35
SPEC = """
name: killed
stream: {stream}
source:
  kafka: {{brokers: "{address}", topics: [{topic}]}}
batch: {{bytes: 20000, seconds: 0.2}}
"""


class Written:
    """A topic with transactions, one in four aborted, and its committed records.

    Numbers increase. Each id is in one partition, under one key of Kafka.
    """

    def __init__(self, address: str, chance: random.Random) -> None:
        self.rows: list[dict[str, Any]] = []
        self._topics = Topics(address)
        self._chance = chance
        self._number = 0
        self.topic = self._topics.new(PARTITIONS)

    def write(self) -> None:
        chance = self._chance
        for _ in range(TRANSACTIONS):
            count, partition, commits = chance.randrange(50, 500), chance.randrange(PARTITIONS), chance.random() < 0.75
            numbers = range(self._number, self._number + count)
            row = partial(self._row, partition)
            self._topics.transaction(self.topic, numbers, commits=commits, partition=partition, row=row)
            self.rows += map(row, numbers) if commits else ()
            self._number += count

    def _row(self, partition: int, number: int) -> dict[str, Any]:
        return {"id": f"{partition}-{number % IDS}", "n": number}


def restart(server: KafkaServer) -> None:
    server.kill()
    server.start()


async def test_each_committed_record_is_ingested_once(server: KafkaServer, tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("CORANTO_INGEST_SEED", "1")))
    written = await asyncio.to_thread(Written, server.address, chance)
    ingest, everything, latest = (tmp_path / f"{name}.yaml" for name in ("killed", "everything", "latest"))
    ingest.write_text(SPEC.format(stream=STREAM, address=server.address, topic=written.topic))
    for file, mode in ((everything, "append"), (latest, "upsert")):
        store = f"sqlite:///{tmp_path}/{file.stem}.db"
        file.write_text(table_file(f"{{stream: {STREAM}}}", store, mode, columns="id STRING, n BIGINT"))
    with two_brokers(tmp_path) as cluster:
        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=120) as client:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            outages = [partial(restart, server), partial(crash_broker, cluster)]
            killing = Killing(client, STREAM, ingest, chance, outages)
            tables = KilledTables(endpoint, chance, everything, latest)
            while not killing.is_over(KILLS):
                await asyncio.to_thread(written.write)
                with tables.running():
                    await killing.turn()
            await asyncio.to_thread(cluster.wait_ready)
            await killing.complete()
            await tables.complete()
            found = await events(client, STREAM)
    assert [each["n"] for each in sorted(found, key=number_of)] == [each["n"] for each in written.rows]
    assert all(each == sorted(each) for each in orders(found))
    assert differences(pa.Table.from_pylist(written.rows), rows_of(everything)) == []
    last = {each["id"]: each for each in written.rows}
    assert differences(pa.Table.from_pylist(list(last.values())), rows_of(latest)) == []
    assert tables.killed >= KILLS // 2


def number_of(event: dict[str, Any]) -> int:
    return int(event["n"])


def orders(found: list[dict[str, Any]]) -> Iterator[list[int]]:
    """Yield the offsets of each partition and key, in the order of the stream."""
    by_key = dict[tuple[int, int], list[int]]()
    for each in found:
        meta = each["_meta"]
        by_key.setdefault((meta["partition"], each["n"] % KEYS), []).append(meta["offset"])
    yield from by_key.values()
