"""Windows of offsets with Spark: each message is in one window, the same one after any stop of a run."""

import os
import random
import time
from collections import Counter

import pytest
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, MetaData, String, Table, func, select

from coranto.client import SyncJournalClient
from coranto.errors import ConsumerChanged, CorruptData, CorruptMessage, Fenced, InvalidInput
from coranto.messages.checkpoints import Identity
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark import (
    Add,
    DeadLetters,
    Hooks,
    JournalOutput,
    MisfitPolicy,
    Outputs,
    SparkConsumer,
    SqlOutput,
    StagedSql,
    Step,
    TableOutput,
    dead_letter_table,
)
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.consumer.windows import WindowConsumer
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.staging import stage_tables
from coranto_consumers.stores.window_growth import grow
from coranto_consumers.stores.windows import shard_of
from tests.consumers.conftest import needs_mariadb
from tests.consumers.outages import ProxiedStore
from tests.sampling import sampled

ONE, TWO = SOURCES = ("w/events/one", "w/events/two")
SELECTOR = "name:prefix=w/events/"
BY_WINDOW = Table(
    "by_window",
    MetaData(),
    Column("coranto_window", BigInteger, primary_key=True, autoincrement=False),
    Column("carrier", String(20), primary_key=True),
    Column("flights", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
)
EACH = Table(
    "each_message",
    MetaData(),
    Column("coranto_window", BigInteger, nullable=False),
    Column("n", BigInteger, nullable=False),
)
LIVE = Table(
    "live",
    MetaData(),
    Column("carrier", String(20), primary_key=True),
    Column("flights", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
)


class Flights:
    """Count flights by carrier in one table, and list them in another."""

    name = "flights"
    sources = SELECTOR
    value_schema = "n BIGINT, carrier STRING"

    def __init__(self, table: Table = BY_WINDOW, *others: JournalOutput) -> None:
        self.table = table
        self.others = others

    def outputs(self, committed):
        counts = committed.groupBy("carrier").agg(F.count("*").alias("flights"), F.sum("n").alias("total"))
        tables = [TableOutput(self.table, counts, keys=["carrier"], merge={"flights": Add(), "total": Add()})]
        if self.table is BY_WINDOW:
            tables.append(TableOutput(EACH, committed.select("n")))
        return Outputs(tables=tables, journals=self.others)


class World:
    """Journals of six fragments each, with transactions that span them, a rollback, and duplicates."""

    def __init__(self, broker, folder) -> None:
        self.broker = broker
        self.folder = folder
        self.committed: list[dict] = []
        self._n = 0
        self._rng = random.Random(3)
        broker.create(*SOURCES)
        slow, bad = self.publisher(), self.publisher()
        for part in range(6):
            quick = self.publisher()
            self.add(quick, 12)
            self.add(slow, 3)
            if part < 4:
                self.add(bad, 2, good=False)
            for each in (quick, slow, bad):
                each.flush()
            if part == 3:
                bad.rollback()
            quick.commit()
            if part == 4:
                slow.commit()
                slow = self.publisher()
            lines = broker.content(ONE).splitlines(keepends=True)
            broker.write(ONE, lines[-1] + lines[max(0, len(lines) - 20)])
            self.roll()
        slow.commit()
        self.roll()

    def publisher(self) -> SyncPublisher:
        producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
        return SyncPublisher(self.broker.write, producer=producer, clock=clock, framing=JsonLines())

    def add(self, publisher: SyncPublisher, count: int, *, good: bool = True) -> None:
        for _ in range(count):
            self._n += 1
            row = {"n": self._n, "carrier": self._rng.choice(("AA", "B6", "UA"))}
            publisher.add(self._rng.choice(SOURCES), row)
            if good:
                self.committed.append(row)

    def roll(self) -> None:
        for journal in SOURCES:
            self.broker.fake.journals[journal].roll(self.folder)

    def totals(self) -> list[tuple[str, int, int]]:
        flights = Counter(row["carrier"] for row in self.committed)
        return [
            (carrier, count, sum(row["n"] for row in self.committed if row["carrier"] == carrier))
            for carrier, count in sorted(flights.items())
        ]


@pytest.fixture
def world(broker, tmp_path) -> World:
    return World(broker, tmp_path / "fragments")


@pytest.fixture
def sqlite_url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


def consumer(spark, world, store_url, application=None, hooks=None, **options) -> WindowConsumer:
    return WindowConsumer(
        application or Flights(),
        world.broker.config,
        store_url,
        spark,
        ConsumerOptions(**options),
        name="by-window",
        hooks=hooks,
    )


def grown(made: WindowConsumer, world: World, **options) -> list[str]:
    with SyncJournalClient.of(world.broker.config) as client:
        return [each.window.name for each in grow(made.log, client, [SELECTOR], **{"partial": True, **options})]


def rows_of(store_url: str, table: Table) -> list[tuple]:
    with SqlStore(store_url).engine.connect() as connection:
        return sorted(tuple(row) for row in connection.execute(select(table)))


def check(store_url: str, world: World) -> None:
    """Check that all windows together have every committed message once, and that nothing is left staged."""
    with SqlStore(store_url).engine.connect() as connection:
        sums = select(BY_WINDOW.c.carrier, func.sum(BY_WINDOW.c.flights), func.sum(BY_WINDOW.c.total))
        found = connection.execute(sums.group_by(BY_WINDOW.c.carrier).order_by(BY_WINDOW.c.carrier))
        assert [(row[0], int(row[1]), int(row[2])) for row in found] == world.totals()
        for stage in stage_tables(SqlStore(store_url), connection):
            assert connection.execute(select(func.count()).select_from(stage)).scalar_one() == 0
    assert sorted(n for _, n in rows_of(store_url, EACH)) == sorted(row["n"] for row in world.committed)


@pytest.mark.parametrize("in_order_too", sampled([False, True], 2))
def test_repeated_windows_in_any_order_have_each_message_once_next_to_a_live_consumer(
    spark, world, sqlite_url, tmp_path, in_order_too
):
    made = consumer(spark, world, sqlite_url)
    names = grown(made, world, window_bytes=3_000)
    assert len(names) >= 4
    assert made.materialize(names[-1]).messages > 0, "the windows before are read to find its producers"
    live = SparkConsumer(Flights(LIVE), world.broker.config, sqlite_url, spark)
    live.run_until_caught_up()
    for name in reversed(names[:-1]):
        made.materialize(name)
    check(sqlite_url, world)
    assert rows_of(sqlite_url, LIVE) == world.totals()
    before = rows_of(sqlite_url, EACH)

    for name in (names[2], names[0]):
        assert made.materialize(name).fence == 2
    assert rows_of(sqlite_url, EACH) == before, "the same bytes each time"
    assert rows_of(sqlite_url, LIVE) == world.totals()

    if not in_order_too:
        return
    other = f"sqlite:///{tmp_path}/other.db"
    in_order = consumer(spark, world, other)
    assert grown(in_order, world, window_bytes=3_000) == names
    for name in names:
        in_order.materialize(name)
    assert rows_of(other, EACH) == before, "in any order"


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_merged_window_replaces_the_rows_of_its_parts(spark, world, store_url):
    made = consumer(spark, world, store_url)
    names = grown(made, world, window_bytes=3_000)
    for name in names:
        made.materialize(name)
    merged = grown(made, world, max_windows=2)
    assert merged[0].startswith("00000001-")
    assert len(merged) == 2
    check(store_url, world)
    report = made.materialize(names[0])
    assert report.window.name == merged[0], "its name refers to the larger one"
    check(store_url, world)
    made.materialize(merged[1])
    check(store_url, world)
    assert {number for number, _ in rows_of(store_url, EACH)} == {report.window.first, report.window.last + 1}


class Crash(Exception):
    pass


class Interrupted(Hooks):
    def __init__(self, step: Step, what) -> None:
        self.step = step
        self.what = what

    def on_step(self, step: Step) -> None:
        if step is self.step:
            self.what()


def crash() -> None:
    raise Crash


def test_a_crash_at_any_step_loses_and_duplicates_nothing(spark, world, sqlite_url):
    (name,) = grown(consumer(spark, world, sqlite_url), world)
    for step in (Step.FENCED, Step.PLANNED, Step.SEQUENCED, Step.STAGED, Step.MERGED, Step.COMMITTED):
        with pytest.raises(Crash):
            consumer(spark, world, sqlite_url, hooks=Interrupted(step, crash)).materialize(name)
    check_staged = consumer(spark, world, sqlite_url)
    check_staged.materialize(name)
    check(sqlite_url, world)


@pytest.mark.parametrize(
    "step", sampled([Step.STAGED, None, Step.FENCED, Step.PLANNED, Step.SEQUENCED, Step.MERGED], 6)
)
def test_a_window_waits_for_its_store(step, spark, world, postgres):
    url = postgres.new_database()
    (name,) = grown(consumer(spark, world, url), world)
    with ProxiedStore(url) as proxied:

        class Waiting(Interrupted):
            def pause(self, seconds: float) -> None:
                proxied.outage.wait(seconds)

        if step is None:
            proxied.outage.begin()
        report = consumer(spark, world, proxied.url, hooks=Waiting(step, proxied.outage.begin)).materialize(name)
    assert len(proxied.outage.waits) == 3
    assert report.fence == 1
    check(url, world)


def test_a_run_overtaken_by_another_or_by_a_merge_commits_nothing(spark, world, sqlite_url):
    made = consumer(spark, world, sqlite_url)
    names = grown(made, world, window_bytes=3_000)
    for name in names:
        made.materialize(name)

    overtaken = Interrupted(Step.STAGED, lambda: made.materialize(names[0]))
    with pytest.raises(Fenced, match=f"another run of window {names[0]} of by-window started after this one"):
        consumer(spark, world, sqlite_url, hooks=overtaken).materialize(names[0])
    merging = Interrupted(Step.STAGED, lambda: grown(made, world, max_windows=2))
    with pytest.raises(Fenced, match="was merged into 00000001-"):
        consumer(spark, world, sqlite_url, hooks=merging).materialize(names[0])
    made.materialize(names[0])
    check(sqlite_url, world)


def test_outputs_that_cannot_be_replaced_by_window_are_refused(spark, world, sqlite_url):
    (name,) = grown(consumer(spark, world, sqlite_url), world)
    with pytest.raises(InvalidInput, match="has no column coranto_window"):
        consumer(spark, world, sqlite_url, Flights(LIVE)).materialize(name)
    journals = JournalOutput(spark.range(0), SELECTOR)
    with pytest.raises(InvalidInput, match="cannot publish"):
        consumer(spark, world, sqlite_url, Flights(BY_WINDOW, journals)).materialize(name)
    by_sql = Flights()
    copied = StagedSql(EACH, ["INSERT INTO {each_message} SELECT * FROM {stage} AS s"], [EACH])
    by_sql.outputs = lambda committed: Outputs(sql=[SqlOutput(copied, committed)])
    with pytest.raises(InvalidInput, match="cannot write by SQL of its own"):
        consumer(spark, world, sqlite_url, by_sql).materialize(name)
    world.broker.create(ONE)
    with pytest.raises(CorruptData, match="deleted and created again"):
        consumer(spark, world, sqlite_url).materialize(name)


class ProjectKeys(Flights):
    """Another application, which lists flights in one table only and may have other sources."""

    def __init__(self, sources: str = SELECTOR) -> None:
        super().__init__()
        self.sources = sources

    def outputs(self, committed):
        return Outputs([TableOutput(EACH, committed.select("n"))])


def refused(made: WindowConsumer, name: str) -> tuple[str, str]:
    """Return the error's text, and the code in it."""
    with pytest.raises(ConsumerChanged) as raised:
        made.materialize(name)
    return str(raised.value), str(raised.value).partition("accept_changes='")[2].partition("'")[0]


@pytest.mark.parametrize(
    "store_url",
    [
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.exhaustive),
        pytest.param("mariadb", marks=[needs_mariadb, pytest.mark.exhaustive]),
    ],
    indirect=True,
)
def test_another_application_of_the_same_name_is_refused_until_it_is_confirmed(spark, world, store_url):
    made = consumer(spark, world, store_url)
    first, second, *_ = grown(made, world, window_bytes=3_000)
    made.materialize(first)
    before = rows_of(store_url, BY_WINDOW), rows_of(store_url, EACH)
    for name in (first, second):
        text, code = refused(consumer(spark, world, store_url, ProjectKeys()), name)
        assert "table by_window gets nothing any more" in text
    text, _ = refused(consumer(spark, world, store_url, ProjectKeys(f"name={TWO}")), second)
    assert f"sources: recorded {SELECTOR}, now name={TWO}; the rest of {ONE} from" in text
    assert (rows_of(store_url, BY_WINDOW), rows_of(store_url, EACH)) == before
    store = SqlStore(store_url)
    assert made.log.identity() == Identity(
        SELECTOR, frozenset({"table by_window", "table each_message"}), store=store.location
    )
    consumer(spark, world, store_url).materialize(second)

    consumer(spark, world, store_url, ProjectKeys(), accept_changes=code).materialize(first)
    consumer(spark, world, store_url, ProjectKeys()).materialize(second)
    assert made.log.identity().sometimes == {"table by_window"}


def test_another_selector_is_refused_before_a_run_of_the_window_is_fenced_off(spark, world, sqlite_url):
    made = consumer(spark, world, sqlite_url)
    (name,) = grown(made, world)
    fence = made.materialize(name).fence
    other = Flights()
    other.sources = f"name={ONE}"
    _, code = refused(consumer(spark, world, sqlite_url, other), name)
    restored = SqlStore(sqlite_url).read(shard_of("by-window", made.log.load()[0].window))
    assert restored.fence == fence
    assert consumer(spark, world, sqlite_url, other, accept_changes=code).materialize(name).fence == fence + 1
    assert made.log.identity().sources == f"name={ONE}"
    refused(made, name)


class Counts(Flights):
    """Count flights only, so that any number fits."""

    value_schema = "carrier STRING"

    def outputs(self, committed):
        return super().outputs(committed.withColumn("n", F.lit(0)))


def test_dead_letters_of_a_window_are_replaced_with_its_rows(spark, world, sqlite_url):
    line, offset = b'{"n":"many","carrier":"AA"}', world.broker.head(ONE)
    world.broker.write(ONE, line + b"\n")
    world.roll()
    (name,) = grown(consumer(spark, world, sqlite_url), world)
    with pytest.raises(CorruptMessage, match="does not fit"):
        consumer(spark, world, sqlite_url).materialize(name)
    dead = dead_letter_table("dead", by_window=True)
    keeping = DeadLetters(table=dead)

    for _ in range(2):
        report = consumer(spark, world, sqlite_url, misfits=keeping).materialize(name)
        assert (report.messages, report.misfits) == (len(world.committed), 1)
        assert rows_of(sqlite_url, dead) == [(ONE, offset, line, 1)]
        check(sqlite_url, world)

    nulls = consumer(spark, world, sqlite_url, Counts(), misfits=MisfitPolicy.NULLS).materialize(name)
    assert (nulls.messages, nulls.misfits) == (len(world.committed) + 1, 0)
    consumer(spark, world, sqlite_url, Counts(), misfits=keeping).materialize(name)
    assert rows_of(sqlite_url, dead) == [], "messages that fit now are not dead letters any more"


def test_dead_letter_outputs_that_cannot_be_replaced_by_window_are_refused(spark, world, sqlite_url):
    for misfits in (DeadLetters(journals=SELECTOR), DeadLetters(table=dead_letter_table("dead"))):
        with pytest.raises(InvalidInput, match="misfits: dead letters of a window are replaced"):
            consumer(spark, world, sqlite_url, misfits=misfits)
