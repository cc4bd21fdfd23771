"""Consumers that differ from those recorded by their checkpoints are refused until the change is confirmed once."""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.sql import SparkSession
from sqlalchemy import BigInteger, Column, MetaData, Table, select

from coranto.errors import ConsumerChanged
from coranto.messages.checkpoints import Identity
from coranto_consumers.spark import IcebergStore, JournalOutput, Outputs, SparkConsumer, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.stores import SqlStore

JOURNALS = ("rows/a", "rows/b")


def table(name: str) -> Table:
    return Table(name, MetaData(), Column("n", BigInteger))


class Copies:
    """Copy messages to a table, and to journals if there are any."""

    name = "copies"
    value_schema = "n BIGINT"

    def __init__(self, name: str = "kept", sources: str = "name:prefix=rows/", journals: Sequence[str] = ()) -> None:
        self.table = table(name)
        self.sources = sources
        self.journals = journals

    def outputs(self, committed) -> Outputs:
        messages = committed.selectExpr("struct(n) AS value")
        journals = [JournalOutput(messages, [name]) for name in self.journals]
        return Outputs([TableOutput(self.table, committed.select("n"))], journals)


class World:
    def __init__(self, broker, store_url: str, spark: SparkSession) -> None:
        self.broker, self.store_url, self.spark = broker, store_url, spark
        broker.create(*JOURNALS, "out/one")
        self.written = 0

    def write(self, journal: str = JOURNALS[0]) -> None:
        self.broker.write(journal, b'{"n":%d}\n' % self.written)
        self.written += 1

    def run(self, application: Copies, **options) -> None:
        store = options.pop("store", self.store_url)
        chosen = ConsumerOptions(**options)
        SparkConsumer(application, self.broker.config, store, self.spark, chosen).run_until_caught_up()

    def refused(self, application: Copies, **options) -> tuple[str, str]:
        """Return the error's text and code. Check that nothing is committed."""
        before = self.stored()
        with pytest.raises(ConsumerChanged) as raised:
            self.run(application, **options)
        assert self.stored().checkpoint == before.checkpoint
        text = str(raised.value)
        return text, text.partition("accept_changes='")[2].partition("'")[0]

    def stored(self):
        found = SqlStore(self.store_url).read("copies")
        assert found is not None
        return found

    def rows(self, name: str = "kept", url: str = "") -> list[int]:
        with SqlStore(url or self.store_url).engine.connect() as connection:
            return sorted(connection.execute(select(table(name).c.n)).scalars())


@pytest.fixture
def world(broker, tmp_path, spark) -> World:
    return World(broker, f"sqlite:///{tmp_path}/store.db", spark)


def test_another_class_of_the_same_name_is_refused_before_it_writes(world: World):
    world.write()
    world.run(Copies())
    world.write()
    text, code = world.refused(Copies("elsewhere"))
    assert "table kept gets nothing any more, table elsewhere gets nothing of the earlier messages (rows/a 8" in text
    world.run(Copies())
    assert world.rows() == [0, 1], "the application that the checkpoint records continues"

    world.write()
    world.run(Copies("elsewhere"), accept_changes=code)
    assert (world.rows(), world.rows("elsewhere")) == ([0, 1], [2])
    world.write()
    world.refused(Copies("third"), accept_changes=code)
    world.refused(Copies("elsewhere", journals=["out/one"]), accept_changes=code)
    world.run(Copies("elsewhere"))
    assert world.rows("elsewhere") == [2, 3]
    assert world.broker.content("out/one") == b""


def test_another_selector_is_refused_without_raising_the_fence(world: World):
    for journal in JOURNALS:
        world.write(journal)
    world.run(Copies(sources="name:prefix=rows/"))
    fence = world.stored().fence
    text, code = world.refused(Copies(sources="name=rows/a"))
    assert f"the rest of rows/b from {world.broker.head('rows/b')} on is not read" in text
    assert world.stored().fence == fence
    world.broker.create("rows/c")
    world.write("rows/c")  # A newly matching journal is not a change.
    world.run(Copies(sources="name:prefix=rows/"))
    assert world.rows() == [0, 1, 2]
    world.write("rows/a")
    world.run(Copies(sources="name=rows/a"), accept_changes=code)
    assert world.rows() == [0, 1, 2, 3]
    assert world.stored().checkpoint.identity.sources == "name=rows/a"


def test_a_copied_store_is_refused_and_a_checkpoint_without_a_record_gets_one(world: World, tmp_path):
    world.write()
    world.run(Copies())
    copy = f"sqlite:///{tmp_path}/copy.db"
    with sqlite3.connect(tmp_path / "store.db") as source, sqlite3.connect(tmp_path / "copy.db") as target:
        source.backup(target)
    world.write()
    text, code = world.refused(Copies(), store=copy)
    assert "copy.db" in text
    world.run(Copies(), store=copy, accept_changes=code)
    assert (world.rows(), world.rows(url=copy)) == ([0], [0, 1])

    found = world.stored()
    store = SqlStore(world.store_url)
    with store.transaction("copies", store.raise_fence("copies").fence) as transaction:
        transaction.commit(replace(found.checkpoint, identity=Identity()))  # As written by Gazette and older versions.
    world.run(Copies("elsewhere"))
    known = world.stored().checkpoint.identity
    assert known == Identity("name:prefix=rows/", frozenset({"table elsewhere"}), store=store.location)


def test_a_checkpoint_in_iceberg_records_the_consumer(world: World, tmp_path):
    def store() -> IcebergStore:
        catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/lake.db", warehouse=f"file://{tmp_path}")
        return IcebergStore(catalog, table("kept"))

    world.write()
    world.run(Copies(), store=store())
    known = store().read("copies").checkpoint.identity
    assert known.outputs == {"table kept"}
    assert known.store == f"iceberg sqlite://{tmp_path}/lake.db default.kept"
    world.write()
    with pytest.raises(ConsumerChanged, match="table elsewhere gets nothing of the earlier messages"):
        world.run(Copies("elsewhere"), store=store())
    world.run(Copies(), store=store())
    assert len(store().load("kept").scan().to_arrow()) == 2


def test_the_options_for_dagster_and_airflow_take_codes():
    assert ConsumerOptions.of({"accept_changes": "0123456789ab"}).accept_changes == "0123456789ab"
