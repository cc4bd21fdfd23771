"""The life of the Spark session shared by the runs of a process."""

import threading

import pytest
from pyspark.sql import SparkSession

import coranto_consumers.spark.session.sessions
from coranto.errors import InvalidInput
from dagster_coranto import SparkResource


class Session:
    def __init__(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False


def test_an_existing_session_keeps_its_settings(spark: SparkSession) -> None:
    before = dict(spark.conf.getAll)
    name = "spark.sql.shuffle.partitions"
    resource = SparkResource(settings={name: str(int(before[name]) + 1), "spark.sql.ansi.enabled": "false"})
    try:
        assert dict(resource.session().conf.getAll) == before
        assert "spark.driver.extraJavaOptions" in before
    finally:
        resource.teardown_after_execution(None)  # type: ignore[arg-type]  # the resource does not use the context
    assert dict(spark.conf.getAll) == before


def test_a_run_in_another_thread_does_not_stop_an_existing_session(spark: SparkSession) -> None:
    def run() -> None:
        resource = SparkResource()
        resource.session()
        resource.teardown_after_execution(None)  # type: ignore[arg-type]  # the resource does not use the context

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert spark.range(3).count() == 3


def test_the_last_of_two_runs_stops_their_shared_session(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Session] = []

    def new_session(*_: object, **__: object) -> Session:
        if not started or not started[-1].running:
            started.append(Session())
        return started[-1]

    def running_session() -> Session | None:
        return started[-1] if started and started[-1].running else None

    monkeypatch.setattr(coranto_consumers.spark.session.sessions, "new_session", new_session)
    monkeypatch.setattr(coranto_consumers.spark.session.sessions, "running_session", running_session)
    first, second = SparkResource(), SparkResource()
    assert first.session() is second.session()
    first.teardown_after_execution(None)  # type: ignore[arg-type]  # the resource does not use the context
    assert started[0].running
    second.teardown_after_execution(None)  # type: ignore[arg-type]  # the resource does not use the context
    assert not started[0].running


@pytest.mark.parametrize("used", [True, False])
def test_an_early_session_starts_with_the_run_and_ends_with_it(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    started, warmed = Session(), threading.Event()
    monkeypatch.setattr(coranto_consumers.spark.session.sessions, "new_session", lambda *_, **__: started)
    monkeypatch.setattr(coranto_consumers.spark.session.sessions, "running_session", lambda: None)
    monkeypatch.setattr(coranto_consumers.spark.session.sessions, "warm_up", lambda session: warmed.set())
    resource = SparkResource(early=True)
    resource.setup_for_execution(None)  # type: ignore[arg-type]  # the resource does not use the context
    assert warmed.wait(60)
    if used:
        assert resource.session() is resource.session() is started  # type: ignore[comparison-overlap]
    assert started.running
    resource.teardown_after_execution(None)  # type: ignore[arg-type]  # the resource does not use the context
    assert not started.running


def test_a_failed_start_of_an_early_session_fails_the_step_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_session(*_: object, **__: object) -> Session:
        raise InvalidInput("Spark needs Java 17")

    monkeypatch.setattr(coranto_consumers.spark.session.sessions, "new_session", no_session)
    monkeypatch.setattr(coranto_consumers.spark.session.sessions, "running_session", lambda: None)
    resource, unused = SparkResource(early=True), SparkResource(early=True)
    for each in (resource, unused):
        each.setup_for_execution(None)  # type: ignore[arg-type]  # the resource does not use the context
    with pytest.raises(InvalidInput, match="Java 17"):
        resource.session()
    for each in (resource, unused):
        each.teardown_after_execution(None)  # type: ignore[arg-type]  # the resource does not use the context
