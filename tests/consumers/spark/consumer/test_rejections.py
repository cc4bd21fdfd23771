"""Rows that the database rejects: the error names the message, or it gets nulls or becomes a dead letter."""

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
    make_url,
    select,
    text,
)
from structlog.testing import capture_logs

from coranto.client import SyncJournalClient
from coranto.errors import CorruptMessage, InvalidInput, RejectedRow
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
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.consumer.windows import WindowConsumer
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.window_growth import grow
from tests.sampling import sampled

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
ALL = BAD_IN_POSTGRESQL.keys()
FEW = {"null", "unique", "a late time", "NUL"}
"""Kinds that the database rejects alone and among other rows, and one that a task cannot write."""


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

    def __init__(self, broker, url, kinds=ALL) -> None:
        """`kinds` are the kinds of bad messages. Finding each one takes many Spark jobs."""
        self.url = url
        self.good: list[int] = []
        self.bad: dict[str, tuple[int, bytes]] = {}
        self._broker = broker
        broker.create(SOURCE, DEAD, COPIES)
        bad = BAD if url.startswith("sqlite") else BAD_IN_POSTGRESQL
        bad = {kind: fields for kind, fields in bad.items() if kind in kinds}
        self._publish({**GOOD, "id": 1})
        for number, (kind, fields) in enumerate(bad.items()):
            for _ in range(3 if kinds is ALL else 1):
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


ALL_KINDS = [
    pytest.param(f"{kind} all", marks=[pytest.mark.exhaustive, pytest.mark.integration])
    for kind in ("sqlite", "postgresql")
]
"""Worlds with messages of all kinds, for `make test-all`."""
BOTH_DATABASES = pytest.mark.parametrize("world", ["sqlite", "postgresql", *ALL_KINDS], indirect=True)


def world_of(param: str, new_store, broker, few=FEW) -> World:
    """Return a world with the kinds in `few`, or with all."""
    database, _, kinds = param.partition(" ")
    return World(broker, new_store(database), ALL if kinds else few)


@pytest.fixture(params=["sqlite", *ALL_KINDS])
def world(request, new_store, broker) -> World:
    return world_of(request.param, new_store, broker)


@pytest.fixture
def run(spark, broker, world):
    def start(application=None, **options):
        consumer = SparkConsumer(application or Orders(), broker.config, world.url, spark, ConsumerOptions(**options))
        return consumer.run_until_caught_up()

    return start


def all_texts(error, caplog, logs, capfd) -> str:
    """Return the texts of an error with its traceback, of the logs, and of standard output and error."""
    shown = io.StringIO()
    traceback.print_exception(error, file=shown)
    return shown.getvalue() + caplog.text + repr(logs) + "".join(capfd.readouterr())


def test_by_default_the_error_names_the_first_rejected_message_without_values(world, run, caplog, capfd):
    offset = min(at for at, _ in world.bad.values())
    with caplog.at_level(logging.DEBUG), capture_logs() as logs, pytest.raises(RejectedRow) as caught:
        run()
    assert (caught.value.journal, caught.value.offset) == (SOURCE, offset)
    assert f"journal {SOURCE} at offset {offset}: store " in str(caught.value)
    texts = all_texts(caught.value, caplog, logs, capfd)
    assert "SECRET" not in texts
    assert "77777" not in texts
    assert world.rows("at") == []


@BOTH_DATABASES
@pytest.mark.parametrize("keys", sampled([(), ("at",)], 2))
def test_dead_letters_keep_rejected_messages_in_the_same_transaction(world, run, keys):
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


def test_nulls_replace_rejected_values_of_nullable_columns(world, run, broker, new_store):
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
            assert sum(value is None for value in values) == 2, "the place, and the rejected value"
    assert whole >= set(world.good)
    assert report.misfits == len(world.bad) - 2


@pytest.mark.exhaustive
def test_rejected_rows_of_large_inputs_written_in_one_job_are_handled(new_store, broker, spark):
    world = World(broker, new_store("postgresql"))
    filler = b"".join(json.dumps({**GOOD, "id": 10_000 + n}).encode() + b"\n" for n in range(20_000))
    broker.write(SOURCE, filler)
    report = SparkConsumer(
        Orders(), broker.config, world.url, spark, ConsumerOptions(misfits=DeadLetters(table=LETTERS))
    ).run_until_caught_up()
    assert report.messages == len(world.good) + 20_000
    assert report.misfits == len(world.bad)
    assert len(world.rows("at")) == len(world.good) + 20_000


class Required:
    """Columns that messages must have."""

    name = "required"
    sources = f"name={SOURCE}"
    value_schema = "id BIGINT NOT NULL, name STRING"

    def outputs(self, committed):
        return Outputs(tables=[TableOutput(ORDERS, committed.selectExpr("_offset AS at", "id", "name"))])


def test_a_message_without_a_required_column_is_a_misfit(new_store, broker, spark):
    url, lines = new_store("sqlite"), [b'{"id":1,"name":"a"}', b'{"name":"b"}', b'{"id":null}', b'{"id":2}']
    broker.create(SOURCE)
    broker.write(SOURCE, b"\n".join(lines) + b"\n")
    lacking = [20, 33]
    SqlStore(url).create_tables(PLACES)

    def run(misfits):
        return SparkConsumer(
            Required(), broker.config, url, spark, ConsumerOptions(misfits=misfits)
        ).run_until_caught_up()

    for misfits in (MisfitPolicy.FAIL, MisfitPolicy.NULLS):
        with pytest.raises(CorruptMessage, match=r"does not fit the columns id bigint NOT NULL, name string") as caught:
            run(misfits)
        assert caught.value.offset == lacking[0]
    report = run(DeadLetters(table=LETTERS))
    assert (report.messages, report.misfits) == (2, 2)
    with SqlStore(url).engine.connect() as connection:
        assert list(connection.execute(select(LETTERS.c.offset).order_by("offset")).scalars()) == lacking
        assert list(connection.execute(select(ORDERS.c.id).order_by("id")).scalars()) == [1, 2]


def test_a_consumer_with_unsuitable_tables_does_not_fence_off_another(new_store, broker, spark):
    url = new_store("postgresql")
    broker.create(SOURCE)
    broker.write(SOURCE, json.dumps(GOOD).encode() + b"\n")
    store = SqlStore(url)
    fence, _ = store.raise_fence("orders")
    with store.engine.begin() as connection:
        connection.execute(text("CREATE TABLE places (id BIGINT PRIMARY KEY)"))
        connection.execute(
            text(
                "CREATE TABLE orders (at BIGINT PRIMARY KEY, id INTEGER, name VARCHAR(8), price NUMERIC(5, 2), "
                "place BIGINT, region TEXT NOT NULL)"
            )
        )
    for session in (spark, lambda: spark):
        with pytest.raises(InvalidInput, match="table orders: does not fit its definition in the database") as caught:
            SparkConsumer(Orders(), broker.config, url, session).run_until_caught_up()
        for problem in (
            "it has no column 'due': ALTER TABLE orders ADD COLUMN due TIMESTAMP",
            "column 'id' is INTEGER, and longer values are written there as BIGINT",
            r"column 'name' is VARCHAR(8), and longer values are written there as VARCHAR(12)",
            "column 'price' is NUMERIC(5, 2), and longer values",
            "column 'region' must not be null",
        ):
            assert problem in str(caught.value)
    found = store.read("orders")
    assert found is not None
    assert found.fence == fence


def test_missing_privileges_are_reported_before_the_fence_is_raised(new_store, broker, spark):
    url = new_store("postgresql")
    broker.create(SOURCE)
    broker.write(SOURCE, json.dumps(GOOD).encode() + b"\n")
    store = SqlStore(url)
    store.create_tables(PLACES, ORDERS)
    with store.engine.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS clerk"))
        connection.execute(text("CREATE ROLE clerk LOGIN PASSWORD 'secret'"))
        connection.execute(text("GRANT SELECT, INSERT, UPDATE ON gazette_checkpoints TO clerk"))
    mine = make_url(url).set(username="clerk").render_as_string(hide_password=False)

    def run(keys=()):
        return SparkConsumer(Orders(keys=keys), broker.config, mine, spark).run_until_caught_up()

    with pytest.raises(InvalidInput, match=r"clerk may not create one of the tables .*coranto_stage_.*GRANT CREATE ON"):
        run()
    with store.engine.begin() as connection:
        connection.execute(text("GRANT CREATE ON SCHEMA public TO clerk"))
    with pytest.raises(InvalidInput, match=r"table orders: .*clerk may not read and write it .*GRANT SELECT, INSERT"):
        run()
    assert store.read("orders") is None
    with store.engine.begin() as connection:
        connection.execute(text("GRANT SELECT, INSERT, UPDATE, DELETE ON orders TO clerk"))
        connection.execute(text(f"REVOKE TEMPORARY ON DATABASE {make_url(url).database} FROM PUBLIC"))
    with pytest.raises(InvalidInput, match="GRANT TEMPORARY ON DATABASE"):
        run(keys=("at",))
    assert run().messages == 1


def test_an_application_that_fails_without_messages_skips_the_comparison(new_store, broker, spark):
    url = new_store("sqlite")
    broker.create(SOURCE)
    broker.write(SOURCE, json.dumps(GOOD).encode() + b"\n")
    needy = Orders()
    whole = needy.outputs

    def outputs(committed):
        committed.first().asDict()
        return whole(committed)

    needy.outputs = outputs
    SqlStore(url).create_tables(PLACES)
    assert SparkConsumer(needy, broker.config, url, spark).run_until_caught_up().messages == 1


def test_windows_treat_rejected_rows_as_consumers_do(new_store, broker, spark, tmp_path):
    url = new_store("postgresql")
    numbers = Table(
        "numbers_by_window",
        MetaData(),
        Column("coranto_window", BigInteger, nullable=False),
        Column("n", BigInteger, CheckConstraint("n < 100", name="n_is_small")),
    )
    letters = dead_letter_table("letters_by_window", by_window=True)

    class Numbers:
        name = "numbers"
        sources = f"name={SOURCE}"
        value_schema = "n BIGINT"

        def outputs(self, committed):
            return Outputs(tables=[TableOutput(numbers, committed.select("n"))])

    broker.create(SOURCE)
    broker.write(SOURCE, b"".join(b'{"n":%d}\n' % n for n in (1, 7777, 3)))
    broker.fake.journals[SOURCE].roll(tmp_path / "fragments")

    def materialize(misfits):
        consumer = WindowConsumer(Numbers(), broker.config, url, spark, ConsumerOptions(misfits=misfits))
        with SyncJournalClient.of(broker.config) as client:
            [known] = grow(consumer.log, client, [Numbers.sources], partial=True)
        return consumer.materialize(known.window.name)

    with pytest.raises(RejectedRow, match=f"journal {SOURCE} at offset 8: .*n_is_small"):
        materialize(MisfitPolicy.FAIL)
    for _ in range(2):
        report = materialize(DeadLetters(table=letters))
        assert (report.messages, report.misfits) == (2, 1)
    with SqlStore(url).engine.connect() as connection:
        assert sorted(connection.execute(select(numbers.c.n)).scalars()) == [1, 3]
        assert connection.execute(select(letters.c.offset, letters.c.line)).all() == [(8, b'{"n":7777}')]


def test_an_unpaired_surrogate_is_stored_as_shards_store_it(new_store, broker, spark):
    broker.create(SOURCE)
    texts = [r"a\ud83d", r"\ud83d\ude00", r"\\ud83d", r"\ude00\ud83d", r"\uD83D\u0041"]
    lines = [f'{{"id":{number},"name":"{text}"}}\n' for number, text in enumerate(texts)]
    for kind in ("sqlite", "postgresql"):
        url = new_store(kind)
        SqlStore(url).create_tables(PLACES)
        if kind == "sqlite":
            broker.write(SOURCE, "".join(lines).encode())
        SparkConsumer(Required(), broker.config, url, spark).run_until_caught_up()
        with SqlStore(url).engine.connect() as connection:
            found = list(connection.execute(select(ORDERS.c.name).order_by("id")).scalars())
        assert found == ["a?", "😀", "\\ud83d", "??", "?A"]
