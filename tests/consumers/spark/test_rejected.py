"""Rows that the database rejects: the message is named, gets nulls, or becomes a dead letter, and all others commit."""

import base64
import io
import json
import logging
import os
import time
import traceback

import pytest
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    MetaData,
    Numeric,
    String,
    Table,
    select,
)
from structlog.testing import capture_logs

from coranto.errors import RejectedRow
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark import (
    DeadLetters,
    JournalOutput,
    MisfitPolicy,
    Outputs,
    Replace,
    SparkConsumer,
    TableOutput,
    dead_letter_table,
)
from coranto_consumers.stores import SqlStore

pytestmark = pytest.mark.integration

SOURCE, DEAD, COPIES = "rejected/source", "rejected/dead", "rejected/copies"
METADATA = MetaData()
PLACES = Table("places", METADATA, Column("id", BigInteger, primary_key=True, autoincrement=False))
ORDERS = Table(
    "orders",
    METADATA,
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("id", BigInteger, nullable=False, unique=True),
    Column("name", String(12)),
    Column("price", Numeric(6, 2)),
    Column("place", BigInteger, ForeignKey("places.id")),
    Column("due", DateTime),
    CheckConstraint("price >= 0", name="price_is_no_debt"),
)
LETTERS = dead_letter_table("letters")
GOOD = {"id": 0, "name": "good", "price": 1.25, "place": None, "due": "2024-02-29T12:00:00"}
BAD = {
    "null": {"id": None},
    "unique": {"id": 1},
    "check": {"price": -55.5},
    "foreign key": {"place": 77777},
    "a late time": {"due": "+12024-02-29T12:00:00"},
}
BAD_IN_POSTGRESQL = {
    **BAD,
    "NUL": {"name": "SECRET\0"},
    "too long": {"name": "SECRET-VALUE-TOO-LONG"},
    "overflow": {"price": 99999.99},
}


class Orders:
    name = "orders"
    sources = f"name={SOURCE}"
    value_schema = "id BIGINT, name STRING, price DECIMAL(12, 2), place BIGINT, due TIMESTAMP_NTZ"

    def __init__(self, *, copies=False, keys=()):
        self._copies, self._keys = copies, keys

    def outputs(self, committed):
        rows = committed.selectExpr("_offset AS at", "id", "name", "price", "place", "due")
        merge = {name: Replace() for name in ("id", "name", "price", "place", "due")} if self._keys else {}
        copies = committed.selectExpr("struct(id, name) AS value")
        return Outputs(
            tables=[TableOutput(ORDERS, rows, keys=self._keys, merge=merge)],
            journals=[JournalOutput(copies, [COPIES])] if self._copies else [],
        )


class World:
    """A source with good messages, and bad ones between them."""

    def __init__(self, broker, url) -> None:
        self.url = url
        self.good: list[int] = []
        self.bad: dict[str, tuple[int, bytes]] = {}
        self._broker = broker
        broker.create(SOURCE, DEAD, COPIES)
        bad = BAD if url.startswith("sqlite") else BAD_IN_POSTGRESQL
        self._publish({**GOOD, "id": 1})
        for number, (kind, fields) in enumerate(bad.items()):
            for _ in range(3):
                self._publish({**GOOD, "id": 100 + len(self.good)})
            before = broker.head(SOURCE)
            self._publish({**GOOD, "id": 1000 + number, **fields}, good=False)
            self.bad[kind] = before, broker.content(SOURCE)[before:-1]
        self._publish({**GOOD, "id": 99})
        store = SqlStore(url)
        store.create_tables(PLACES)
        with store.engine.begin() as connection:
            connection.execute(PLACES.insert(), [{"id": 5}])

    def _publish(self, message, *, good=True) -> None:
        if good:
            self.good.append(self._broker.head(SOURCE))
        producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
        publisher = SyncPublisher(self._broker.write, producer=producer, clock=clock, framing=JsonLines())
        publisher.publish(SOURCE, message)
        publisher.flush()

    def rows(self, *columns):
        with SqlStore(self.url).engine.connect() as connection:
            return [
                tuple(row) for row in connection.execute(select(*(ORDERS.c[name] for name in columns)).order_by("at"))
            ]


@pytest.fixture(params=["sqlite", "postgresql"])
def world(request, new_store, broker) -> World:
    return World(broker, new_store(request.param))


@pytest.fixture
def run(spark, broker, world):
    def start(application=None, **options):
        return SparkConsumer(application or Orders(), broker.config, world.url, spark, **options).run_until_caught_up()

    return start


def test_by_default_the_first_rejected_message_is_named_and_no_value_is(world, run, caplog, capfd):
    offset = min(at for at, _ in world.bad.values())
    with caplog.at_level(logging.DEBUG), capture_logs() as logs, pytest.raises(RejectedRow) as caught:
        run()
    assert (caught.value.journal, caught.value.offset) == (SOURCE, offset)
    assert f"journal {SOURCE} at offset {offset}: store " in str(caught.value)
    shown = io.StringIO()
    traceback.print_exception(caught.value, file=shown)
    said = shown.getvalue() + caplog.text + repr(logs) + "".join(capfd.readouterr())
    assert "SECRET" not in said
    assert "77777" not in said
    assert world.rows("at") == []


@pytest.mark.parametrize("keys", [(), ("at",)])
def test_dead_letters_keep_what_the_database_rejects_in_the_same_transaction(world, run, keys):
    report = run(Orders(keys=keys), misfits=DeadLetters(table=LETTERS))
    assert world.rows("at") == [(at,) for at in world.good]
    with SqlStore(world.url).engine.connect() as connection:
        letters = connection.execute(select(LETTERS).order_by("offset")).all()
    assert [(row.journal, row.offset, bytes(row.line)) for row in letters] == [
        (SOURCE, *letter) for letter in world.bad.values()
    ]
    assert (report.messages, report.misfits, report.transactions) == (len(world.good), len(world.bad), 1)
    assert run(misfits=DeadLetters(table=LETTERS)).transactions == 0


def test_dead_letters_in_journals_and_messages_of_the_application_are_published_once(world, run, broker, spark):
    run(Orders(copies=True), misfits=DeadLetters(journals=[DEAD]))
    committed = spark.read.format("journal").options(endpoint=broker.endpoint, isolation="read_committed")
    dead = [json.loads(row.value) for row in committed.option("subscribe", DEAD).load().collect()]
    assert sorted((each["offset"], base64.b64decode(each["line"])) for each in dead) == list(world.bad.values())
    assert committed.option("subscribe", COPIES).load().count() == len(world.good)


def test_nulls_replace_what_the_database_rejects_where_it_may_be_null(world, run, broker, new_store):
    with pytest.raises(RejectedRow) as caught:
        run(misfits=MisfitPolicy.NULLS)
    assert caught.value.offset == world.bad["null"][0], "the id must not be null"
    assert world.rows("at") == []

    nullable = Orders()
    nullable.outputs = lambda committed: Outputs(
        tables=[
            TableOutput(ORDERS, committed.selectExpr("_offset AS at", "_offset AS id", "name", "price", "place", "due"))
        ]
    )
    report = run(nullable, misfits=MisfitPolicy.NULLS)
    found = {at: values for at, *values in world.rows("at", "name", "price", "place", "due")}
    assert len(found) == len(world.good) + len(world.bad)
    whole = {at for at, (name, price, _, due) in found.items() if None not in (name, price, due)}
    nulled = {"check": 1, "a late time": 3, "NUL": 0, "too long": 0, "overflow": 1}
    for kind, place in nulled.items():
        if kind in world.bad:
            values = found[world.bad[kind][0]]
            assert values[place] is None
            assert sum(value is None for value in values) == 2, "the place, and what was rejected"
    assert whole >= set(world.good)
    assert report.misfits == len(world.bad) - 2


def test_large_inputs_that_are_written_in_one_job_are_settled_too(new_store, broker, spark):
    world = World(broker, new_store("postgresql"))
    filler = b"".join(json.dumps({**GOOD, "id": 10_000 + n}).encode() + b"\n" for n in range(20_000))
    broker.write(SOURCE, filler)
    report = SparkConsumer(
        Orders(), broker.config, world.url, spark, misfits=DeadLetters(table=LETTERS)
    ).run_until_caught_up()
    assert report.messages == len(world.good) + 20_000
    assert report.misfits == len(world.bad)
    assert len(world.rows("at")) == len(world.good) + 20_000
