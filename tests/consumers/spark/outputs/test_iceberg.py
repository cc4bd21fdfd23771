"""Iceberg tables as the store of a Spark consumer: exact after crashes at any step, outages and zombies."""

from pathlib import Path

import duckdb
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.types import StringType
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, Date, MetaData, Table

from coranto.errors import Fenced, InvalidInput
from coranto_consumers.spark import Hooks, IcebergStore, Outputs, Replace, SparkConsumer, Step, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.inputs import strategies
from coranto_consumers.spark.outputs import iceberg as spark_iceberg
from coranto_consumers.stores.iceberg.state import state_of
from coranto_consumers.stores.iceberg.tables import find_or_create
from tests.consumers.spark.consumer.test_consumer import (
    LOG,
    SOURCES,
    TOTALS,
    Crash,
    CrashAt,
    Delays,
    LoggedDelays,
    World,
)
from tests.consumers.stores.iceberg.rest_server import carried_out, lost, rest_server
from tests.sampling import sampled

HOME = "lake.totals"
TABLES = (HOME, "lake.log")


class DelaysAndLog(Delays):
    """Also keep the numbers of all messages in a table without keys."""

    def outputs(self, committed):
        made = super().outputs(committed)
        return Outputs([*made.tables, TableOutput(LOG, committed.select("n"))], made.journals)


class Lake:
    """A warehouse in a folder, and its catalog. Each driver has its own catalog object, like a process."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.catalogs: list[SqlCatalog] = []

    def store(self) -> IcebergStore:
        self.catalogs.append(SqlCatalog("lake", uri=self.url, warehouse=f"file://{self.folder}"))
        # The tests' server never syncs, for speed.
        return IcebergStore(self.catalogs[-1], TOTALS, namespace="lake", relaxed_durability=True)

    def files(self, name: str) -> list[str]:
        """Return the paths of the files of a table's current snapshot."""
        table = self.catalogs[0].load_table(name)
        return [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]

    def rows(self, name: str, order: str) -> list[tuple]:
        """Return a table's rows, read by DuckDB from the files of its current snapshot."""
        names = ", ".join(self.catalogs[0].load_table(name).schema().column_names)
        with duckdb.connect() as connection:
            connection.execute(f"SELECT {names} FROM read_parquet(?) ORDER BY {order}", [self.files(name)])
            return connection.fetchall()

    def check(self, world: World, spark) -> None:
        """Check that tables and alerts exactly match the committed messages, and that no other file is left."""
        assert self.rows(HOME, "carrier") == world.totals()
        assert self.rows("lake.log", "n") == sorted((row["n"],) for row in world.committed)
        world.check_alerts()
        assert spark.read.parquet(*self.files("lake.log")).count() == len(world.committed)
        named = {file for name in TABLES for file in self.files(name)}
        left = {str(path) for path in self.folder.rglob("*.parquet")} - named
        history = {
            entry["file_path"].removeprefix("file://")
            for name in TABLES
            for entry in self.catalogs[0].load_table(name).inspect.all_data_files().to_pylist()
        }
        assert left <= history, "files that no snapshot names are swept"

    def close(self) -> None:
        for catalog in self.catalogs:
            catalog.engine.dispose()


@pytest.fixture
def lake(new_store, tmp_path):
    lake = Lake(new_store("sqlite"), tmp_path)
    yield lake
    lake.close()


@pytest.fixture
def world(broker) -> World:
    return World(broker)


def run(spark, world, store, hooks=None, **limits):
    options = ConsumerOptions(**limits)
    consumer = SparkConsumer(DelaysAndLog(), world.broker.config, store, spark, options, hooks=hooks)
    return consumer.run_until_caught_up()


def test_a_run_commits_two_tables_and_the_checkpoint_together(spark, world, new_store, tmp_path, monkeypatch):
    """With a catalog on PostgreSQL; the other tests have one on SQLite."""
    url = new_store("postgresql").partition("?")[0].replace("postgresql://", "postgresql+psycopg://")
    lake = Lake(url, tmp_path)
    for _ in range(2):
        world.publish(30)
    first = run(spark, world, lake.store(), max_transaction_bytes=4_000)
    assert (first.transactions > 1, first.messages, first.fence) == (True, len(world.committed), 1)
    lake.check(world, spark)
    # Tasks write all rows from here on.
    monkeypatch.setattr(spark_iceberg, "CARRIED_TO_APPEND", 0)
    monkeypatch.setattr(spark_iceberg, "CARRIED_TO_MERGE", 0)
    world.publish(30)
    store = lake.store()
    assert run(spark, world, store).fence == 2
    lake.check(world, spark)
    state = state_of(lake.catalogs[0].load_table(HOME), "delays")
    assert {journal: each.read_through for journal, each in state.checkpoint.sources.items()} == {
        journal: world.broker.head(journal) for journal in state.checkpoint.sources
    }
    lake.close()


def test_a_table_that_cannot_take_the_rows_is_refused_before_the_fence(spark, world, lake):
    store = lake.store()
    table = find_or_create(lake.catalogs[-1], HOME, TOTALS)
    with table.update_schema(allow_incompatible_changes=True) as change:
        change.add_column("shop", StringType(), required=True)
    world.publish(10)
    with pytest.raises(InvalidInput, match="column 'shop' is required, and gets no value"):
        run(spark, world, store)
    assert lake.store().read("delays") is None


@pytest.mark.parametrize(
    "steps",
    sampled(
        [
            (Step.STAGED, Step.MERGED, Step.COMMITTED),
            (Step.FENCED, Step.STAGED, Step.PUBLISHED, Step.MERGED, Step.COMMITTED, Step.ACKNOWLEDGED),
        ],
        2,
    ),
    ids=len,
)
def test_a_crash_at_any_step_loses_and_duplicates_nothing(spark, world, lake, monkeypatch, steps):
    for number, step in enumerate(steps):
        if number == len(steps) // 2:
            monkeypatch.setattr(spark_iceberg, "CARRIED_TO_APPEND", 0)
            monkeypatch.setattr(spark_iceberg, "CARRIED_TO_MERGE", 0)
            monkeypatch.setattr(strategies, "WORTHWHILE_BYTES", 0)  # So tasks read.
        world.publish(5)
        with pytest.raises(Crash):
            run(spark, world, lake.store(), CrashAt(step), max_transaction_bytes=1_500)
    assert run(spark, world, lake.store()).fence == len(steps) + 1
    rows, good, pending = world.rows(20), world.publisher(), world.publisher()
    for row in rows:
        good.add(SOURCES[0], row)
    for row in world.rows(3):
        pending.add(SOURCES[0], row)
    pending.flush()
    good.commit()
    world.committed += rows
    run(spark, world, lake.store())
    lake.check(world, spark)


class Trap(Hooks):
    """Run a function once, at a step of the catalog, from a step of the consumer on."""

    def __init__(self, monkeypatch, catalog: SqlCatalog, step: str, armed_by: Step, work) -> None:
        self.sprung = False
        self._armed_by, self._work = armed_by, work
        self._original = getattr(catalog, step)
        self._arm = lambda: monkeypatch.setattr(catalog, step, self._met)

    def on_step(self, step: Step) -> None:
        if step is self._armed_by:
            self._arm()

    def _met(self, *arguments, **named):
        if not self.sprung:
            self.sprung = True
            self._work()
        return self._original(*arguments, **named)


def test_a_driver_that_hung_before_its_commit_commits_nothing(spark, world, lake, monkeypatch):
    """Another one takes over while it hangs before the swap. `test_owner.py` tests each step of a commit."""
    world.publish(20)
    zombie = lake.store()
    trap = Trap(monkeypatch, lake.catalogs[0], "_write_metadata", Step.MERGED, lambda: run(spark, world, lake.store()))
    with pytest.raises(Fenced, match="was raised by a later owner"):
        run(spark, world, zombie, trap)
    assert trap.sprung
    run(spark, world, lake.store())
    lake.check(world, spark)


def test_a_commit_with_a_lost_response_counts_once(spark, world, lake, monkeypatch):
    world.publish(10)
    store = lake.store()

    def fail() -> None:
        raise ConnectionError("gone")

    trap = Trap(monkeypatch, lake.catalogs[0], "_delete_old_metadata", Step.MERGED, fail)
    assert run(spark, world, store, trap).transactions == 1
    assert trap.sprung
    lake.check(world, spark)


class Outage(Hooks):
    """Let a step of the catalog fail from a step of the consumer on, until the consumer has retried three times."""

    def __init__(self, monkeypatch, catalog: SqlCatalog, step: str, armed_by: Step) -> None:
        self.waits = 0
        self._armed_by = armed_by
        original = getattr(catalog, step)

        def met(*arguments, **named):
            if self.waits < 3:
                raise ConnectionError("the catalog is away")
            return original(*arguments, **named)

        self._arm = lambda: monkeypatch.setattr(catalog, step, met)

    def on_step(self, step: Step) -> None:
        if step is self._armed_by:
            self._arm()

    def pause(self, seconds: float) -> None:
        self.waits += 1


@pytest.mark.parametrize(
    ("step", "armed_by"),
    [
        pytest.param("load_table", Step.FENCED, marks=pytest.mark.exhaustive),
        pytest.param("load_table", Step.SEQUENCED, marks=pytest.mark.exhaustive),
        ("load_table", Step.STAGED),
        ("_write_metadata", Step.MERGED),
    ],
)
def test_an_outage_of_the_catalog_loses_and_duplicates_nothing(step, armed_by, spark, world, lake, monkeypatch):
    world.publish(10)
    store = lake.store()
    monkeypatch.setattr(store._owner, "_sleep", lambda seconds: None)
    outage = Outage(monkeypatch, lake.catalogs[-1], step, armed_by)
    report = run(spark, world, store, outage)
    assert (report.transactions, report.fence, report.retries) == (1, 1, 3)
    lake.check(world, spark)


class ByDay:
    """Keep each day's last messages in its own partition, and the last message of each carrier."""

    name = "by-day"
    sources = "name:prefix=delays/events/"
    value_schema = "n BIGINT, carrier STRING, day DATE, gone BOOLEAN"

    def outputs(self, committed):
        last = F.max_by(F.struct("n", "gone"), "_offset").alias("last")
        latest = committed.groupBy("carrier").agg(last).select("carrier", "last.*")
        return Outputs(
            [
                TableOutput("lake.days", committed.select("n", "day"), overwrite=True),
                TableOutput("lake.latest", latest, ["carrier"], {"n": Replace()}, delete="gone"),
            ]
        )


DAYS = Table(
    "days", MetaData(), Column("n", BigInteger), Column("day", Date), schema="lake", info={"partition_by": ["day"]}
)


def test_rows_replace_partitions_and_rows_of_their_keys(spark, world, lake):
    lake.store()
    catalog = lake.catalogs[0]
    store = IcebergStore(catalog, DAYS)
    catalog.create_namespace_if_not_exists("lake")
    catalog.create_table("lake.latest", duckdb.sql("SELECT 'AA' AS carrier, 0::BIGINT AS n").arrow().schema)
    consumer = SparkConsumer(ByDay(), world.broker.config, store, spark)

    def publish(*rows: tuple) -> None:
        publisher = world.publisher()
        for n, carrier, day, gone in rows:
            publisher.add("delays/events/one", {"n": n, "carrier": carrier, "day": f"2026-01-0{day}", "gone": gone})
        publisher.commit()
        assert consumer.run_until_caught_up().transactions == 1

    def found() -> tuple:
        days = [(n, day.day) for n, day in lake.rows("lake.days", "n")]
        return days, lake.rows("lake.latest", "carrier")

    publish((1, "AA", 1, False), (2, "AA", 1, False), (3, "B6", 2, False))
    assert found() == ([(1, 1), (2, 1), (3, 2)], [("AA", 2), ("B6", 3)])
    publish((4, "AA", 2, False), (5, "UA", 3, False), (6, "B6", 3, True))
    assert found() == ([(1, 1), (2, 1), (4, 2), (5, 3), (6, 3)], [("AA", 4), ("UA", 5)])
    publish((7, "ZZ", 9, True))
    assert found() == ([(1, 1), (2, 1), (4, 2), (5, 3), (6, 3), (7, 9)], [("AA", 4), ("UA", 5)])


def test_values_that_a_table_cannot_hold_are_refused(spark, world, lake):
    world.publish(3)

    def failing(problem: str, *tables: TableOutput) -> None:
        application = DelaysAndLog()
        application.outputs = lambda committed: Outputs(tables)
        with pytest.raises(InvalidInput, match=problem):
            SparkConsumer(application, world.broker.config, lake.store(), spark).run_until_caught_up()

    rows = spark.range(3).selectExpr("id AS n")
    failing("table lake.log: is not partitioned", TableOutput(LOG, rows, overwrite=True))
    failing("there is no table lake.none", TableOutput("lake.none", rows))
    failing("'none' has no namespace", TableOutput("none", rows))
    failing("has no column 'm'", TableOutput("lake.log", rows.selectExpr("n AS m")))
    failing("lake.log needs n, which is null", TableOutput(LOG, rows.selectExpr("nullif(n, 1) AS n")))
    keyed = TableOutput("lake.log", rows, ["n"])
    failing("several outputs write this table", keyed, TableOutput("lake.log", rows))
    failing("key 'n' is null in a row", TableOutput("lake.log", rows.selectExpr("nullif(n, 1) AS n"), ["n"]))
    with pytest.raises(InvalidInput, match=r"iceberg lake/lake\.totals runs no SQL"):
        SparkConsumer(LoggedDelays(), world.broker.config, lake.store(), spark).run_until_caught_up()
    with pytest.raises(InvalidInput, match="needs its definition"):
        SparkConsumer(ByDay(), world.broker.config, f"sqlite:///{lake.folder}/x.db", spark).run_until_caught_up()
    assert lake.files("lake.log") == []


def test_a_consumer_with_a_rest_catalog_learns_the_outcome_of_a_commit(spark, world, tmp_path):
    with rest_server(tmp_path) as server:
        world.publish(20)
        # The table is created, the fence raised, the table recorded, and then rows are committed.
        server.faults.extend([carried_out, carried_out, carried_out, lost])
        store = IcebergStore(server.catalog(), TOTALS, namespace="lake")
        SparkConsumer(Delays(), world.broker.config, store, spark).run_until_caught_up()
        assert not server.faults
        found = server.catalog().load_table(HOME).scan().to_arrow().sort_by("carrier").to_pylist()
        assert [tuple(row.values()) for row in found] == world.totals()
        world.check_alerts()
