"""A consumer whose PostgreSQL is restarted, at each step at which a transaction uses it."""

from collections.abc import Iterator

import pytest

from coranto.errors import SqlStoreError
from coranto_consumers.spark import Hooks, SparkConsumer, Step
from coranto_consumers.spark import outputs as spark_outputs
from coranto_consumers.testing import PostgresServer
from tests.consumers.spark.test_consumer import LoggedDelays, World, check_logged

pytestmark = pytest.mark.integration


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:  # Other tests share one that stays up.
        yield server


class Restart(Hooks):
    """Restarts the server after a step; or in the middle of the commit, whose answer is then lost."""

    def __init__(self, server: PostgresServer, step: Step | None, *, crash: bool) -> None:
        self._server, self._step, self._crash = server, step, crash

    def reached(self, step: Step) -> None:
        if step is self._step:
            self._server.restart(crash=self._crash)

    def commit(self, connection) -> None:
        if self._step is None:
            connection.exec_driver_sql("COMMIT")
            self._server.restart(crash=self._crash)
        connection.commit()


def test_a_restart_of_postgresql_at_any_step_loses_and_doubles_nothing(spark, broker, server, monkeypatch):
    # All rows are staged, so that a crash of the server empties the unlogged tables with them.
    monkeypatch.setattr(spark_outputs, "CARRIED_TO_APPEND", 0)
    monkeypatch.setattr(spark_outputs, "CARRIED_TO_MERGE", 0)
    world, store = World(broker), server.new_database()

    def run(hooks: Hooks | None = None):
        return SparkConsumer(LoggedDelays(), broker.config, store, spark, hooks=hooks).run_until_caught_up()

    for step, crash, problem in (
        (Step.MERGED, False, "a transaction of delays failed|checkpoint could not be written"),
        (Step.MERGED, True, "a transaction of delays failed|checkpoint could not be written"),
        (Step.STAGED, True, "rows were staged but 0 are there"),
    ):
        world.publish(15)
        with pytest.raises(SqlStoreError, match=problem):
            run(Restart(server, step, crash=crash))
    world.publish(15)
    # Nothing is lost in an orderly restart between the staging and the merge, nor by a lost answer to the commit.
    assert run(Restart(server, Step.STAGED, crash=False)).transactions == 1
    world.publish(15)
    assert run(Restart(server, None, crash=True)).transactions == 1

    assert run().transactions == 0
    check_logged(world, store)
