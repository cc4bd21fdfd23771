"""Transactions that are read and written in one job, and failed attempts at it."""

import os
import time

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, func, select

from coranto.client.publishing import SyncPublisher
from coranto.messages import JsonLines, ProducerClock, new_producer_id
from coranto.messages.checkpoints import ProducerState, Source
from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark import JournalOutput, Outputs, Replace, SparkConsumer, TableOutput
from coranto_consumers.spark.consumer import transaction_inputs
from coranto_consumers.spark.consumer.transaction_inputs import OptimisticWrites
from coranto_consumers.spark.inputs import strategies
from coranto_consumers.spark.inputs.strategies import ExpectedRows
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.staging import stage_tables

ROWS = Table(
    "rows", MetaData(), Column("n", BigInteger, primary_key=True, autoincrement=False), Column("twice", BigInteger)
)
JOURNAL = "rows/source"
LARGE = [Range(JOURNAL, 0, 2 << 20, 2 << 20)]
DECIDED = {JOURNAL: Source(0, {new_producer_id(os.urandom): ProducerState(7)})}
PENDING = {JOURNAL: Source(0, {new_producer_id(os.urandom): ProducerState(7, 3)})}


def test_small_inputs_and_open_transactions_are_not_written_optimistically():
    writing = OptimisticWrites()
    assert writing.is_worthwhile(LARGE, DECIDED)
    assert not writing.is_worthwhile(LARGE, PENDING)
    assert not writing.is_worthwhile([Range(JOURNAL, 0, 1000, 1000)], DECIDED)


def test_optimistic_writes_back_off_after_failures():
    writing = OptimisticWrites()
    tried = []
    for transaction in range(40):
        if optimistic := writing.is_worthwhile(LARGE, DECIDED):
            tried.append(transaction)
        writing.record_two_jobs(wasted=optimistic)
    assert tried == [0, 2, 5, 10, 19, 36]
    writing.record_one_job()
    assert writing.is_worthwhile(LARGE, DECIDED)


def test_an_application_that_publishes_is_not_written_optimistically():
    writing = OptimisticWrites()
    assert not writing.allows(Outputs(journals=[JournalOutput(None, "a/b")]))  # type: ignore[arg-type]
    assert not writing.is_worthwhile(LARGE, DECIDED)


class Rows:
    """Write all or some messages as rows, with or without a key."""

    name = "rows"
    sources = f"name={JOURNAL}"
    value_schema = "n BIGINT"

    def __init__(self, keyed: bool, most: int = 0, factor: int = 2) -> None:
        self._keyed, self._most, self._factor = keyed, most, factor

    def outputs(self, committed):
        # Rows of factor 1 are columns of the messages, so that the reading tasks may write them without Spark.
        rows = committed.selectExpr("n", "n AS twice" if self._factor == 1 else "2 * n AS twice")
        rows = rows.limit(self._most) if self._most else rows
        by_key = {"keys": ["n"], "merge": {"twice": Replace()}} if self._keyed else {}
        return Outputs(tables=[TableOutput(ROWS, rows, **by_key)])


@pytest.fixture
def optimistic(monkeypatch) -> list[bool]:
    """Record the outcomes of optimistic attempts, and allow them for any size."""
    taken = []

    def in_one_job(writing, record=OptimisticWrites.record_one_job):
        taken.append(True)
        record(writing)

    def in_two_jobs(writing, *, wasted, record=OptimisticWrites.record_two_jobs):
        taken.extend([False] if wasted else [])
        record(writing, wasted=wasted)

    monkeypatch.setattr(OptimisticWrites, "record_one_job", in_one_job)
    monkeypatch.setattr(OptimisticWrites, "record_two_jobs", in_two_jobs)
    monkeypatch.setattr(transaction_inputs, "WORTHWHILE_BYTES", 0)
    monkeypatch.setattr(strategies, "WORTHWHILE_BYTES", 0)
    return taken


def publisher(broker) -> SyncPublisher:
    clock = ProducerClock(time.time_ns)
    return SyncPublisher(broker.write, producer=new_producer_id(os.urandom), clock=clock, framing=JsonLines())


def publish(broker, *numbers: int, commit: bool = True) -> None:
    each = publisher(broker)
    for number in numbers:
        each.add(JOURNAL, {"n": number})
    each.flush()
    each.commit() if commit else each.rollback()


def check(url: str, *numbers: int, factor: int = 2) -> None:
    """Check that the table has these rows, and that none are staged."""
    store = SqlStore(url)
    with store.engine.connect() as connection:
        found = connection.execute(select(ROWS.c.n, ROWS.c.twice).order_by(ROWS.c.n)).all()
        assert [tuple(row) for row in found] == [(number, factor * number) for number in numbers]
        for stage in stage_tables(store, connection):
            assert connection.execute(select(func.count()).select_from(stage)).scalar_one() == 0


@pytest.mark.parametrize(("keyed", "factor"), [(False, 1), (True, 1), (True, 2)])
def test_a_transaction_of_committed_messages_is_one_job_and_others_are_decided_first(
    spark, broker, store_url, optimistic, monkeypatch, keyed, factor
):
    monkeypatch.setattr(
        "coranto_consumers.spark.outputs.staging.CARRIED_TO_APPEND", 0
    )  # Rows are staged, then deleted.
    monkeypatch.setattr("coranto_consumers.spark.outputs.staging.CARRIED_TO_MERGE", 0)
    summaries = []
    add = ExpectedRows.add_summaries
    monkeypatch.setattr(ExpectedRows, "add_summaries", lambda rows, texts: (summaries.append(texts), add(rows, texts)))
    broker.create(JOURNAL)
    publish(broker, 1, 2, 3)
    publish(broker, 4, 5)
    consumer = SparkConsumer(Rows(keyed, factor=factor), broker.config, store_url, spark)
    assert consumer.run_until_caught_up().messages == 5
    check(store_url, 1, 2, 3, 4, 5, factor=factor)
    assert optimistic == [True]
    assert bool(summaries) == (factor == 1), "a task that reads plain columns also stages them, without Spark"

    publish(broker, 6, 7)
    publish(broker, 8, commit=False)
    broker.write(JOURNAL, broker.content(JOURNAL).splitlines(keepends=True)[0])  # A duplicate.
    report = consumer.run_until_caught_up()
    check(store_url, *range(1, 8), factor=factor)
    assert (optimistic, report.messages, report.records_read) == ([True, False], 2, 6)


def test_an_application_that_does_not_read_all_input_takes_two_jobs(spark, broker, tmp_path, optimistic):
    broker.create(JOURNAL)
    publish(broker, *range(100))
    url = f"sqlite:///{tmp_path}/store.db"
    report = SparkConsumer(Rows(True, most=2), broker.config, url, spark).run_until_caught_up()
    assert (optimistic, report.messages) == ([False], 100)
    with SqlStore(url).engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(ROWS)).scalar_one() == 2


def test_a_value_that_does_not_fit_raises_the_usual_error(spark, broker, tmp_path, optimistic):
    broker.create(JOURNAL)
    each = publisher(broker)
    each.publish(JOURNAL, {"n": "one"})
    each.flush()
    consumer = SparkConsumer(Rows(True), broker.config, f"sqlite:///{tmp_path}/store.db", spark)
    with pytest.raises(Exception, match="does not fit the columns n bigint"):
        consumer.run_until_caught_up()
    assert optimistic == [False]
