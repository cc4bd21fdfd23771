"""Kafka and Coranto brokers are killed while records are ingested, and topics are deleted: no record is duplicated."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from confluent_kafka import Producer

from benchmarks.kafka import KafkaServer
from coranto.errors import SourceChanged
from coranto.ingest.kafka.source import KafkaSource
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.testing import Cluster
from coranto.testing.cluster import STORE_URL
from tests.platform.ingest.kafka.topics import SECONDS, Topics, delivered
from tests.platform.ingest.lists import STREAM, events, ingest, spec, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PARTITIONS, ROUNDS, ROWS = 4, 4, 600


async def test_ingest_while_brokers_of_both_are_killed(server: KafkaServer) -> None:
    chance, topics = random.Random(3), Topics(server.address)
    topic = topics.new(PARTITIONS)
    producer = Producer(topics.settings(enable_idempotence=True, linger_ms=20, message_timeout_ms=300_000))
    async with Cluster(brokers=3) as cluster:
        client = cluster.client()
        await Streams(client).create(STREAM, 2, template=default_template(replication=2, stores=[STORE_URL]))
        one = ingest(
            client,
            KafkaSource(topics.options(topic)),
            given=spec(kind="kafka", batch_bytes=20_000, batch_seconds=0.05, create=None),
            policy=None,
        )
        running = asyncio.create_task(one.run(follow=True))
        for each in range(ROUNDS):
            for number in range(each * ROWS, (each + 1) * ROWS):
                producer.produce(
                    topic,
                    b'{"n": %d}' % number,
                    b"key-%d" % (number % 5),
                    partition=number % PARTITIONS,
                    on_delivery=delivered,
                )
            producer.poll(0)
            await asyncio.sleep(chance.uniform(0, 0.3))
            victim = chance.randrange(3)
            if chance.random() < 0.75:
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(chance.uniform(0, 0.5))
                await asyncio.to_thread(server.start)
            else:
                await cluster.kill(victim)
                await asyncio.sleep(chance.uniform(0, 0.5))
                await cluster.start(victim)
        assert await asyncio.to_thread(producer.flush, SECONDS) == 0

        sample = one.metrics.registry.get_sample_value
        await until(
            lambda: running.done() or sample("coranto_ingest_rows_total", {"ingest": "loads"}) == ROUNDS * ROWS, 240
        )
        one.stop()
        report = await running
        found = await events(client)
    assert report.rows == ROUNDS * ROWS
    assert sorted(each["n"] for each in found) == list(range(ROUNDS * ROWS))
    for partition in range(PARTITIONS):
        for key in range(5):
            mine = [each["n"] for each in found if (each["n"] % PARTITIONS, each["n"] % 5) == (partition, key)]
            assert mine == sorted(mine)


@pytest.mark.parametrize("follow", [False, True])
async def test_a_topic_deleted_while_it_is_read_is_an_error(server: KafkaServer, follow: bool) -> None:
    topics = Topics(server.address)
    topic = topics.new(2)
    topics.write(topic, range(5000))
    source = KafkaSource(topics.options(topic))
    read, is_deleted = source.read, False

    async def read_and_delete(max_bytes: int) -> Any:
        nonlocal is_deleted
        found = await read(max_bytes)
        if not is_deleted and any(each.rows for each in found or ()):
            is_deleted = True
            await asyncio.to_thread(topics.delete, topic)
        return found

    source.read = read_and_delete  # type: ignore[method-assign]
    async with Cluster(brokers=1) as cluster:
        one = ingest(cluster.client(), source, given=spec(kind="kafka", batch_bytes=1000, batch_seconds=0.05))
        async with asyncio.timeout(60):
            with pytest.raises(SourceChanged, match=f"Kafka has no topic {topic}"):
                await one.run(follow=follow)
        found = [each["_meta"]["offset"] for each in await events(cluster.client())]
    assert sorted(found) == list(range(len(found)))


async def test_a_service_waits_for_kafka_and_counts_failures(server: KafkaServer) -> None:
    topics = Topics(server.address)
    topic = topics.new()
    topics.write(topic, range(5))
    server.kill()
    async with Cluster(brokers=1) as cluster:
        one = ingest(cluster.client(), KafkaSource(topics.options(topic)), given=spec(kind="kafka"), policy=None)
        running = asyncio.create_task(one.run(follow=True))
        sample = one.metrics.registry.get_sample_value
        await until(lambda: sample("coranto_ingest_failures_total", {"ingest": "loads"}))
        server.start()
        await until(lambda: sample("coranto_ingest_rows_total", {"ingest": "loads"}), 120)
        one.stop()
        assert (await running).rows == 5
