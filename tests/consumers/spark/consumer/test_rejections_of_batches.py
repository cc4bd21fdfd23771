"""Rows of batches that the database rejects: `exactly_once` names and handles them, and all others commit."""

import base64
import json
import logging

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, MetaData, String, Table, select
from structlog.testing import capture_logs

from coranto.errors import InvalidInput, RejectedRow
from coranto_consumers.spark import (
    DeadLetters,
    MisfitPolicy,
    Outputs,
    TableOutput,
    error_of_task,
    exactly_once,
)
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.stores import SqlStore
from tests.consumers.spark.consumer.test_rejections import (
    ALL_KINDS,
    COPIES,
    DEAD,
    LETTERS,
    ORDERS,
    SOURCE,
    Orders,
    World,
    all_texts,
    world_of,
)

NULLED = Table("nulled", MetaData(), Column("at", BigInteger), Column("name", String(5)), Column("n", BigInteger))
PLACES = "_journal STRING, _offset BIGINT"


class Batches:
    """Queries that write batches with bad rows into a database."""

    def __init__(self, spark, broker, url, folder) -> None:
        self.spark, self.broker, self.url, self.folder = spark, broker, url, folder
        self.order: list[list[int]] = []
        """The rows of the batches, in the order of `collect`."""

    def run(self, frame, outputs, client=None, **options) -> list:
        """Return the reports."""
        reports = []
        chosen = ConsumerOptions(**options)
        write = exactly_once(
            self.url, outputs, name="orders", client=client, options=chosen, on_progress=reports.append
        )

        def function(batch, number) -> None:
            if "at" in batch.columns:
                self.order.append([row["at"] for row in batch.collect()])
            write(batch, number)

        writer = frame.writeStream.foreachBatch(function).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.folder / "checkpoint")).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()
        return reports

    def of_journal(self, schema=f"{Orders.value_schema}, {PLACES}"):
        options = {"endpoint": self.broker.endpoint, "subscribe": SOURCE, "startingOffsets": "earliest"}
        frame = self.spark.readStream.format("journal").options(**options)
        return (frame.schema(schema) if schema else frame).load()

    def of_files(self, schema, *files):
        for number, rows in enumerate(files):
            path = self.folder / "rows" / f"{number}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.spark.readStream.schema(schema).json(str(self.folder / "rows"))

    def letters(self) -> list:
        with SqlStore(self.url).engine.connect() as connection:
            found = connection.execute(select(LETTERS).order_by("journal", "offset")).all()
        return [(row.journal, row.offset, [json.loads(line) for line in bytes(row.line).splitlines()]) for row in found]

    def rows(self, table, *columns) -> list:
        with SqlStore(self.url).engine.connect() as connection:
            return [tuple(row) for row in connection.execute(select(*(table.c[name] for name in columns)))]


@pytest.fixture(params=["postgresql", *ALL_KINDS])
def world(request, new_store, broker) -> World:
    return world_of(request.param, new_store, broker, {"null", "unique", "NUL"})


@pytest.fixture
def batches(spark, broker, world, tmp_path) -> Batches:
    return Batches(spark, broker, world.url, tmp_path)


def test_by_default_the_error_has_the_position_of_the_rejected_message_and_no_values(world, batches, caplog, capfd):
    offset = min(at for at, _ in world.bad.values())
    with caplog.at_level(logging.DEBUG), capture_logs() as logs, pytest.raises(PySparkException) as caught:
        batches.run(batches.of_journal(), Orders().outputs)
    error = error_of_task(caught.value)
    assert isinstance(error, RejectedRow)
    assert (error.journal, error.offset) == (SOURCE, offset)
    assert f"journal {SOURCE} at offset {offset}: store " in str(error)
    texts = all_texts(caught.value, caplog, logs, capfd)
    assert "SECRET" not in texts
    assert "77777" not in texts
    assert world.rows("at") == []


def test_dead_letters_keep_rejected_rows_in_the_same_transaction(world, batches):
    [report] = batches.run(batches.of_journal(), Orders().outputs, misfits=DeadLetters(table=LETTERS))
    assert world.rows("at") == [(at,) for at in world.good]
    letters = batches.letters()
    assert [(journal, offset) for journal, offset, _ in letters] == [(SOURCE, at) for at, _ in world.bad.values()]
    for (_, offset, [row]), (_, line) in zip(letters, world.bad.values(), strict=True):
        assert row["_offset"] == offset
        assert row["id"] == json.loads(line)["id"]
    assert (report.transactions, report.misfits) == (1, len(world.bad))
    assert batches.run(batches.of_journal(), Orders().outputs, misfits=DeadLetters(table=LETTERS)) == []


@pytest.mark.exhaustive
def test_dead_letters_in_journals_and_messages_of_the_batch_are_published_once(world, batches, broker, spark):
    outputs = Orders(copies=True).outputs
    batches.run(batches.of_journal(), outputs, misfits=DeadLetters(journals=[DEAD]), client=broker.config)
    committed = spark.read.format("journal").options(endpoint=broker.endpoint, isolation="read_committed")
    dead = [json.loads(row.value) for row in committed.option("subscribe", DEAD).load().collect()]
    found = sorted((each["offset"], json.loads(base64.b64decode(each["line"]))["_offset"]) for each in dead)
    assert found == [(at, at) for at, _ in world.bad.values()]
    assert committed.option("subscribe", COPIES).load().count() == len(world.good)


@pytest.mark.exhaustive
def test_nulls_replace_rejected_values_of_nullable_columns(world, batches):
    with pytest.raises(PySparkException) as caught:
        batches.run(batches.of_journal(), Orders().outputs, misfits=MisfitPolicy.NULLS)
    assert error_of_task(caught.value).offset == world.bad["null"][0], "the id must not be null"
    assert world.rows("at") == []

    def outputs(batch):
        rows = batch.selectExpr("_offset AS at", "_offset AS id", "name", "price", "place", "due")
        return Outputs(tables=[TableOutput(ORDERS, rows)])

    [report] = batches.run(batches.of_journal(), outputs, misfits=MisfitPolicy.NULLS)
    assert len(world.rows("at")) == len(world.good) + len(world.bad)
    assert report.misfits == len(world.bad) - 2


def test_messages_of_an_unparsed_journal_have_positions(world, batches):
    def outputs(batch):
        rows = batch.select(F.col("offset").alias("at"), F.get_json_object("value", "$.id").cast("bigint").alias("id"))
        return Outputs(tables=[TableOutput(ORDERS, rows)])

    batches.run(batches.of_journal(schema=None), outputs, misfits=DeadLetters(table=LETTERS))
    unfit = [world.bad["null"][0], world.bad["unique"][0]]
    assert [(journal, offset) for journal, offset, _ in batches.letters()] == [(SOURCE, at) for at in unfit]


def good(at: int) -> dict:
    return {"at": at, "id": at, "name": "good"}


FILES = [
    [good(1), good(2), {**good(3), "id": None}],
    [good(at) for at in range(10, 12)],
    [{**good(50), "id": 1}, good(51), {**good(52), "id": None}, good(53)],
]


def plain(batch):
    return Outputs(tables=[TableOutput(ORDERS, batch.select("at", "id", "name"))])


def test_rows_without_a_message_are_named_by_their_number_in_the_batch(world, batches):
    frame = batches.of_files("at BIGINT, id BIGINT, name STRING", *FILES)
    with pytest.raises(PySparkException) as caught:
        batches.run(frame, plain)
    error = error_of_task(caught.value)
    assert isinstance(error, RejectedRow)
    assert error.journal == "batch 0 of orders"
    assert batches.order[-1][error.offset] in (1, 3, 50, 52)
    assert f"row {error.offset} of batch 0 of orders: store " in str(error)
    assert world.rows("at") == []

    with capture_logs() as logs:
        [report] = batches.run(frame, plain, misfits=DeadLetters(table=LETTERS))
    letters = batches.letters()
    found = {batches.order[-1][row]: line for _, row, [line] in letters}
    assert {journal for journal, _, _ in letters} == {"batch 0 of orders"}
    assert len(found.keys() & {1, 50}) == 1, "the later one of two with the same id"
    assert found.keys() - {1, 50} == {3, 52}
    assert all(line["at"] == at for at, line in found.items())
    assert {at for (at,) in world.rows("at")} == {row["at"] for rows in FILES for row in rows} - found.keys()
    assert report.misfits == 3
    named = [each for each in logs if each["event"] == "consumer.row_rejected"]
    assert [(each["journal"], each["offset"]) for each in named] == [(journal, row) for journal, row, _ in letters]


def test_rows_with_the_position_of_one_message_count_as_one_message(batches):
    """It has one dead letter, for any number of rows."""
    rows = [{"_journal": "a/journal", "_offset": 10 * n, "at": at, "id": at} for n in range(3) for at in (n, n + 20)]
    rows[2]["id"] = None
    frame = batches.of_files(f"at BIGINT, id BIGINT, {PLACES}", rows)
    batches.run(frame, lambda batch: plain(batch.withColumn("name", F.lit("a"))), misfits=DeadLetters(table=LETTERS))
    [(journal, offset, lines)] = batches.letters()
    assert (journal, offset) == ("a/journal", 10)
    assert sorted(line["at"] for line in lines) == [1, 21]
    assert sorted(at for (at,) in batches.rows(ORDERS, "at")) == [0, 2, 20, 22]


def test_rows_without_a_message_position_are_numbered(batches):
    rows = [{"_journal": None if at == 5 else "a/journal", "_offset": at, "at": at, "id": at} for at in range(9)]
    rows[5]["id"] = None
    frame = batches.of_files(f"at BIGINT, id BIGINT, {PLACES}", rows)
    with pytest.raises(PySparkException, match="row 5 of batch 0 of orders: store "):
        batches.run(frame, lambda batch: plain(batch.withColumn("name", F.lit("a"))))


def test_user_columns_named_like_positions_are_not_used_as_positions(batches):
    """Errors must not show their values, such as the journal of an account."""
    frame = batches.of_files(
        "at BIGINT, id BIGINT, journal STRING, offset BIGINT",
        [{"at": 1, "id": 1, "journal": "SECRET", "offset": 1}, {"at": 2, "journal": "SECRET", "offset": 2}],
    )
    with pytest.raises(PySparkException) as caught:
        batches.run(frame, lambda batch: plain(batch.withColumn("name", F.lit("a"))))
    assert "row 1 of batch 0 of orders: store " in str(error_of_task(caught.value))
    assert "SECRET" not in str(caught.value)


def test_rejected_values_in_rows_without_a_message_become_null(new_store, spark, broker, tmp_path):
    batches = Batches(spark, broker, new_store("postgresql"), tmp_path)
    rows = [{"at": at, "name": "too long" if at % 3 == 0 else "good", "n": at} for at in range(5)]
    batches.run(
        batches.of_files("at BIGINT, name STRING, n BIGINT", rows[:2], rows[2:]),
        lambda batch: Outputs(tables=[TableOutput(NULLED, batch)]),
        misfits=MisfitPolicy.NULLS,
    )
    found = sorted(batches.rows(NULLED, "at", "name", "n"))
    assert found == [(at, None if at % 3 == 0 else "good", at) for at in range(5)]


def test_invalid_options_of_batches_are_refused(world):
    with pytest.raises(InvalidInput, match="say where"):
        ConsumerOptions(misfits=MisfitPolicy.DEAD_LETTERS)
    with pytest.raises(InvalidInput, match="dead letters in journals need a client"):
        exactly_once(world.url, plain, name="orders", options=ConsumerOptions(misfits=DeadLetters(journals=[DEAD])))
    with pytest.raises(InvalidInput, match="max_transaction_bytes: has no meaning for `exactly_once`"):
        exactly_once(world.url, plain, name="orders", options=ConsumerOptions(max_transaction_bytes=1))
