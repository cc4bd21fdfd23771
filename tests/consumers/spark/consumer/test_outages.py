"""Spark consumers and queries with `exactly_once` survive outages of their store or of brokers at any step."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pyspark.errors import PySparkException
from sqlalchemy import Connection
from structlog.testing import capture_logs

from coranto.client.retry import RetryPolicy
from coranto.errors import CommitOutcomeUnknown, CorruptData, Fenced, SqlStoreError, StreamChanged, Unavailable
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.spark import Hooks, SparkConsumer, Step, error_of_task
from coranto_consumers.spark.consumer.metrics import SparkConsumerMetrics
from coranto_consumers.spark.consumer.outages import Outages
from coranto_consumers.spark.consumer.progress import NOTHING, ConsumeReport
from coranto_consumers.spark.consumer.transaction import RunCommits
from coranto_consumers.spark.outputs import stores as spark_outputs
from coranto_consumers.spark.outputs.stores import SqlOutputs
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore
from tests.consumers.outages import Outage, ProxiedStore
from tests.consumers.spark.consumer.test_consumer import LoggedDelays, World, check_logged
from tests.consumers.spark.consumer.test_foreach_batch import World as BatchWorld
from tests.sampling import PARTS, part_of
from tests.servers.sql import PostgresServer, PostgresStandby


class Waiting(Hooks):
    """Begin an outage after a step, and end it after some retries."""

    def __init__(self, outage: Outage, step: Step | None = None) -> None:
        self._outage, self._step = outage, step

    def on_step(self, step: Step) -> None:
        if step is self._step:
            self._outage.begin()

    def pause(self, seconds: float) -> None:
        self._outage.wait(seconds)


STATEMENTS = {
    "fence": ("INSERT INTO gazette_checkpoints", False),
    "checkpoint": ("INSERT INTO gazette_checkpoints", True),
    "merge": ("INSERT INTO TABLE", False),
    "merge answer": ("INSERT INTO TABLE", True),
    "fence check": ("UPDATE gazette_checkpoints", False),
    "fence check answer": ("UPDATE gazette_checkpoints", True),
}
SAMPLE: tuple[Step | str, ...] = (Step.STAGED, "merge answer", "task", "commit answer")


def outages_at_any_step(
    url: str,
    run: Callable[[SqlStore, Hooks], ConsumeReport],
    *,
    part: str,
    steps: list[Step],
    table: str,
    name: str,
    before_tasks: Step,
) -> None:
    """Run transactions, each through an outage of the database at another step, and check its retries.

    `table` is one into which rows are merged, and `before_tasks` the last step before tasks stage rows.
    """
    cases = (None, "connect", *steps, *STATEMENTS, "task", "commit request", "commit answer")
    for step in part_of(part, cases, SAMPLE):
        with ProxiedStore(url) as proxied:
            commit = Connection.commit
            if step in ("commit request", "commit answer"):
                commit = proxied.commit_at(answered=step == "commit answer")
            store = SqlStore(proxied.url, commit=commit, sleep=proxied.outage.wait)
            store.location = "the database"  # Each step has a proxy at another port.
            hooks = Waiting(proxied.outage, step if isinstance(step, Step) else None)
            if step == "connect":
                proxied.outage.begin()
            elif isinstance(step, str) and step in STATEMENTS:
                statement, after = STATEMENTS[step]
                proxied.outage_at(store, statement.replace("TABLE", table), after=after)
            elif step == "task":
                hooks = AtTask(proxied, before_tasks)
            report = run(store, hooks)
            assert report.transactions == 1, step
            assert report.outage_seconds == 0
            if step in (None, Step.COMMITTED, Step.ACKNOWLEDGED):  # Later steps do not need the store.
                assert not proxied.outage.waits
                continue
            assert len(proxied.outage.waits) == 3, step
            # The store itself waits for the outcome of a commit. A commit that did not happen is repeated.
            assert report.retries == {"commit answer": 0, "commit request": 1, "fence check answer": 1}.get(step, 3), (
                step
            )
            assert SqlStore(url).read(name).fence == report.fence, "an outage raises no fence"


@pytest.fixture
def all_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tasks stage all rows, so that they meet outages, too."""
    monkeypatch.setattr(spark_outputs, "CARRIED_TO_APPEND", 0)
    monkeypatch.setattr(spark_outputs, "CARRIED_TO_MERGE", 0)


@PARTS
@pytest.mark.usefixtures("all_staged")
def test_a_database_outage_at_any_step_loses_and_duplicates_nothing(spark, broker, postgres, part):
    world, url = World(broker), postgres.new_database()

    def run(store: SqlStore, hooks: Hooks) -> ConsumeReport:
        world.publish(9)
        reports: list[ConsumeReport] = []
        consumer = SparkConsumer(
            LoggedDelays(), broker.config, SqlOutputs(store), spark, hooks=hooks, on_progress=reports.append
        )
        report = consumer.run_until_caught_up()
        assert report.messages == 9
        return report

    outages_at_any_step(
        url, run, part=part, steps=list(Step), table="totals", name="delays", before_tasks=Step.SEQUENCED
    )
    check_logged(world, url)


class Batches(BatchWorld):
    """Batches that are committed to the database of each run."""

    def __init__(self, spark: Any, broker: Any, folder: Any, url: str) -> None:
        super().__init__(spark, broker, folder)
        self.store_url = self.used = url
        self.reports: list[ConsumeReport] = []

    def store(self) -> Any:
        return self.used

    def function(self, **options: Any) -> Any:
        return super().function(**{"on_progress": self.reports.append, **options})


@pytest.fixture
def batches(spark, broker, tmp_path, postgres) -> Batches:
    return Batches(spark, broker, tmp_path, postgres.new_database())


BATCH_STEPS = [step for step in Step if step not in (Step.PLANNED, Step.SEQUENCED)]


@PARTS
@pytest.mark.usefixtures("all_staged")
def test_a_database_outage_at_any_step_of_a_batch_loses_and_duplicates_nothing(batches, part):
    def run(store: SqlStore, hooks: Hooks) -> ConsumeReport:
        batches.add(9)
        batches.used = SqlOutputs(store)
        batches.run(batches.function(hooks=hooks))
        return batches.reports[-1]

    outages_at_any_step(
        batches.store_url,
        run,
        part=part,
        steps=BATCH_STEPS,
        table="counts",
        name="counts",
        before_tasks=Step.RECOVERED,
    )
    batches.check()


def test_an_endless_query_waits_for_its_store_and_its_brokers(batches, broker):
    """It waits longer than a finite query, which has a timeout of zero here."""
    registry = CollectorRegistry()
    metrics, gauges = SparkConsumerMetrics("counts", registry), []

    def observe(report: ConsumeReport) -> None:
        metrics.observe(report)
        gauges.append(registry.get_sample_value("coranto_spark_outage_seconds", {"consumer": "counts"}) or 0.0)

    batches.broker.config = replace(broker.config, retry_timeout=0.05)
    for step in (Step.FENCED, Step.MERGED, Step.COMMITTED):
        batches.add(9)
        with ProxiedStore(batches.store_url) as proxied:
            outage = Outage(broker.refuse, broker.accept) if step is Step.COMMITTED else proxied.outage
            store = SqlStore(proxied.url, sleep=proxied.outage.wait)
            store.location = "the database"
            batches.used = SqlOutputs(store)
            with capture_logs() as logs:
                function = batches.function(hooks=Waiting(outage, step), retry_timeout=0.0, on_progress=observe)
                batches.run_until_idle(function)
        assert [each["event"] for each in logs if each["event"].startswith("consumer.")] == [
            "consumer.retrying",
            "consumer.continued",
        ]
        assert gauges[-1] == 0
    assert max(gauges) > 0
    assert registry.get_sample_value("coranto_spark_retries_total", {"consumer": "counts"}) == 9
    assert registry.get_sample_value("coranto_spark_transactions_total", {"consumer": "counts"}) == 3
    batches.check()


def test_a_finite_query_gives_up_after_its_timeout(batches):
    batches.add(9)
    with ProxiedStore(batches.store_url) as proxied:
        batches.used = proxied.url
        hooks = Waiting(proxied.outage, Step.MERGED)
        with pytest.raises(PySparkException) as raised:
            batches.run(batches.function(hooks=hooks, retry_timeout=0.0))
    assert isinstance(error_of_task(raised.value), SqlStoreError)
    assert not proxied.outage.waits
    batches.used = batches.store_url
    batches.run(batches.function())
    batches.check()


def test_a_query_stopped_during_an_outage_ends_and_its_batch_is_repeated(batches):
    batches.add(9)
    with ProxiedStore(batches.store_url) as proxied:
        store = SqlStore(proxied.url, sleep=proxied.outage.wait)
        store.location = "the database"
        batches.used = SqlOutputs(store)

        waiting, stopping = threading.Event(), threading.Event()

        class Stopped(Hooks):
            def on_step(self, step: Step) -> None:
                if step is Step.MERGED:
                    proxied.outage.begin()

            def pause(self, seconds: float) -> None:
                waiting.set()
                assert stopping.wait(60)
                while query.isActive:
                    threading.Event().wait(0.01)

        query = batches.start(batches.function(hooks=Stopped()))
        assert waiting.wait(60)
        stop = threading.Thread(target=query.stop)
        stop.start()
        stopping.set()
        stop.join(60)
        assert not stop.is_alive()
    assert SqlStore(batches.store_url).read("counts").checkpoint.sources == {}
    batches.used = SqlOutputs(store := SqlStore(batches.store_url))
    store.location = "the database"
    batches.run(batches.function())
    batches.check()


def test_a_query_replaced_during_an_outage_ends_and_fences_no_other(batches):
    batches.add(9)
    with ProxiedStore(batches.store_url) as proxied:
        later: list[int] = []

        class Replaced(Waiting):
            def pause(self, seconds: float) -> None:
                if not later:
                    later.append(SqlStore(batches.store_url).raise_fence("counts").fence)
                super().pause(seconds)

        batches.used = proxied.url
        with pytest.raises(PySparkException) as raised:
            batches.run(batches.function(hooks=Replaced(proxied.outage, Step.MERGED)))
    assert isinstance(error_of_task(raised.value), Fenced)
    assert SqlStore(batches.store_url).read("counts").fence == later[0]


def test_a_database_that_lost_a_batch_in_a_failover_ends_the_query(batches, broker):
    batches.add(9)
    batches.broker.config = replace(broker.config, retry_timeout=0.05)

    class Lossy(Waiting):
        def pause(self, seconds: float) -> None:
            with SqlStore(batches.store_url).engine.begin() as connection:
                connection.execute(CHECKPOINTS.update().values(checkpoint=b""))
            super().pause(seconds)

    with pytest.raises(PySparkException, match="lost commits, as in a failover") as raised:
        batches.run(batches.function(hooks=Lossy(Outage(broker.refuse, broker.accept), Step.COMMITTED)))
    assert isinstance(error_of_task(raised.value), CorruptData)


class AtTask(Waiting):
    """Begin the outage at the first connection of a task that stages rows, after the driver's."""

    def __init__(self, proxied: ProxiedStore, before_tasks: Step) -> None:
        super().__init__(proxied.outage)
        self._proxied, self._before_tasks = proxied, before_tasks

    def on_step(self, step: Step) -> None:
        if step is self._before_tasks and not self._outage.has_been:
            self._proxied.outage_at_connection(2)


def serve_until_idle(consumer: SparkConsumer) -> ConsumeReport:
    idle: list[bool] = []
    return consumer.run_until_stopped(lambda: bool(idle), wait=lambda: idle.append(True))


def test_a_service_waits_for_its_store_and_its_brokers(spark, broker, postgres):
    world, url = World(broker), postgres.new_database()
    registry = CollectorRegistry()
    metrics = SparkConsumerMetrics("delays", registry)
    client = replace(broker.config, retry_timeout=0.05)
    gauges: list[float] = []

    def observe(report: ConsumeReport) -> None:
        metrics.observe(report)
        gauges.append(registry.get_sample_value("coranto_spark_outage_seconds", {"consumer": "delays"}) or 0.0)

    for step in (Step.FENCED, Step.MERGED, Step.COMMITTED):
        world.publish(9)
        with ProxiedStore(url) as proxied:
            outage = Outage(broker.refuse, broker.accept) if step is Step.COMMITTED else proxied.outage
            store = SqlStore(proxied.url, sleep=proxied.outage.wait)
            store.location = "the database"  # Each step has a proxy at another port.
            consumer = SparkConsumer(
                LoggedDelays(), client, SqlOutputs(store), spark, hooks=Waiting(outage, step), on_progress=observe
            )
            with capture_logs() as logs:
                report = serve_until_idle(consumer)
        assert (report.transactions, report.messages, report.retries) == (1, 9, 3)
        assert [each["event"] for each in logs if each["event"].startswith("consumer.")] == [
            "consumer.retrying",
            "consumer.continued",
        ]
        assert gauges[-1] == 0
    assert max(gauges) > 0
    assert registry.get_sample_value("coranto_spark_retries_total", {"consumer": "delays"}) == 9
    assert registry.get_sample_value("coranto_spark_transactions_total", {"consumer": "delays"}) == 3
    check_logged(world, url)


def test_an_instance_replaced_during_an_outage_ends_and_fences_no_other(spark, broker, postgres):
    world, url = World(broker), postgres.new_database()
    world.publish(9)
    with ProxiedStore(url) as proxied:
        later = []
        end = proxied.outage.wait

        class Replaced(Waiting):
            def pause(self, seconds: float) -> None:
                if not later:
                    later.append(SqlStore(url).raise_fence("delays").fence)
                end(seconds)

        consumer = SparkConsumer(
            LoggedDelays(), broker.config, proxied.url, spark, hooks=Replaced(proxied.outage, Step.MERGED)
        )
        with pytest.raises(Fenced):
            consumer.run_until_stopped(lambda: False)
    assert SqlStore(url).read("delays").fence == later[0]


def test_a_database_that_lost_commits_in_a_failover_ends_the_consumer(spark, broker, postgres):
    world, url = World(broker), postgres.new_database()
    world.publish(9)
    with ProxiedStore(url) as proxied:

        class Lossy(Waiting):
            def pause(self, seconds: float) -> None:
                with SqlStore(url).engine.begin() as connection:
                    connection.execute(CHECKPOINTS.update().values(checkpoint=b""))
                super().pause(seconds)

        consumer = SparkConsumer(
            LoggedDelays(),
            replace(broker.config, retry_timeout=0.05),
            proxied.url,
            spark,
            hooks=Lossy(Outage(broker.refuse, broker.accept), Step.COMMITTED),
        )
        with pytest.raises(CorruptData, match="lost commits, as in a failover"):
            consumer.run_until_stopped(lambda: False)


def test_a_consumer_continues_on_a_standby_once_it_is_promoted(spark, broker):
    """At first the standby is read-only, like a former primary."""
    world = World(broker)
    with PostgresServer() as primary, PostgresStandby(primary) as standby:
        url = primary.new_database()
        errors: list[str] = []
        with ProxiedStore(url) as proxied:

            def fail_over() -> None:
                primary.stop()
                proxied.serve_from(standby.port)

            class Failover(Waiting):
                def on_step(self, step: Step) -> None:
                    if step is Step.SEQUENCED and world.committed[-1]["n"] > 20:
                        self._outage.begin()

            outage = Outage(fail_over, standby.promote)
            store = SqlStore(proxied.url, sleep=outage.wait)
            for _ in range(2):
                world.publish(9)
                with capture_logs() as logs:
                    consumer = SparkConsumer(
                        LoggedDelays(), broker.config, SqlOutputs(store), spark, hooks=Failover(outage)
                    )
                    assert consumer.run_until_caught_up().transactions == 1
                errors += [each["error"] for each in logs if each["event"] == "consumer.retrying"]
            assert len(outage.waits) == 3
            assert re.search("read-only transaction|during recovery", errors[0])
            check_logged(world, proxied.url)


def report(fence: int) -> ConsumeReport:
    return replace(NOTHING, fence=fence)


class Paused(Hooks):
    def __init__(self) -> None:
        self.now = 100.0

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def outages(self, policy: RetryPolicy, seen: list[ConsumeReport]) -> Outages:
        return Outages("sums", policy, self, seen.append, monotonic=lambda: self.now)


def test_a_job_gives_up_after_its_timeout_and_a_service_never_does():
    seen: list[ConsumeReport] = []
    hooks, failures = Paused(), [0]

    def fail() -> None:
        failures[0] += 1
        raise SqlStoreError("the server is away")

    with pytest.raises(SqlStoreError), capture_logs() as logs:
        hooks.outages(RetryPolicy(600.0, seed=1), seen).run(fail, lambda: report(7))
    assert 695 < hooks.now <= 700
    assert seen[-1].retries == failures[0] - 1
    assert seen[-1].outage_seconds > 590
    assert 9 <= len(logs) <= 10, "one line per minute"

    hooks, failures[0] = Paused(), 0
    begun = hooks.now
    ended = hooks.outages(RetryPolicy(seed=1), seen).run(fail, lambda: report(7), lambda: hooks.now > begun + 24 * 3600)
    assert ended is None, "it was stopped, and did not give up"


def test_a_progress_listener_may_use_the_unavailable_store():
    hooks, seen, failures = Paused(), [], [1, 2]

    def report_and_fail(report: ConsumeReport) -> None:
        seen.append(report.retries)
        raise SqlStoreError("the server is away")

    def work() -> str:
        if failures:
            failures.pop()
            raise SqlStoreError("the server is away")
        return "done"

    outages = Outages("sums", RetryPolicy(seed=1), hooks, report_and_fail, monotonic=lambda: hooks.now)
    assert outages.run(work, lambda: report(1)) == "done"
    assert seen == [1, 2]


@pytest.mark.parametrize(
    "error",
    [
        Fenced("a later owner"),
        SqlStoreError("value too long", retriable=False),
        StreamChanged("00000003 cannot be read yet"),
        ZeroDivisionError(),
        CorruptData("the journal was made again"),
    ],
)
def test_permanent_errors_are_not_retried(error):
    attempts: list[int] = []

    def fail() -> None:
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        Paused().outages(RetryPolicy(seed=1), []).run(fail, lambda: report(1))
    assert attempts == [1]


def test_the_timeout_starts_at_the_first_failure_since_the_last_progress():
    hooks = Paused()
    outages = hooks.outages(RetryPolicy(60.0, seed=1), [])
    attempts: list[float] = []

    def work() -> str:
        attempts.append(hooks.now)
        if hooks.now > 400:
            return "done"
        if len(attempts) % 5 == 0:
            assert outages.progressed()
            hooks.now += 50
        raise Unavailable("no answer")

    assert outages.run(work, lambda: report(1)) == "done"


def test_a_commit_with_a_lost_response_counts_if_the_store_has_it():
    begin, first, second = (Checkpoint({"a/journal": Source(offset)}) for offset in (0, 10, 20))
    commits = RunCommits()
    commits.begin(begin, report(1))
    commits.complete()
    commits.begin(first, replace(report(1), transactions=1))
    commits.check_restored(begin, "store")
    assert commits.report is not None
    assert commits.report.transactions == 0

    commits.begin(first, replace(report(1), transactions=1))
    commits.check_restored(first, "store")
    assert commits.report.transactions == 1
    commits.check_restored(first, "store")

    commits.begin(second, replace(report(1), transactions=2))
    with pytest.raises(CorruptData, match="earlier checkpoint than this consumer has committed"):
        commits.check_restored(begin, "store")


def test_the_outcome_of_a_commit_is_unknown_only_until_the_store_responds():
    outages = Paused().outages(RetryPolicy(seed=1), [])
    errors = [CommitOutcomeUnknown("the store does not answer"), SqlStoreError("still away")]

    def work() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert outages.run(work, lambda: report(1)) == "done"
