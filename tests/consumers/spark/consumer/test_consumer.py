"""A Spark consumer's tables and messages are exact after a stop of any kind at any step."""

import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, Double, MetaData, String, Table, func, select
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from coranto.cli import main
from coranto.errors import CorruptData, CorruptMessage, Fenced, InvalidInput, NotAllowed
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.publisher import SyncPublisher
from coranto.messages.sequencer import Sequencer, read_committed
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.spark import (
    Add,
    Hooks,
    JournalOutput,
    Max,
    Outputs,
    Quotient,
    Replace,
    SparkConsumer,
    SqlOutput,
    StagedSql,
    Step,
    TableOutput,
)
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.consumer.prefetch import Prefetcher
from coranto_consumers.spark.outputs import stores as spark_outputs
from coranto_consumers.spark.outputs.tasks import StageTask
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.staging import stage_tables
from tests.consumers.conftest import needs_mariadb
from tests.spans import recorded_spans

SOURCES = ("delays/events/one", "delays/events/two")
ALERTS = ("delays/alerts/one", "delays/alerts/two")
CARRIERS = ("AA", "B6", "UA")
TOTALS = Table(
    "totals",
    MetaData(),
    Column("carrier", String(20), primary_key=True),
    Column("flights", BigInteger, nullable=False),
    Column("total", Double),
    Column("longest", Double),
    Column("mean", Double),
)


class Delays:
    """Sum delays by carrier, and publish alerts about long ones."""

    name = "delays"
    sources = "name:prefix=delays/events/"
    value_schema = "n BIGINT, carrier STRING, delay DOUBLE"

    def outputs(self, committed):
        totals = committed.groupBy("carrier").agg(
            F.count("*").alias("flights"), F.sum("delay").alias("total"), F.max("delay").alias("longest")
        )
        alerts = committed.where("delay > 180").selectExpr("carrier AS key", "struct(n, carrier, delay) AS value")
        merge = {"flights": Add(), "total": Add(), "longest": Max(), "mean": Quotient("total", "flights")}
        return Outputs(
            tables=[TableOutput(TOTALS, totals, keys=["carrier"], merge=merge)],
            journals=[JournalOutput(alerts, "name:prefix=delays/alerts/")],
        )


class World:
    """Source journals with published messages, and the expected results."""

    def __init__(self, broker) -> None:
        self.broker = broker
        self.committed: list[dict] = []
        self._rng = random.Random(7)
        self._n = 0
        broker.create(*SOURCES, *ALERTS)

    def publisher(self) -> SyncPublisher:
        producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
        return SyncPublisher(self.broker.write, producer=producer, clock=clock, framing=JsonLines())

    def rows(self, count: int) -> list[dict]:
        made = []
        for _ in range(count):
            self._n += 1
            delay = self._rng.choice([None, *range(-10, 400, 10)])
            made.append({"n": self._n, "carrier": self._rng.choice(CARRIERS), "delay": delay})
        return made

    def publish(self, count: int) -> None:
        """Publish a transaction over both journals, with repeated appends, and one that is rolled back."""
        rows = self.rows(count)
        good, bad = self.publisher(), self.publisher()
        for row in rows:
            good.add(self._rng.choice(SOURCES), row)
        for row in self.rows(5):
            bad.add(self._rng.choice(SOURCES), row)
        bad.flush()
        good.flush()
        for journal in SOURCES:
            content = self.broker.content(journal)
            self.broker.write(journal, b"".join(content.splitlines(keepends=True)[-3:]))
        good.commit()
        bad.rollback()
        self.committed += rows

    def alerts(self) -> list[dict]:
        found = []
        for journal in ALERTS:
            content = self.broker.content(journal)
            envelopes = iter_messages(JsonLines(), journal, [content], 0)
            found += [
                {name: value for name, value in envelope.message.items() if name != "_meta"}
                for envelope in read_committed(envelopes, Sequencer(), lambda wanted: [])
            ]
        return sorted(found, key=lambda row: row["n"])

    def totals(self) -> list[tuple]:
        """Return the rows of `TOTALS` expected for the committed messages."""
        cells = defaultdict(list)
        for row in self.committed:
            cells[row["carrier"]].append(row["delay"])
        expected = []
        for carrier, delays in sorted(cells.items()):
            known = [float(delay) for delay in delays if delay is not None]
            total = sum(known) if known else None
            longest = max(known) if known else None
            expected.append((carrier, len(delays), total, longest, None if total is None else total / len(delays)))
        return expected

    def check(self, store_url: str) -> None:
        """Check that the table and the alerts exactly match the committed messages, and that nothing else is left."""
        with SqlStore(store_url).engine.connect() as connection:
            assert [tuple(row) for row in connection.execute(select(TOTALS).order_by("carrier"))] == self.totals()
            for stage in stage_tables(SqlStore(store_url), connection):
                assert connection.execute(select(func.count()).select_from(stage)).scalar_one() == 0
        self.check_alerts()

    def check_alerts(self) -> None:
        late = [row for row in self.committed if row["delay"] is not None and row["delay"] > 180]
        assert self.alerts() == sorted(late, key=lambda row: row["n"])


@pytest.fixture
def world(broker) -> World:
    return World(broker)


@pytest.fixture
def sqlite_url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


def consumer(spark, world, store_url, hooks=None, on_progress=None, **options) -> SparkConsumer:
    chosen = ConsumerOptions(**options)
    return SparkConsumer(Delays(), world.broker.config, store_url, spark, chosen, hooks=hooks, on_progress=on_progress)


def takes_ahead(monkeypatch) -> list[bool]:
    """Record for each later transaction whether its input was read ahead."""
    taken = []

    def watched(ahead, wanted, take=Prefetcher.take):
        found = take(ahead, wanted)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Prefetcher, "take", watched)
    return taken


MARIADB = pytest.param("mariadb", marks=[needs_mariadb, pytest.mark.exhaustive])
"""In `make test`, MariaDB is a store of Spark in `tests/consumers/spark/outputs/` and `tests/consumers/tables/`."""


@pytest.mark.parametrize(
    "store_url", [pytest.param("sqlite", marks=pytest.mark.exhaustive), "postgresql", MARIADB], indirect=True
)
def test_a_run_catches_up_in_bounded_transactions(spark, world, store_url, monkeypatch):
    for _ in range(2):
        world.publish(30)
    reports = []
    taken = takes_ahead(monkeypatch)
    limits = {"max_transaction_bytes": 4_000, "max_partition_bytes": 1_500}

    report = consumer(spark, world, store_url, on_progress=reports.append, **limits).run_until_caught_up()

    world.check(store_url)
    assert report.transactions == len(reports) - 1 > 1
    assert taken == [False] + [True] * (report.transactions - 1), "all but the first were read ahead"
    assert (reports[0].transactions, reports[0].offsets) == (0, dict.fromkeys(SOURCES, 0))
    assert report.messages == len(world.committed)
    assert report.records_read == sum(world.broker.content(journal).count(b"\n") for journal in SOURCES)
    assert report.published == len(world.alerts()) > 0
    assert report.offsets == report.heads == {journal: world.broker.head(journal) for journal in SOURCES}
    assert (report.lag_bytes, report.fence, report.replayed_intents) == (0, 1, 0)
    assert [r.lag_bytes for r in reports] == sorted((r.lag_bytes for r in reports), reverse=True)
    assert SqlStore(store_url).read("delays").checkpoint.sources.keys() == set(SOURCES)

    again = consumer(spark, world, store_url).run_until_caught_up()
    assert (again.transactions, again.messages, again.fence) == (0, 0, 2)
    assert again.replayed_intents == len(ALERTS)
    world.check(store_url)


def test_each_transaction_is_a_trace_of_its_phases(spark, world, sqlite_url):
    for _ in range(2):
        world.publish(30)
    limits = {"max_transaction_bytes": 4_000, "max_partition_bytes": 1_500}

    class Failing(Hooks):
        def on_step(self, step: Step) -> None:
            if step is Step.MERGED:
                raise InvalidInput("a secret value")

    with recorded_spans() as spans:
        with pytest.raises(InvalidInput):
            consumer(spark, world, sqlite_url, Failing(), **limits).run_until_caught_up()
        (failed,) = spans.named("transaction delays")
        assert (failed.status.status_code.name, failed.status.description) == ("ERROR", "")
        names = [span.name.partition(" ")[0] for span in spans.within(failed)]
        assert names[:3] == ["planning", "reading", "writing"]
        assert set(names[3:]) == {"append"}, "its messages are rolled back"
        spans.exporter.clear()
        report = consumer(spark, world, sqlite_url, **limits).run_until_caught_up()
    transactions = spans.named("transaction delays")
    assert len(transactions) == report.transactions > 1
    assert sum(span.attributes["coranto.messages"] for span in transactions) == report.messages
    assert sum(span.attributes["coranto.published"] for span in transactions) == report.published
    for transaction in transactions:
        inside = spans.within(transaction)
        appends = [span for span in inside if span.name.startswith("append delays/alerts/")]
        assert appends or not transaction.attributes["coranto.published"]
        phases = [span for span in inside if span not in appends]
        names = [span.name.partition(" ")[0] for span in phases]
        assert names == ["planning", "reading", "writing", "committing", "acknowledging"]
        assert phases[0].start_time == transaction.start_time
        assert all(before.end_time == after.start_time for before, after in pairwise(phases))
        assert transaction.kind.name == "CONSUMER"
    world.check(sqlite_url)


def test_a_continuous_run_reads_concurrent_writes_under_one_fence(spark, world, sqlite_url, monkeypatch):
    taken = takes_ahead(monkeypatch)
    new = "delays/events/three"
    waits = iter(range(10))

    def write_more() -> None:
        """Publish at the first wait for content, to a new journal at the second, and then nothing."""
        turn = next(waits)
        if turn == 0:
            world.publish(10)
        if turn == 1:
            world.broker.create(new)
            publisher, rows = world.publisher(), world.rows(5)
            for row in rows:
                publisher.add(new, row)
            publisher.commit()
            world.committed += rows
        if turn == 2:
            world.broker.write(SOURCES[0], b'{"unfinished')

    class Busy(Hooks):
        """Publish before the first two transactions have committed."""

        def on_step(self, step: Step) -> None:
            if step is Step.STAGED and len(taken) < 3:
                world.publish(10)

    world.publish(10)
    idle = []
    runner = consumer(spark, world, sqlite_url, hooks=Busy())
    report = runner.run_until_stopped(lambda: len(idle) == 6, wait=lambda: (idle.append(1), write_more()))
    world.check(sqlite_url)
    assert (report.fence, report.messages) == (1, 45)
    assert set(report.offsets) == {*SOURCES, new}
    assert report.transactions == 6, "one for each write, and none without writes"
    assert taken == [False, True, True, False, False, False], "content written during a commit was prefetched"
    # Tasks reuse the producers of the last transaction, so readers track only as many as run concurrently.
    envelopes = [each for name in ALERTS for each in iter_messages(JsonLines(), name, [world.broker.content(name)], 0)]
    assert len({envelope.producer for envelope in envelopes}) == 1
    assert report.lag_bytes == len(b'{"unfinished')


def test_a_reset_service_ends_as_fenced_says_why_and_the_next_repeats_all(spark, world, sqlite_url, monkeypatch):
    monkeypatch.setattr("coranto_consumers.spark.consumer.spark_consumer._FENCE_SECONDS", 0.0)
    world.publish(20)
    words = ["reset", "delays", "--to", "earliest", "--yes", "--store", sqlite_url, "--endpoint", world.broker.endpoint]
    runner = consumer(spark, world, sqlite_url)
    reason = r"by `coranto consumer reset` or `skip`: delays/events/one was reset from \d+ to 0 at .* \(and 1 more\)"
    with pytest.raises(Fenced, match=reason):  # It has nothing to read, and still detects the reset.
        runner.run_until_stopped(lambda: False, wait=lambda: main(["consumer", *words]))

    assert consumer(spark, world, sqlite_url).run_until_caught_up().messages == len(world.committed)
    world.committed *= 2
    world.check(sqlite_url)


def test_transactions_are_bounded_by_messages_and_a_service_by_time(spark, world, sqlite_url, monkeypatch):
    world.publish(24)
    reports, idle = [], []
    taken = takes_ahead(monkeypatch)
    limits = {"max_transaction_messages": 10, "min_transaction_seconds": 3600, "on_progress": reports.append}
    runner = consumer(spark, world, sqlite_url, **limits)

    report = runner.run_until_stopped(lambda: len(idle) == 3, wait=lambda: (world.publish(1), idle.append(1)))

    read = [after.records_read - before.records_read for before, after in pairwise(reports)]
    assert len(read) >= 3
    assert max(read) <= 20
    assert sum(taken) >= len(read) - 2, "all were read ahead, except the first and one that may be replanned"
    assert report.messages == 24, "the interval of an hour has not passed"
    assert consumer(spark, world, sqlite_url).run_until_caught_up().messages == 3
    world.check(sqlite_url)


class Crash(Exception):
    pass


class CrashAt(Hooks):
    def __init__(self, step: Step) -> None:
        self.step = step

    def on_step(self, step: Step) -> None:
        if step is self.step:
            raise Crash(step)


LOG = Table("log", MetaData(), Column("n", BigInteger, nullable=False))


LATE = Table("late", MetaData(), Column("n", BigInteger, nullable=False))
ACCOUNTS = Table("accounts", MetaData(), Column("carrier", String(20), primary_key=True), Column("flights", BigInteger))
BOOKED = StagedSql(
    Table("booked", MetaData(), Column("n", BigInteger), Column("carrier", String(20)), Column("delay", Double)),
    [
        "INSERT INTO {late} (n) SELECT s.n FROM {stage} AS s WHERE s.delay > 180 AND s.carrier NOT LIKE '%;{x}%'",
        "UPDATE {accounts} SET flights = flights + "
        "(SELECT COUNT(*) FROM {stage} AS s WHERE s.carrier = {accounts}.carrier) "
        "WHERE carrier IN (SELECT s.carrier FROM {stage} AS s);",
        "INSERT INTO {accounts} (carrier, flights) SELECT s.carrier, COUNT(*) FROM {stage} AS s "
        "WHERE s.carrier NOT IN (SELECT a.carrier FROM {accounts} AS a) GROUP BY s.carrier",
    ],
    [LATE, ACCOUNTS],
)


class LoggedDelays(Delays):
    """Also keep the numbers of all messages in a table without keys, and book them by the application's SQL."""

    sql = (BOOKED,)

    def outputs(self, committed):
        made = super().outputs(committed)
        booked = SqlOutput(BOOKED, committed.select("n", "carrier", "delay"))
        return Outputs([*made.tables, TableOutput(LOG, committed.select("n"))], made.journals, [booked])


def check_logged(world: World, store_url: str) -> None:
    """Check that tables without keys and tables written by SQL are exact, too."""
    world.check(store_url)
    late = [row["n"] for row in world.committed if row["delay"] is not None and row["delay"] > 180]
    with SqlStore(store_url).engine.connect() as connection:
        logged = connection.execute(select(LOG.c.n).order_by("n")).scalars().all()
        assert logged == sorted(row["n"] for row in world.committed)
        assert connection.execute(select(LATE.c.n).order_by("n")).scalars().all() == sorted(late)
        booked = connection.execute(select(ACCOUNTS).order_by("carrier")).all()
        assert booked == connection.execute(select(TOTALS.c.carrier, TOTALS.c.flights).order_by("carrier")).all()


def test_a_crash_at_any_step_loses_and_duplicates_nothing(spark, world, sqlite_url, monkeypatch):
    """With PostgreSQL, `test_store_restarts.py` ends transactions at the steps that use it."""
    store_url = sqlite_url

    def run(hooks: Hooks | None = None):
        # Small transactions, so that the next one is read ahead when the first one crashes.
        options = ConsumerOptions(max_transaction_bytes=1_500) if hooks else None
        return SparkConsumer(
            LoggedDelays(), world.broker.config, store_url, spark, options, hooks=hooks
        ).run_until_caught_up()

    for number, step in enumerate(Step):
        if number == len(Step) // 2:
            # All rows are staged from here on. The steps before the transaction have passed.
            monkeypatch.setattr(spark_outputs, "CARRIED_TO_APPEND", 0)
            monkeypatch.setattr(spark_outputs, "CARRIED_TO_MERGE", 0)
        world.publish(6)
        with pytest.raises(Crash):
            run(CrashAt(step))

    report = run()

    check_logged(world, store_url)
    assert report.fence == len(Step) + 1


class TakenOver(Hooks):
    """Have another instance start and catch up while this one is at a step. Then this one continues."""

    def __init__(self, step: Step, successor: Callable[[], None]) -> None:
        self.step = step
        self.successor = [successor]

    def on_step(self, step: Step) -> None:
        if step is self.step and self.successor:
            self.successor.pop()()


@pytest.mark.parametrize("database", ["postgresql", MARIADB])
def test_a_superseded_instance_is_refused(spark, world, database, new_store):
    store_url = new_store(database)
    world.publish(20)

    def run(hooks: Hooks | None = None) -> None:
        SparkConsumer(LoggedDelays(), world.broker.config, store_url, spark, hooks=hooks).run_until_caught_up()

    with pytest.raises(Fenced, match="delays: fence 1 was raised"):
        run(TakenOver(Step.PUBLISHED, run))

    # Messages of the superseded instance stay pending forever; the next start deletes its staged rows.
    world.publish(20)
    run()
    check_logged(world, store_url)


def test_an_instance_is_refused_at_any_step_it_was_superseded(spark, world, sqlite_url, monkeypatch):
    """Each instance is superseded at a step by an instance that is superseded at the next step."""
    monkeypatch.setattr(spark_outputs, "CARRIED_TO_APPEND", 0)
    monkeypatch.setattr(spark_outputs, "CARRIED_TO_MERGE", 0)
    refused = []

    def run(steps: list[Step]) -> None:
        world.publish(4)
        if not steps:
            consumer(spark, world, sqlite_url).run_until_caught_up()
            return
        hooks = TakenOver(steps[0], lambda: run(steps[1:]))
        with pytest.raises(Fenced):
            # It has more to do after its first transaction.
            consumer(spark, world, sqlite_url, hooks=hooks, max_transaction_bytes=700).run_until_caught_up()
        refused.append(steps[0])

    # At MERGED an instance holds the store's lock, so that its successor waits for its commit.
    steps = [step for step in Step if step is not Step.MERGED]
    run(steps)

    assert refused == steps[::-1]
    world.publish(4)
    assert consumer(spark, world, sqlite_url).run_until_caught_up().fence == len(steps) + 2
    world.check(sqlite_url)


def test_sql_the_database_rejects_ends_a_consumer_before_it_takes_over(spark, world, sqlite_url):
    world.publish(3)
    consumer(spark, world, sqlite_url).run_until_caught_up()
    application = LoggedDelays()
    application.sql = (StagedSql(BOOKED.rows, ["INSERT INTO {late} (m) SELECT s.n FROM {stage} AS s"], [LATE]),)

    with pytest.raises(InvalidInput, match=r"SQL over booked, statement 1: .*does not accept it: .*no column named m"):
        SparkConsumer(application, world.broker.config, sqlite_url, spark).run_until_caught_up()

    assert SqlStore(sqlite_url).read("delays").fence == 1


def test_a_commit_with_a_lost_response_counts_once(spark, world, sqlite_url):
    world.publish(20)

    class LosesTheResponse(Hooks):
        def commit(self, connection) -> None:
            connection.commit()
            raise OperationalError("COMMIT", {}, Exception("connection lost"))

    report = consumer(spark, world, sqlite_url, hooks=LosesTheResponse()).run_until_caught_up()

    assert report.transactions == 1
    world.check(sqlite_url)


def test_a_transaction_open_across_many_is_delivered_once_it_commits(spark, world, sqlite_url):
    slow, dead = world.publisher(), world.publisher()
    rows = world.rows(30)
    for begin in (0, 10, 20):
        for row in rows[begin : begin + 10]:
            slow.add(SOURCES[0], row)
        slow.flush()
        dead.add(SOURCES[0], world.rows(1)[0])
        dead.flush()
        world.publish(5)
        consumer(spark, world, sqlite_url).run_until_caught_up()
        world.check(sqlite_url)

    before = world.broker.fake.count("Read")
    slow.commit()
    world.committed += rows
    bounded = consumer(spark, world, sqlite_url, max_transaction_bytes=3_000)
    with capture_logs() as logs:
        first = bounded.run_until_caught_up(max_transactions=1)
    [event] = [each for each in logs if each["event"] == "consumer.long_transaction"]
    assert (event["begin"], event["parts"]) == (0, -(-event["bytes_read_again"] // 3_000))
    assert event["parts"] > 1
    assert 0 < first.messages < 30, "it was open over more than a transaction reads"
    rest = bounded.run_until_caught_up()

    world.check(sqlite_url)
    assert (first.messages + rest.messages, first.records_read, rest.records_read) == (30, 0, 1)
    assert world.broker.fake.count("Read") > before


def test_an_atomic_consumer_delivers_a_set_in_one_transaction_or_names_its_position(spark, world, sqlite_url):
    slow, rows = world.publisher(), world.rows(30)
    for begin in (0, 10, 20):
        for row in rows[begin : begin + 10]:
            slow.add(SOURCES[0], row)
        slow.flush()
        consumer(spark, world, sqlite_url, atomic=True, max_transaction_bytes=1_000).run_until_caught_up()
    slow.commit()
    before = SqlStore(sqlite_url).read("delays").checkpoint
    problem = rf"max_transaction_bytes: producer \w+ has committed .* \d+ bytes \[0, \d+\) of journal {SOURCES[0]}"
    with pytest.raises(InvalidInput, match=problem) as raised:
        consumer(spark, world, sqlite_url, atomic=True, max_transaction_bytes=1_000).run_until_caught_up()
    assert SqlStore(sqlite_url).read("delays").checkpoint.offsets == before.offsets, "none of it is delivered"

    needed = int(re.search(r"Set max_transaction_bytes to (\d+)", str(raised.value))[1])
    world.committed += rows
    report = consumer(spark, world, sqlite_url, atomic=True, max_transaction_bytes=needed).run_until_caught_up()
    assert (report.transactions, report.messages) == (1, 30)
    world.check(sqlite_url)


LATEST = Table(
    "latest", MetaData(), Column("carrier", String(20), primary_key=True), Column("n", BigInteger, nullable=False)
)


class Latest:
    """Keep the last committed message of each carrier."""

    name = "latest"
    sources = f"name={SOURCES[0]}"
    value_schema = "n BIGINT, carrier STRING, _commit_offset BIGINT"

    def outputs(self, committed):
        last = F.max_by("n", F.struct("_commit_offset", "_offset")).alias("n")
        rows = committed.groupBy("carrier").agg(last)
        return Outputs(tables=[TableOutput(LATEST, rows, keys=["carrier"], merge={"n": Replace()})])


def test_the_last_write_of_a_key_wins_in_the_order_of_commits(spark, world, sqlite_url):
    """Transactions overlap, so messages written first may be committed last."""
    open_for_long, early, late = world.publisher(), world.publisher(), world.publisher()
    write = world.broker.write
    for publisher, n, carrier in ((open_for_long, 1, "UA"), (late, 2, "AA"), (early, 3, "AA"), (late, 4, "B6")):
        publisher.add(SOURCES[0], {"n": n, "carrier": carrier})
        publisher.flush()
    early.commit()
    write(SOURCES[0], b'{"n": 5, "carrier": "B6"}\n{"n": 6, "carrier": "UA"}\n')
    late.commit()
    runner = SparkConsumer(Latest(), world.broker.config, sqlite_url, spark)

    def latest() -> dict[str, int]:
        runner.run_until_caught_up()
        with SqlStore(sqlite_url).engine.connect() as connection:
            return {row.carrier: row.n for row in connection.execute(select(LATEST))}

    assert latest() == {"AA": 2, "B6": 4, "UA": 6}
    open_for_long.commit()
    assert latest() == {"AA": 2, "B6": 4, "UA": 1}


def corrupt_after(world, spark, store_url, line: bytes) -> CorruptMessage:
    world.publish(10)
    consumer(spark, world, store_url).run_until_caught_up()
    good = world.broker.head(SOURCES[0])
    world.publish(10)
    offset = world.broker.head(SOURCES[0])
    world.broker.write(SOURCES[0], line)

    with pytest.raises(CorruptMessage) as caught:
        consumer(spark, world, store_url).run_until_caught_up()

    assert (caught.value.journal, caught.value.offset) == (SOURCES[0], offset)
    assert SqlStore(store_url).read("delays").checkpoint.sources[SOURCES[0]].read_through == good
    return caught.value


def test_an_invalid_message_stops_the_consumer_before_it_commits(spark, world, sqlite_url):
    assert "not a line of JSON" in str(corrupt_after(world, spark, sqlite_url, b"{nonsense\n"))


def test_a_value_that_does_not_fit_stops_the_consumer_before_it_commits(spark, world, sqlite_url):
    line = b'{"n":1,"carrier":"AA","delay":"late"}\n'
    assert "its value does not fit the columns n bigint, carrier string" in str(
        corrupt_after(world, spark, sqlite_url, line)
    )


def test_an_unfinished_line_is_not_read(spark, world, sqlite_url):
    world.publish(5)
    head = world.broker.head(SOURCES[1])
    world.broker.write(SOURCES[1], b'{"n":1,')

    report = consumer(spark, world, sqlite_url).run_until_caught_up()

    world.check(sqlite_url)
    assert report.offsets[SOURCES[1]] == head
    assert report.lag_bytes == 7
    assert consumer(spark, world, sqlite_url).run_until_caught_up().messages == 0


def test_pending_messages_of_a_deleted_journal_are_dropped(spark, world, sqlite_url):
    world.publish(40)
    with pytest.raises(Crash):
        consumer(spark, world, sqlite_url, hooks=CrashAt(Step.COMMITTED)).run_until_caught_up()
    del world.broker.fake.journals[ALERTS[0]]

    assert consumer(spark, world, sqlite_url).run_until_caught_up().replayed_intents == len(ALERTS) - 1


def test_a_read_only_journal_does_not_block_acknowledgements_of_others(spark, world, sqlite_url):
    """It becomes read-only between the commit and the acknowledgements, and still is at the next start."""
    protected, writable = ALERTS

    class Protect(Hooks):
        def on_step(self, step: Step) -> None:
            if step is Step.COMMITTED:
                world.broker.fake.journals[protected].spec.flags = pb.JournalSpec.O_RDONLY

    def alerts_of(journal: str) -> int:
        envelopes = iter_messages(JsonLines(), journal, [world.broker.content(journal)], 0)
        return len(list(read_committed(envelopes, Sequencer(), lambda wanted: [])))

    world.publish(40)
    with pytest.raises(NotAllowed, match=protected):
        consumer(spark, world, sqlite_url, hooks=Protect()).run_until_caught_up()
    assert (alerts_of(protected), alerts_of(writable) > 0) == (0, True)

    before = world.broker.head(writable)
    with pytest.raises(NotAllowed, match=protected):
        consumer(spark, world, sqlite_url).run_until_caught_up()
    assert world.broker.head(writable) > before, "the acknowledgement is appended again"

    world.broker.fake.journals[protected].spec.flags = 0
    consumer(spark, world, sqlite_url).run_until_caught_up()
    world.check(sqlite_url)


def test_a_producer_with_a_fast_clock_loses_no_message_of_others(spark, world, sqlite_url):
    """One clock is a day ahead, a transaction stays open across many of the consumer's, and an append is repeated."""
    day = 25 * 3600 * 10**9
    clock = ProducerClock(lambda: time.time_ns() + day)
    ahead = SyncPublisher(world.broker.write, producer=new_producer_id(os.urandom), clock=clock, framing=JsonLines())
    slow, repeating = world.publisher(), world.publisher()
    first = world.rows(12)
    repeated = world.broker.head(SOURCES[0])
    repeating.publish(SOURCES[0], first[0])
    repeating.flush()
    append = world.broker.content(SOURCES[0])[repeated:]
    for row in first[1:11]:
        slow.add(SOURCES[0], row)
    slow.flush()
    ahead.publish(SOURCES[0], first[11])
    ahead.flush()
    with capture_logs() as logs:
        consumer(spark, world, sqlite_url).run_until_caught_up()
    assert [each["journal"] for each in logs if each["event"] == "producer.clock_skewed"] == [SOURCES[0]]
    world.broker.write(SOURCES[0], append)
    slow.commit()
    consumer(spark, world, sqlite_url).run_until_caught_up()
    world.committed += first
    world.check(sqlite_url)


def test_a_recreated_journal_is_detected(spark, world, sqlite_url):
    world.publish(5)
    consumer(spark, world, sqlite_url).run_until_caught_up()
    world.broker.create(SOURCES[0])

    with pytest.raises(CorruptData, match=r"ends at 0, but is processed through .* created again"):
        consumer(spark, world, sqlite_url).run_until_caught_up()


def test_a_transaction_without_committed_messages_starts_no_job(spark, world, sqlite_url):
    runner = consumer(spark, world, sqlite_url)
    pending = world.publisher()
    pending.add(SOURCES[0], world.rows(1)[0])
    pending.flush()
    jobs = spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs

    before = jobs()
    report = runner.run_until_caught_up()
    assert (report.transactions, report.records_read, report.messages) == (1, 1, 0)
    assert jobs() == before

    pending.commit()
    assert runner.run_until_caught_up().messages == 1
    assert jobs() > before


def test_a_session_is_started_only_if_there_is_something_to_read(world, sqlite_url):
    def no_session() -> SparkSession:
        raise AssertionError("there is nothing to read")

    assert consumer(no_session, world, sqlite_url).run_until_caught_up().transactions == 0


def test_no_task_shows_a_password(spark):
    task = StageTask("postgresql+psycopg://u:hunter2@db/name", TOTALS, "shard", 1)

    assert "hunter2" not in repr(task)


def failing(spark, world, store_url, problem: str, **changes) -> None:
    application = Delays()
    for name, value in changes.items():
        setattr(application, name, value)
    with pytest.raises(InvalidInput, match=problem):
        SparkConsumer(application, world.broker.config, store_url, spark).run_until_caught_up()


def outputs(*, tables: Iterable[TableOutput] = (), journals: Iterable[JournalOutput] = ()) -> Outputs:
    return Outputs(tuple(tables), tuple(journals))


def test_errors_say_why_an_application_cannot_work(spark, world, sqlite_url):
    failing(spark, world, sqlite_url, "no journal matches 'name:prefix=none/'", sources="name:prefix=none/")
    world.publish(3)
    failing(spark, world, sqlite_url, "value_schema: 'n WHAT' is not a list of columns", value_schema="n WHAT")
    failing(spark, world, sqlite_url, "value_schema: column _offset is reserved", value_schema="_offset INT")
    for problem, make in {
        "table totals: has no column 'n'": lambda rows: outputs(tables=[TableOutput(TOTALS, rows.select("n"))]),
        "no journal matches": lambda rows: outputs(journals=[JournalOutput(rows, "name:prefix=none/")]),
        "there is no journal none/at-all": lambda rows: outputs(journals=[JournalOutput(rows, ["none/at-all"])]),
        "the rows have no column 'key'": lambda rows: outputs(journals=[JournalOutput(rows, ALERTS)]),
        "has no key to map it by": lambda rows: outputs(
            journals=[JournalOutput(rows.selectExpr("null AS key", "'{}' AS value"), ALERTS)]
        ),
        "'nope' is not JSON": lambda rows: outputs(
            journals=[JournalOutput(rows.selectExpr("'nope' AS value"), [ALERTS[0]], "random")]
        ),
    }.items():
        failing(spark, world, sqlite_url, problem, outputs=make)
    assert world.alerts() == []
