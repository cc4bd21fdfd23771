"""The status that a replica reports, and its duration."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError
from structlog.testing import capture_logs

from coranto.coordination.etcd import EtcdHeader, KeyValue, TxnResult
from coranto.coordination.layout import MemberId
from coranto.effects import Clock, SystemClock
from coranto.errors import (
    IndexHasGreaterOffset,
    SqlStoreError,
    StoreUnhealthy,
    TxnOutcomeUnknown,
    Unavailable,
)
from coranto.testing.fake_broker import CallPoint
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.consumer import Consumer
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.replica import ShardReplica
from coranto_consumers.runtime.testing import shard_spec
from coranto_consumers.stores.sql import SqlStore
from tests.consumers.outages import Outage, OutageClock, ProxiedStore
from tests.consumers.runtime.conftest import Sums
from tests.servers.sql import PostgresServer, PostgresStandby

ME = MemberId("zone", "me")


class Host:
    """A host that records the statuses reported by replicas."""

    coordinator: Any = None
    recovery_folder: Any = None

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.entropy = os.urandom

    async def set_status(self, shard: str, status: pc.ReplicaStatus, is_due: Callable[[], bool]) -> None:
        if is_due():
            self.statuses.append(status.code)

    accept_changes = ""

    def fqn_of(self, shard: str) -> str:
        return shard

    def earlier_shards(self, shard: str) -> list[pc.ShardSpec]:
        return []

    def assignment_of(self, shard: str) -> KeyValue | None:
        return None


async def test_a_stopping_replica_does_not_report_a_failure():
    host, opened, gate = Host(), asyncio.Event(), asyncio.Event()

    class Failing:
        atomic = False

        async def new_store(self, shard: Any) -> None:
            opened.set()
            await gate.wait()
            raise ZeroDivisionError("boom")

    spec = shard_spec("shard-sums", ["in/one"])
    app: Any = Failing()
    client: Any = None
    replica = ShardReplica(app, spec, client, host, clock=SystemClock(), metrics=ConsumerMetrics())
    replica.start()
    replica.promote()
    await opened.wait()
    stopping = replica.stop()
    gate.set()
    await stopping
    assert host.statuses == [pc.ReplicaStatus.STANDBY]


async def test_a_status_is_not_written_into_a_later_assignment():
    """The first write finds a changed assignment, which belongs to a later replica of the same process."""
    due = True

    class Changed:
        def __init__(self) -> None:
            self.written: list[Any] = []

        async def txn(self, compares: Any, ops: Any) -> TxnResult:
            nonlocal due
            if due:
                due = False  # The process stops the replica when it sees the other assignment.
                return TxnResult(False, EtcdHeader(1, 1, 7, 1))
            self.written += ops
            return TxnResult(True, EtcdHeader(1, 1, 8, 1))

    async def see(revision: int) -> None:
        """Return immediately, as the key space is current."""

    coordinator = Changed()
    assignment = SimpleNamespace(member=ME, kv=KeyValue("assign/shard", b""), value=pc.ReplicaStatus())
    keyspace = SimpleNamespace(state=SimpleNamespace(assignments=lambda shard: [assignment]), wait_for_revision=see)
    consumer: Any = SimpleNamespace(member=ME, keyspace=keyspace, coordinator=coordinator, clock=SystemClock())
    failed = pc.ReplicaStatus(code=pc.ReplicaStatus.FAILED, errors=["fenced"])
    await Consumer.set_status(consumer, "shard", failed, lambda: due)
    assert coordinator.written == []


class WithoutStore:
    """An application with a store that cannot be opened before `back`."""

    atomic = False

    def __init__(self, clock: Clock, back: float, error: Callable[[], Exception]) -> None:
        self.clock = clock
        self.back = back
        self.error = error
        self.opened = asyncio.Event()

    async def new_store(self, shard: Any) -> None:
        if self.clock.monotonic() < self.back:
            raise self.error()
        self.opened.set()
        await asyncio.Event().wait()


class ReadOnly(Exception):
    """The error of a PostgreSQL driver when the server has become a standby."""

    sqlstate = "25006"


REFUSALS: list[Callable[[], Exception]] = [
    lambda: IndexHasGreaterOffset("append to out/one"),
    lambda: StoreUnhealthy("append to out/one"),
    lambda: Unavailable("nobody answers"),
    lambda: SqlStoreError("the server is away"),
    lambda: DBAPIError("INSERT", {}, ReadOnly("cannot execute INSERT in a read-only transaction")),
    lambda: TxnOutcomeUnknown("etcd is away"),
]


@pytest.mark.parametrize("error", REFUSALS)
def test_a_shard_waits_for_unavailable_dependencies_without_a_limit(error):
    metrics = ConsumerMetrics()

    async def main(loop: SimLoop) -> None:
        clock, host = SimClock(loop), Host()
        begun = clock.monotonic()
        app: Any = WithoutStore(clock, begun + 3600, error)
        client: Any = None
        replica = ShardReplica(app, shard_spec("shard-sums", ["in/one"]), client, host, clock=clock, metrics=metrics)
        replica.start()
        replica.promote()
        await app.opened.wait()
        assert 3600 <= clock.monotonic() - begun < 3605
        assert 3500 < sample("coranto_shard_outage_seconds") < 3600
        await replica.stop()
        assert pc.ReplicaStatus.FAILED not in host.statuses

    def sample(name: str) -> float:
        return metrics.registry.get_sample_value(name, {"shard": "shard-sums"}) or 0.0

    with simulated(0) as loop, capture_logs() as logs:
        loop.run_until_complete(main(loop))
    assert {each["event"] for each in logs} == {"shard.restarting"}
    assert 55 <= len(logs) <= 61, "one line per minute"
    assert logs[-1]["failures"] > 500
    assert sample("coranto_shard_restarts_total") >= logs[-1]["failures"]


@pytest.mark.parametrize(
    "error",
    [lambda: SqlStoreError("there is no such table", retriable=False), lambda: IntegrityError("", {}, Exception())],
)
def test_a_permanent_error_fails_a_shard_immediately(error):
    async def main(loop: SimLoop) -> None:
        clock, host = SimClock(loop), Host()
        begun = clock.monotonic()
        app: Any = WithoutStore(clock, math.inf, error)
        client: Any = None
        replica = ShardReplica(
            app, shard_spec("shard-sums", ["in/one"]), client, host, clock=clock, metrics=ConsumerMetrics()
        )
        replica.start()
        replica.promote()
        await replica.stopped.wait()
        assert clock.monotonic() < begun + 0.04, "it was retried"
        await replica.stop()
        assert host.statuses[-1] == pc.ReplicaStatus.FAILED

    with simulated(0) as loop:
        loop.run_until_complete(main(loop))


STEPS = {
    "connect": None,
    "fence": ("INSERT INTO gazette_checkpoints", False),
    "checkpoint": ("INSERT INTO gazette_checkpoints", True),
    "statement": ("INSERT INTO sums", False),
    "statement answer": ("INSERT INTO sums", True),
    "fence check": ("UPDATE gazette_checkpoints", False),
    "fence check answer": ("UPDATE gazette_checkpoints", True),
    "commit request": None,
    "commit answer": None,
}


@pytest.mark.parametrize("step", STEPS)
async def test_a_database_outage_at_any_step_loses_and_duplicates_nothing(step, postgres, journals, client):
    with ProxiedStore(postgres.new_database()) as proxied:
        commit = proxied.commit_at(answered=step == "commit answer") if "commit " in step else Connection.commit
        database = SqlStore(proxied.url, commit=commit, sleep=proxied.outage.wait)
        if (place := STEPS[step]) is not None:
            proxied.outage_at(database, place[0], after=place[1])
        elif step == "connect":
            proxied.outage.begin()
        app, host, metrics = Sums(database, "out/one"), Host(), ConsumerMetrics()
        head = await journals.publish("in/one", {"key": "a", "n": 1}, {"key": "b", "n": 2})
        spec = shard_spec("shard-sums", ["in/one"])
        replica = ShardReplica(app, spec, client, host, clock=OutageClock(proxied.outage), metrics=metrics)
        replica.start()
        replica.promote()
        async with asyncio.timeout(120):
            assert await replica.wait_read_through({"in/one": head})
            more = await journals.publish("in/one", {"key": "a", "n": 3})
            assert await replica.wait_read_through({"in/one": more})
        await replica.stop()

        assert len(proxied.outage.waits) == 3
        assert app.sums() == {"a": (4, 2), "b": (2, 1)}
        assert [each["n"] for each in journals.committed("out/one")] == [1, 2, 3]
        assert pc.ReplicaStatus.FAILED not in host.statuses


async def test_a_shard_continues_on_a_standby_once_it_is_promoted(journals, client):
    """The standby is read-only at first, like a demoted primary."""
    with PostgresServer() as primary, PostgresStandby(primary) as standby:
        url = primary.new_database()
        with ProxiedStore(url) as proxied:

            def fail_over() -> None:
                primary.stop()
                proxied.serve_from(standby.port)

            outage = Outage(fail_over, standby.promote)
            database = SqlStore(proxied.url, sleep=outage.wait)
            app, host = Sums(database, "out/one"), Host()
            spec = shard_spec("shard-sums", ["in/one"])
            replica = ShardReplica(app, spec, client, host, clock=OutageClock(outage), metrics=ConsumerMetrics())
            replica.start()
            replica.promote()
            async with asyncio.timeout(120):
                head = await journals.publish("in/one", {"key": "a", "n": 1})
                assert await replica.wait_read_through({"in/one": head})
                app.before = lambda message: outage.begin()
                head = await journals.publish("in/one", {"key": "a", "n": 2})
                assert await replica.wait_read_through({"in/one": head})
            await replica.stop()
            assert len(outage.waits) == 3
            assert app.sums() == {"a": (3, 2)}
            assert [each["n"] for each in journals.committed("out/one")] == [1, 2]
            assert pc.ReplicaStatus.FAILED not in host.statuses


async def test_a_broker_outage_at_the_acknowledgement_loses_and_duplicates_nothing(postgres, journals, client):
    """Brokers refuse the acknowledgement and later messages ten times."""
    database = SqlStore(postgres.new_database())
    app, host = Sums(database, "out/one"), Host()
    down: list[grpc.StatusCode | int | None] = [grpc.StatusCode.UNAVAILABLE, pb.NO_JOURNAL_PRIMARY_BROKER] * 5
    journals.fake.at(
        CallPoint.APPEND_BEGUN, None, *down
    )  # The messages are accepted, and the acknowledgement is refused.
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    replica = ShardReplica(
        app, shard_spec("shard-sums", ["in/one"]), client, host, clock=SystemClock(), metrics=ConsumerMetrics()
    )
    replica.start()
    replica.promote()
    async with asyncio.timeout(120):
        assert await replica.wait_read_through({"in/one": head})
    await replica.stop()
    await journals.fake.reached(CallPoint.APPEND_BEGUN, 12)
    assert app.sums() == {"a": (1, 1)}
    assert [each["n"] for each in journals.committed("out/one")] == [1]
    assert pc.ReplicaStatus.FAILED not in host.statuses
