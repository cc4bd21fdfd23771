"""Rows that the database rejects: their messages are found and handled, and all others commit."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import BigInteger, CheckConstraint, Column, MetaData, String, Table, select
from structlog.testing import capture_logs

from coranto.effects import SystemClock
from coranto.errors import RejectedRow
from coranto.messages import JsonLines
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy, dead_letter_table
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.columns import Columns
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.rejections import Consumed, RejectionSearch
from coranto_consumers.runtime.replica import ShardReplica
from coranto_consumers.runtime.testing import shard_spec
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.sql_shard import SqlShardStore
from tests.consumers.runtime.test_replica import Host

ITEMS = Table(
    "items",
    MetaData(),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(8)),
    Column("price", BigInteger),
    CheckConstraint("price < 1000", name="price_is_low"),
)
LETTERS = dead_letter_table("letters")
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("price", pa.int64())])
BAD = {30: {"price": 77777}, 55: {"id": 1}, 56: {"id": None}}


class Items(Application[SqlShardStore]):
    """An application that inserts a row for each message, and publishes the id."""

    def __init__(self, database: SqlStore, way: str, misfits: Any) -> None:
        self.database, self.way = database, way
        self.misfits = misfits if way != "batches" else MisfitPolicy.FAIL
        schema = SCHEMA if misfits is MisfitPolicy.NULLS else pa.schema([each.with_nullable(True) for each in SCHEMA])
        self.columns = Columns(schema, misfits=misfits) if way == "batches" else None

    def new_store(self, shard: Any) -> SqlShardStore:
        return SqlShardStore(self.database, ITEMS, LETTERS)

    def new_message(self, journal: Any) -> Any:
        return self.columns if self.way == "batches" else JsonLines()

    def consume_message(self, shard: Any, store: SqlShardStore, message: Any, publisher: Any) -> None:
        row = {name: value for name, value in message.message.items() if name != "_meta"}
        if self.way == "rows":
            store.insert(ITEMS, row)
        else:
            store.connection.execute(ITEMS.insert().values(**row))
        publisher.publish("out/one", {"id": row["id"]})

    def consume_batch(self, shard: Any, store: SqlShardStore, batch: Any, publisher: Any) -> None:
        store.insert_batch(ITEMS, batch.rows)
        for row in batch.rows.to_pylist():
            publisher.publish("out/one", {"id": row["id"]})

    def rows(self) -> list[tuple[Any, ...]]:
        with self.database.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(select(ITEMS).order_by(ITEMS.c.id))]


class Run:
    """A replica of a shard with the source `in/one`."""

    def __init__(self, app: Items, client: Any) -> None:
        self.host = Host()
        self.host.entropy = os.urandom
        spec = shard_spec("shard-items", ["in/one"])
        clock, metrics = SystemClock(), ConsumerMetrics()
        self.replica = ShardReplica(app, spec, client, self.host, clock=clock, metrics=metrics)

    async def through(self, head: int) -> bool:
        """Run until the shard has read to the offset, or fails. Return False if it has failed."""
        self.replica.start()
        self.replica.promote()
        async with asyncio.timeout(300):
            done = await self.replica.wait_read_through({"in/one": head})
        await self.replica.stop()
        return done


def message(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"n{number}", "price": number, **BAD.get(number, {})}


@pytest.fixture
async def written(journals: Any) -> dict[int, tuple[int, bytes]]:
    """Offsets and lines of bad messages, written among good ones in several transactions."""
    for first in range(0, 80, 20):
        await journals.publish("in/one", *(message(number) for number in range(first, first + 20)))
    content = journals.fake.journals["in/one"].content
    places, at = {}, 0
    lines = content.splitlines(keepends=True)
    numbers = iter(range(80))
    for line in lines:
        if b'"id"' in line:
            places[next(numbers)] = at, line[:-1]
        at += len(line)
    return {number: places[number] for number in BAD}


@pytest.mark.parametrize("way", ["rows", "statements", "batches"])
async def test_dead_letters_keep_rejected_messages_and_all_others_commit_once(
    store_url: str, journals: Any, client: Any, written: dict[int, tuple[int, bytes]], way: str
) -> None:
    app = Items(SqlStore(store_url), way, DeadLetters(table=LETTERS))
    assert await Run(app, client).through(journals.head("in/one"))
    assert [id for id, _, _ in app.rows()] == [number for number in range(80) if number not in BAD]
    assert [each["id"] for each in journals.committed("out/one")] == [n for n in range(80) if n not in BAD]
    with app.database.engine.connect() as connection:
        letters = connection.execute(select(LETTERS).order_by("offset")).all()
    assert [(row.journal, row.offset, bytes(row.line)) for row in letters] == [
        ("in/one", *written[number]) for number in sorted(BAD)
    ]


@pytest.mark.parametrize("way", ["rows", "statements", "batches"])
async def test_an_unpaired_surrogate_is_stored_the_same_way_by_all_applications(
    store_url: str, journals: Any, client: Any, way: str
) -> None:
    texts = [r"a\ud83d", r"\ud83d\ude00", r"\\ud83d", r"\ude00\ud83d", r"\uD83D\u0041"]
    lines = [f'{{"id":{number},"name":"{text}","price":1}}\n' for number, text in enumerate(texts)]
    await journals.fake.write("in/one", "".join(lines).encode())
    app = Items(SqlStore(store_url), way, MisfitPolicy.FAIL)
    assert await Run(app, client).through(journals.head("in/one"))
    assert [name for _, name, _ in app.rows()] == ["a?", "😀", "\\ud83d", "??", "?A"]


async def test_dead_letters_can_be_messages(store_url: str, journals: Any, client: Any, written: Any) -> None:
    app = Items(SqlStore(store_url), "rows", DeadLetters(journals=["in/two"]))
    assert await Run(app, client).through(journals.head("in/one"))
    dead = [(each["offset"], base64.b64decode(each["line"])) for each in journals.committed("in/two")]
    assert dead == [written[number] for number in sorted(BAD)]


@pytest.mark.parametrize("way", ["rows", "statements", "batches"])
async def test_by_default_the_shard_fails_and_names_the_offset_without_values(
    store_url: str, journals: Any, client: Any, written: Any, way: str
) -> None:
    app = Items(SqlStore(store_url), way, MisfitPolicy.FAIL)
    run = Run(app, client)
    with capture_logs() as logs:
        assert not await run.through(journals.head("in/one"))
    assert run.host.statuses[-1] == pc.ReplicaStatus.FAILED
    [failed] = [each for each in logs if each["event"] == "shard.failed"]
    assert failed["error"].startswith(f"journal in/one at offset {written[30][0]}: store ")
    assert "price_is_low" in failed["error"]
    assert "77777" not in repr(logs)
    assert [id for id, _, _ in app.rows()] == list(range(30)), "earlier messages commit"


async def test_nulls_replace_values_of_nullable_columns(store_url: str, journals: Any, client: Any) -> None:
    for number in range(5):
        await journals.publish("in/one", {**message(number), **({"price": 77777} if number == 3 else {})})
    app = Items(SqlStore(store_url), "batches", MisfitPolicy.NULLS)
    assert await Run(app, client).through(journals.head("in/one"))
    assert app.rows() == [(n, f"n{n}", None if n == 3 else n) for n in range(5)]

    await journals.publish("in/one", message(1))
    assert not await Run(app, client).through(journals.head("in/one")), "the key must not be null"


async def test_unsupported_policies_are_refused(store_url: str, journals: Any, client: Any, tmp_path: Any) -> None:
    await journals.publish("in/one", message(1))
    with capture_logs() as logs:
        nulls = Items(SqlStore(store_url), "rows", MisfitPolicy.NULLS)
        assert not await Run(nulls, client).through(journals.head("in/one"))
        listed = Items(SqlStore(store_url), "rows", DeadLetters(journals="name=in/two"))
        assert not await Run(listed, client).through(journals.head("in/one"))
    errors = [each["error"] for each in logs if each["event"] == "shard.failed"]
    assert "chooses nulls itself" in errors[0]
    assert "name the journals of dead letters in a list" in errors[1]


def test_a_rejected_dead_letter_ends_the_search() -> None:
    search, problem = RejectionSearch(), RejectedRow("too long")
    letter = Consumed("in/one", 7, DeadLetters(journals=["in/two"]))
    assert search.record_rejection(problem, 9, None) is problem
    assert search.may_continue()
    assert search.max_messages == 4
    search.completed()
    assert search.max_messages == 8
    assert search.record_rejection(problem, 1, letter).offset == 7
    assert search.may_continue()
    assert not search.may_continue(), "a rejected message is handled once"
    assert search.record_rejection(problem, 1, letter).offset == 7
    assert not search.may_continue()
    assert search.record_rejection(problem, 1, None) is problem
    assert not search.may_continue()
    for _ in range(20):
        search.completed()
    assert search.max_messages is None
