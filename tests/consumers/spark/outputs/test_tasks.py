"""Writes of a task attempt count only if the driver says so."""

import json

import pyarrow as pa
import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, select

from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.mapping import modulo, rendezvous
from coranto.messages.sequencer import Sequencer, read_committed
from coranto_consumers.spark.outputs.tasks import PublishTask, StageTask
from coranto_consumers.spark.sink.producer_ids import IdPool
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.merge import merge_staged, plan_merge
from coranto_consumers.stores.staging import stage_of

JOURNALS = ("a/sink/one", "a/sink/two", "a/sink/three")
KEYS = [f"key-{n}".encode() for n in range(20)]


def batches(keys, values, size: int = 7):
    columns = {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.string())}
    return iter(pa.table(columns).to_batches(max_chunksize=size))


def messages(keys=KEYS):
    return batches(keys, [json.dumps({"n": n}) for n in range(len(keys))])


def results(task, rows) -> list[dict]:
    return [row for batch in task(rows) for row in batch.to_pylist()]


def committed(broker) -> dict[str, list[int]]:
    found = {}
    for journal in JOURNALS:
        envelopes = iter_messages(JsonLines(), journal, [broker.content(journal)], 0)
        found[journal] = [e.message["n"] for e in read_committed(envelopes, Sequencer(), lambda wanted: [])]
    return found


@pytest.fixture
def sink(broker):
    broker.create(*JOURNALS)
    return broker


@pytest.mark.parametrize(("name", "mapped"), [("rendezvous", rendezvous), ("modulo", modulo)])
def test_messages_are_pending_until_their_acknowledgements_are_appended(sink, name, mapped):
    task = PublishTask(sink.config, JOURNALS, name, IdPool())
    lost, won = results(task, messages()), results(task, messages())

    assert {journal: content.count("n") for journal, content in committed(sink).items()} == dict.fromkeys(JOURNALS, 0)
    for row in won:
        sink.write(row["journal"], row["intent"])

    expected = {journal: [n for n, key in enumerate(KEYS) if mapped(key, JOURNALS) == journal] for journal in JOURNALS}
    assert committed(sink) == expected
    assert {row["journal"]: row["messages"] for row in won} == {j: len(ns) for j, ns in expected.items() if ns}
    assert {row["intent"] for row in lost}.isdisjoint(row["intent"] for row in won)


def test_a_random_mapping_needs_no_keys(sink):
    for row in results(PublishTask(sink.config, JOURNALS, "random", IdPool()), messages([None] * 20)):
        sink.write(row["journal"], row["intent"])

    assert sorted(n for numbers in committed(sink).values() for n in numbers) == list(range(20))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (None, "{}", "no key to map it by"),
        (b"k", None, "a row has no value"),
        (b"k", "{", "is not JSON"),
        (b"k", "[1]", "is not a JSON object"),
        (b"k", '{"n": NaN}', "NaN is not JSON"),
        (b"k", '{"n": 1} x', "is not JSON"),
    ],
)
def test_invalid_messages_are_refused(sink, key, value, problem):
    with pytest.raises(InvalidInput, match=problem):
        results(PublishTask(sink.config, JOURNALS, "rendezvous", IdPool()), batches([key], [value]))


def test_a_task_without_rows_writes_nothing_and_connects_to_nothing(sink):
    sink.fake.calls.clear()

    assert results(PublishTask(sink.config, JOURNALS, "rendezvous", IdPool()), iter([])) == []
    assert results(PublishTask(sink.config, JOURNALS, "rendezvous", IdPool()), messages([])) == []
    assert sink.fake.calls == []


def test_staged_rows_of_a_lost_attempt_are_not_merged(store_url):
    store = SqlStore(store_url)
    table = Table("rows", MetaData(), Column("id", Integer, primary_key=True), Column("text", Text))
    plan = plan_merge(table, ("id", "text"), (), {})
    task = StageTask(store.url, stage_of(store, plan), "shard", 1)
    source = pa.table({"id": range(10), "text": ["x", None] * 5})

    results(task, iter(source.to_batches(max_chunksize=4)))
    won = results(task, iter(source.to_batches(max_chunksize=4)))
    assert results(task, iter([])) == []

    assert [row["rows"] for row in won] == [10]
    with store.engine.begin() as connection:
        merge_staged(connection, plan, task.stage, [row["attempt"] for row in won], 10)
        assert connection.execute(select(table.c.id).order_by(table.c.id)).scalars().all() == list(range(10))
