"""Processes that read Kafka are killed while producers commit and abort: each record is in the stream once."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.testing import Cluster
from coranto.testing.cluster import STORE_URL
from tests.platform.ingest.kafka.topics import Topics
from tests.platform.ingest.killing import live, moment
from tests.platform.ingest.lists import events

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "6"))
STREAM = "kill/orders"
PARTITIONS, ROWS = 4, 2000 * KILLS
SPEC = """
name: killed
stream: {stream}
source:
  kafka: {{brokers: "{address}", topics: [{topic}]}}
batch: {{bytes: 20000, seconds: 0.2}}
"""


def write(topics: Topics, topic: str, chance: random.Random) -> list[int]:
    """Write transactions of which one in four is aborted. Returns the committed numbers."""
    committed, number = list[int](), 0
    while len(committed) < ROWS:
        count, partition, commits = chance.randrange(50, 500), chance.randrange(PARTITIONS), chance.random() < 0.75
        numbers = range(number, number + count)
        topics.transaction(topic, numbers, commits=commits, partition=partition)
        committed += numbers if commits else ()
        number += count
    return committed


async def test_each_committed_record_is_there_once(kafka: str, tmp_path: Path) -> None:
    chance, topics = random.Random(1), Topics(kafka)
    topic = topics.new(PARTITIONS)
    expected = await asyncio.to_thread(write, topics, topic, chance)
    file = tmp_path / "killed.yaml"
    file.write_text(SPEC.format(stream=STREAM, address=kafka, topic=topic))
    async with Cluster(brokers=2, grpc=True) as cluster:
        client: JournalClient = cluster.client()
        endpoint = cluster.endpoint.removeprefix("http://")
        await Streams(client).create(STREAM, 2, template=default_template(replication=2, stores=[STORE_URL]))
        killed = 0
        while killed < KILLS:
            lives = [live(file, endpoint, moment(client, STREAM, chance)) for _ in range(chance.choice((1, 2)))]
            ends = await asyncio.gather(*lives)
            killed += ends.count(None)
            assert 0 not in ends, "all was there too soon: give more rows"
        assert await live(file, endpoint, None) == 0
        found = await events(client, STREAM)
    assert sorted(each["n"] for each in found) == expected
    for partition in range(PARTITIONS):
        for key in range(5):
            mine = [
                each["_meta"]["offset"]
                for each in found
                if each["_meta"]["partition"] == partition and each["n"] % 5 == key
            ]
            assert mine == sorted(mine)
