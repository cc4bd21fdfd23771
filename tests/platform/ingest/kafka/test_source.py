"""Topics of a real Kafka become streams: transactions, gaps, new partitions, recreated topics and losses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2

from coranto.client import JournalClient
from coranto.errors import PoisonRow, SourceChanged, Unavailable
from coranto.ingest.kafka.options import KafkaOptions
from coranto.ingest.kafka.records import Values
from coranto.ingest.kafka.source import KafkaSource
from coranto.ingest.rows import parse_object
from coranto.ingest.runs import IngestReport
from coranto.types.kinds import PlainKind, TypeField, format_fields
from coranto.types.registry import TypeRegistry
from tests.platform.ingest.kafka.registry import Registry
from tests.platform.ingest.kafka.topics import Topics
from tests.platform.ingest.lists import dead_letters, events, ingest, spec, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture
def topics(kafka: str) -> Topics:
    return Topics(kafka)


async def run(client: JournalClient, topics: Topics, *names: str, given: Any = None, **options: Any) -> IngestReport:
    source = KafkaSource(topics.options(*names, **options))
    return await ingest(client, source, given=given or spec(kind="kafka")).run()


async def numbers(client: JournalClient) -> list[int]:
    return sorted(each["n"] for each in await events(client))


async def test_records_become_events_with_their_origin(client: JournalClient, topics: Topics) -> None:
    name = topics.new()
    topics.write(name, range(3), timestamp=1700000000000)
    report = await run(client, topics, name)
    assert (report.rows, report.progress.splits[f"{name}/0"]) == (3, 3)
    found = {each["n"]: each for each in await events(client)}
    meta = dict(found[1]["_meta"])
    del meta["uuid"]
    assert meta == {"topic": name, "partition": 0, "offset": 1, "timestamp": 1700000000000}


async def test_keys_headers_and_tombstones(client: JournalClient, topics: Topics) -> None:
    name = topics.new()
    topics.put(name, b'{"id": 1}', b'{"id": 1}', headers=[("a", b"x"), ("b", b"\xff"), ("c", None)])
    topics.put(name, None, b'{"id": 1}')
    topics.put(name, None, b"\xff\x00")
    topics.put(name, b'{"id": 2}')
    await run(client, topics, name, meta=("key", "headers"))
    found = [
        {**each, "_meta": {k: v for k, v in each["_meta"].items() if k != "uuid"}} for each in await events(client)
    ]
    key = '{"id": 1}'
    assert sorted(found, key=json.dumps) == sorted(
        [
            {"_meta": {"key": key, "headers": [["a", "x"], ["b", {"base64": "/w=="}], ["c", None]]}, "id": 1},
            {"_meta": {"key": key, "deleted": True, "headers": []}, "id": 1},
            {"_meta": {"key": {"base64": "/wA="}, "deleted": True, "headers": []}},
            {"_meta": {"key": None, "headers": []}, "id": 2},
        ],
        key=json.dumps,
    )
    report = await run(
        client, topics, name, given=spec(kind="kafka", name="other", stream="shop/other"), tombstones=False
    )
    assert report.rows == 2


async def test_the_operation_of_tombstones_is_a_field_of_the_schema() -> None:
    source = KafkaSource(KafkaOptions("k:9092", ("any",), operation="op"))
    assert await source.fields() is None
    source._values = Values(parse_object, lambda: (TypeField("n", PlainKind.BIGINT),))
    assert await source.fields() == (TypeField("op", PlainKind.STRING), TypeField("n", PlainKind.BIGINT))


async def test_only_committed_records_are_read_and_gaps_are_skipped(client: JournalClient, topics: Topics) -> None:
    name = topics.new(2)
    topics.transaction(name, range(10), commits=True)
    topics.transaction(name, range(100, 110), commits=False)
    topics.write(name, range(10, 15))
    topics.transaction(name, range(200, 210), commits=False)
    first = await run(client, topics, name)
    assert await numbers(client) == list(range(15))
    assert first.progress.splits[f"{name}/0"] == 38  # 35 records and 3 markers of transactions.
    again = await run(client, topics, name)
    assert (again.rows, again.batches) == (0, 0)

    opened = topics.transaction(name, range(20, 25), commits=None)
    topics.write(name, range(15, 20))
    waiting = await run(client, topics, name)
    assert (waiting.rows, waiting.progress.splits[f"{name}/0"]) == (0, 38)
    opened.commit_transaction(60)
    await run(client, topics, name)
    assert await numbers(client) == list(range(25))


async def test_compacted_offsets_are_skipped(client: JournalClient, topics: Topics) -> None:
    name = topics.new(
        cleanup_policy="compact",
        min_cleanable_dirty_ratio="0.01",
        segment_ms="100",
        max_compaction_lag_ms="100",
        delete_retention_ms="100",
    )
    topics.write(name, range(50))
    source = KafkaSource(topics.options(name))
    kept: set[int] = set()

    async def is_compacted() -> bool:
        await asyncio.sleep(0.5)
        topics.write(name, [1000])  # Start a new segment, so that earlier ones can be compacted.
        given = spec(kind="kafka", name=f"look-{len(kept)}", stream=f"shop/look-{len(kept)}")
        kept.add(len(kept))
        return (await ingest(client, KafkaSource(topics.options(name)), given=given).run()).rows < 50

    async with asyncio.timeout(120):
        while not await is_compacted():
            pass
    report = await ingest(client, source, given=spec(kind="kafka")).run()
    topics.write(name, [2000])
    more = await ingest(client, source, given=spec(kind="kafka")).run()
    assert more.rows >= 1
    assert (more.progress.rows, more.progress.lost) == (report.rows + more.rows, {})
    assert {45, 46, 47, 48, 49} & set(await numbers(client)) or 1000 in await numbers(client)


async def test_added_partitions_are_read(client: JournalClient, topics: Topics) -> None:
    name = topics.new()
    topics.write(name, range(5))
    one = ingest(client, KafkaSource(topics.options(name, from_end=True)), given=spec(kind="kafka", batch_seconds=0.05))
    running = asyncio.create_task(one.run(follow=True))
    await until(lambda: one.metrics.registry.get_sample_value("coranto_ingest_batches_total", {"ingest": "loads"}))
    topics.add_partitions(name, 3)
    topics.write(name, range(5, 10), partition=2)
    await until(lambda: count(client, 5))
    one.stop()
    assert (await running).progress.splits[f"{name}/2"] == 5
    assert await numbers(client) == [5, 6, 7, 8, 9]  # Records of partition 0 are older than the first start.


async def count(client: JournalClient, least: int) -> bool:
    return len(await events(client)) >= least


async def test_a_topic_of_200_partitions(client: JournalClient, topics: Topics) -> None:
    name = topics.new(200)
    for partition in range(200):
        topics.producer.produce(name, json.dumps({"n": partition}).encode(), partition=partition)
    assert topics.producer.flush(60) == 0
    report = await run(client, topics, name)
    assert (report.rows, len(report.progress.splits)) == (200, 201)
    assert (await run(client, topics, name)).rows == 0
    assert await numbers(client) == list(range(200))


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_recreated_topic_is_detected_by_its_id(client: JournalClient, topics: Topics, restarts: bool) -> None:
    name = topics.new(2)
    topics.write(name, range(5), partition=1)
    await run(client, topics, name)
    topics.delete(name)
    await until(lambda: created(topics, name))
    topics.write(name, range(100, 110), partition=1)
    if not restarts:
        with pytest.raises(SourceChanged, match=r"was deleted and created again.*recreated: restart"):
            await run(client, topics, name)
        assert await numbers(client) == list(range(5))
        return
    await run(client, topics, name, restarts=True)
    assert await numbers(client) == [*range(5), *range(100, 110)]
    assert (await run(client, topics, name, restarts=True)).rows == 0


def created(topics: Topics, name: str) -> bool:
    from confluent_kafka import KafkaException

    try:
        topics.create(name, 2)
    except KafkaException:
        return False  # It is still being deleted.
    return True


async def test_a_topic_recreated_while_it_is_read_is_an_error(client: JournalClient, topics: Topics) -> None:
    name = topics.new(2)
    topics.write(name, range(5))
    source = KafkaSource(topics.options(name))
    real = source.confirm

    async def confirm() -> None:
        topics.delete(name)
        await until(lambda: created(topics, name))
        await real()

    source.confirm = confirm  # type: ignore[method-assign]
    with pytest.raises(SourceChanged, match="was deleted and created again"):
        await ingest(client, source, given=spec(kind="kafka")).run()
    assert await numbers(client) == []


async def test_records_removed_by_retention_are_a_loss(client: JournalClient, topics: Topics) -> None:
    name = topics.new()
    topics.write(name, range(5))
    await run(client, topics, name)
    topics.write(name, range(5, 20))
    topics.remove_before(name, 0, 12)
    with pytest.raises(SourceChanged, match=r"read to offset 5, and begins at 12 now.*removed 7 offsets"):
        await run(client, topics, name)
    report = await run(client, topics, name, accepts_loss=True)
    assert report.progress.lost == {f"{name}/0": 7}
    assert await numbers(client) == [*range(5), *range(12, 20)]


async def test_records_removed_while_reading_are_counted_as_lost(client: JournalClient, topics: Topics) -> None:
    name = topics.new()
    topics.write(name, range(5))
    source = KafkaSource(topics.options(name, accepts_loss=True))
    one = ingest(client, source, given=spec(kind="kafka", batch_seconds=0.05))
    running = asyncio.create_task(one.run(follow=True))
    await until(lambda: one.metrics.registry.get_sample_value("coranto_ingest_batches_total", {"ingest": "loads"}))
    source_read = source._read_alone
    source._read_alone = lambda max_bytes: []  # type: ignore[method-assign]
    await asyncio.sleep(0.3)
    topics.write(name, range(5, 20))
    topics.remove_before(name, 0, 12)
    source._read_alone = source_read  # type: ignore[method-assign]
    topics.write(name, [20])
    await until(lambda: found_last(client))
    one.stop()
    report = await running
    assert set(await numbers(client)) >= {*range(12, 21)}
    assert len(await numbers(client)) == len(set(await numbers(client)))
    assert len(await numbers(client)) + sum(report.progress.lost.values()) == 21


async def found_last(client: JournalClient) -> bool:
    return 20 in await numbers(client)


async def test_values_that_are_not_objects_are_poison(client: JournalClient, topics: Topics) -> None:
    name = topics.new()
    topics.write(name, [1])
    topics.put(name, b"[1]", b"k")
    with pytest.raises(PoisonRow, match=rf"kafka {name}/0, offset 1: the row is JSON, but list and not an object"):
        await run(client, topics, name)
    await run(client, topics, name, given=spec(kind="kafka", keeps_poison=True))
    assert await numbers(client) == [1]
    assert [each["value"] for each in await dead_letters(client)] == ["WzFd"]


async def test_two_processes_read_one_topic(client: JournalClient, topics: Topics) -> None:
    name = topics.new(4)
    for partition in range(4):
        topics.write(name, range(partition * 1000, partition * 1000 + 500), partition=partition)
    given = spec(kind="kafka", batch_bytes=8000)
    both = await asyncio.gather(*(run(client, topics, name, given=given) for _ in range(2)))
    assert sum(each.rows for each in both) == 2000
    assert await numbers(client) == [n for p in range(4) for n in range(p * 1000, p * 1000 + 500)]


async def test_an_unavailable_cluster_and_a_missing_topic_are_errors(
    client: JournalClient, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceChanged, match="Kafka has no topic nowhere"):
        await run(client, topics, "nowhere")
    monkeypatch.setattr("coranto.ingest.kafka.cluster.CALL_SECONDS", 1.0)
    away = Topics("127.0.0.1:1")
    with pytest.raises(Unavailable, match="a call to Kafka failed"):
        await run(client, away, "orders")


async def test_the_lag_is_the_number_of_unread_offsets(client: JournalClient, topics: Topics) -> None:
    name = topics.new(2)
    topics.write(name, range(5))
    source = KafkaSource(topics.options(name))
    assert await source.lag({}) == {f"{name}/0": 5, f"{name}/1": 0}
    assert await source.lag({f"{name}/0": 3}) == {f"{name}/0": 2, f"{name}/1": 0}


SCHEMAS = [
    {"type": "record", "name": "Order", "fields": [{"name": "n", "type": "int"}, *more]}
    for more in ([], [{"name": "note", "type": ["null", "string"], "default": None}])
]


async def test_avro_of_a_registry_becomes_typed_events(
    client: JournalClient, topics: Topics, registry: Registry
) -> None:
    name = topics.new(2)
    written = []
    for partition, schema in enumerate(SCHEMAS):
        serialize = AvroSerializer(SchemaRegistryClient(registry.options), json.dumps(schema))
        for n in range(partition * 10, partition * 10 + 3):
            order = {"n": n, **({"note": f"note {n}"} if partition else {})}
            topics.put(name, serialize(order, SerializationContext(name, MessageField.VALUE)), b"k", partition)
            written.append(order)
    topics.put(name, b"\0\0\0\0\x63x", b"k", 1)
    given = spec(kind="kafka", type="shop.Order", registry="types/registry", registers=True, keeps_poison=True)
    report = await run(client, topics, name, given=given, value="avro", registry=registry.options)
    assert (report.rows, report.dead_letters) == (6, 1)
    found = [{name: value for name, value in each.items() if name != "_meta"} for each in await events(client)]
    assert sorted(found, key=lambda each: each["n"]) == written
    latest = await TypeRegistry(client, "types/registry").find("shop.Order")
    assert {(each.name, each.kind.value, each.nullable) for each in latest.definition.fields} == {  # type: ignore[union-attr]
        ("n", "INT", False),
        ("note", "STRING", True),
    }


async def test_protobuf_of_a_registry_becomes_typed_events(
    client: JournalClient, topics: Topics, registry: Registry
) -> None:
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    file.message_type.add(name="Order").field.add(name="n", number=1, type=3, label=1)
    head = b"\0" + registry.add(file).to_bytes(4, "big") + b"\0"
    name = topics.new()
    for content in (b"\x08\x07", b"", b"\x08\x80\x80\x80\x80\x80\x01"):
        topics.put(name, head + content, b"k")
    given = spec(kind="kafka", type="shop.Order", registry="types/registry", registers=True)
    await run(client, topics, name, given=given, value="protobuf", registry=registry.options)
    assert await numbers(client) == [0, 7, 2**35]
    latest = await TypeRegistry(client, "types/registry").find("shop.Order")
    assert format_fields(latest.definition.fields) == "n BIGINT NOT NULL"
