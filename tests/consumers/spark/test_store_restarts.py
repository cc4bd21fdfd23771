"""A consumer whose PostgreSQL is restarted, at each step of a transaction that uses it."""

from collections.abc import Iterator

import pytest

from coranto_consumers.spark import Hooks, SparkConsumer, Step
from coranto_consumers.spark.outputs import stores as spark_outputs
from tests.consumers.spark.consumer.test_consumer import LoggedDelays, World, check_logged
from tests.servers.sql import PostgresServer


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:  # Other tests share a server that must stay up.
        yield server


class Restart(Hooks):
    """Restart the server once, after a step or during the commit, so that its response is lost."""

    def __init__(self, server: PostgresServer, step: Step | None, *, crash: bool) -> None:
        self._server, self._step, self._crash = server, step, crash
        self._is_due = True

    def on_step(self, step: Step) -> None:
        if step is self._step and self._is_due:
            self._is_due = False
            self._server.restart(crash=self._crash)

    def commit(self, connection) -> None:
        if self._step is None and self._is_due:
            self._is_due = False
            connection.exec_driver_sql("COMMIT")
            self._server.restart(crash=self._crash)
        connection.commit()


def test_a_postgresql_restart_at_any_step_loses_and_duplicates_nothing(spark, broker, server, monkeypatch):
    # All rows are staged, so that a crash of the server empties the unlogged tables with them.
    monkeypatch.setattr(spark_outputs, "CARRIED_TO_APPEND", 0)
    monkeypatch.setattr(spark_outputs, "CARRIED_TO_MERGE", 0)
    world, store = World(broker), server.new_database()

    def run(hooks: Hooks | None = None):
        return SparkConsumer(LoggedDelays(), broker.config, store, spark, hooks=hooks).run_until_caught_up()

    for step, crash in (
        (Step.MERGED, True),
        (Step.STAGED, True),  # The staged rows are lost.
    ):
        world.publish(15)
        report = run(Restart(server, step, crash=crash))
        assert (report.transactions, report.retries) == (1, 1)
    world.publish(15)
    # An orderly restart between staging and merge, and a lost response to the commit, lose nothing.
    for restart in (Restart(server, Step.STAGED, crash=False), Restart(server, None, crash=True)):
        report = run(restart)
        assert (report.transactions, report.retries) == (1, 0)
        world.publish(15)

    assert run().transactions == 1

    assert run().transactions == 0
    check_logged(world, store)
