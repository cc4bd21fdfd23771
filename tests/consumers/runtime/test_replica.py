"""The status that a replica reports, and for how long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from coranto.coordination.etcd import EtcdHeader, KeyValue, TxnResult
from coranto.coordination.layout import MemberId
from coranto.effects import Clock, SystemClock
from coranto.errors import IndexHasGreaterOffset, StatusError, StoreUnhealthy
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.consumer import Consumer
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.replica import ShardReplica
from coranto_consumers.runtime.testing import shard_spec

ME = MemberId("zone", "me")


class Host:
    """Takes down what replicas tell."""

    coordinator: Any = None
    recovery_folder: Any = None

    def __init__(self) -> None:
        self.told: list[int] = []
        self.entropy = bytes

    async def set_status(self, shard: str, status: pc.ReplicaStatus, is_due: Callable[[], bool]) -> None:
        if is_due():
            self.told.append(status.code)

    def fqn_of(self, shard: str) -> str:
        return shard

    def earlier_shards(self, shard: str) -> list[pc.ShardSpec]:
        return []

    def assignment_of(self, shard: str) -> KeyValue | None:
        return None


async def test_a_replica_that_is_being_stopped_does_not_tell_that_it_fails():
    host, opened, gate = Host(), asyncio.Event(), asyncio.Event()

    class Failing:
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
    assert host.told == [pc.ReplicaStatus.STANDBY]


async def test_a_status_is_not_written_into_the_assignment_that_came_after():
    """Another replica's, of the same process: it is met when the write finds the assignment changed."""
    due = True

    class Changed:
        def __init__(self) -> None:
            self.written: list[Any] = []

        async def txn(self, compares: Any, ops: Any) -> TxnResult:
            nonlocal due
            if due:
                due = False  # The replica is told to stop as soon as the process sees the other assignment.
                return TxnResult(False, EtcdHeader(1, 1, 7, 1))
            self.written += ops
            return TxnResult(True, EtcdHeader(1, 1, 8, 1))

    async def see(revision: int) -> None:
        """The key space has caught up."""

    coordinator = Changed()
    assignment = SimpleNamespace(member=ME, kv=KeyValue("assign/shard", b""), value=pc.ReplicaStatus())
    keyspace = SimpleNamespace(state=SimpleNamespace(assignments=lambda shard: [assignment]), wait_for_revision=see)
    consumer: Any = SimpleNamespace(member=ME, keyspace=keyspace, coordinator=coordinator, clock=SystemClock())
    failed = pc.ReplicaStatus(code=pc.ReplicaStatus.FAILED, errors=["fenced"])
    await Consumer.set_status(consumer, "shard", failed, lambda: due)
    assert coordinator.written == []


class WithoutStore:
    """An application whose appends are refused before `back`."""

    def __init__(self, clock: Clock, back: float, refusal: type[StatusError] = IndexHasGreaterOffset) -> None:
        self.clock = clock
        self.back = back
        self.refusal = refusal
        self.opened = asyncio.Event()

    async def new_store(self, shard: Any) -> None:
        if self.clock.monotonic() < self.back:
            raise self.refusal("append to out/one")
        self.opened.set()
        await asyncio.Event().wait()


def test_a_shard_waits_for_brokers_that_know_a_journal_s_end():
    async def main(loop: SimLoop) -> None:
        clock, host = SimClock(loop), Host()
        begun = clock.monotonic()
        app: Any = WithoutStore(clock, begun + 45)
        client: Any = None
        replica = ShardReplica(
            app, shard_spec("shard-sums", ["in/one"]), client, host, clock=clock, metrics=ConsumerMetrics()
        )
        replica.start()
        replica.promote()
        await app.opened.wait()
        assert 45 <= clock.monotonic() - begun < 50
        await replica.stop()
        assert pc.ReplicaStatus.FAILED not in host.told

    with simulated(0) as loop, capture_logs() as logs:
        loop.run_until_complete(main(loop))
    assert {each["event"] for each in logs} == {"shard.waiting_for_brokers"}
    assert all("INDEX_HAS_GREATER_OFFSET" in each["error"] for each in logs)


def test_a_shard_waits_however_long_a_fragment_store_holds_appends_back():
    async def main(loop: SimLoop) -> None:
        clock, host = SimClock(loop), Host()
        begun = clock.monotonic()
        app: Any = WithoutStore(clock, begun + 3600, StoreUnhealthy)
        client: Any = None
        replica = ShardReplica(
            app, shard_spec("shard-sums", ["in/one"]), client, host, clock=clock, metrics=ConsumerMetrics()
        )
        replica.start()
        replica.promote()
        await app.opened.wait()
        assert 3600 <= clock.monotonic() - begun < 3605
        await replica.stop()
        assert pc.ReplicaStatus.FAILED not in host.told

    with simulated(0) as loop, capture_logs() as logs:
        loop.run_until_complete(main(loop))
    assert {each["event"] for each in logs} == {"shard.waiting_for_store"}


def test_a_shard_fails_when_nobody_comes_back_who_knows_a_journal_s_end():
    async def main(loop: SimLoop) -> None:
        clock, host = SimClock(loop), Host()
        begun = clock.monotonic()
        app: Any = WithoutStore(clock, math.inf)
        client: Any = None
        replica = ShardReplica(
            app, shard_spec("shard-sums", ["in/one"]), client, host, clock=clock, metrics=ConsumerMetrics()
        )
        replica.start()
        replica.promote()
        await replica.stopped.wait()
        assert 60 <= clock.monotonic() - begun < 65
        await replica.stop()
        assert host.told[-1] == pc.ReplicaStatus.FAILED

    with simulated(0) as loop:
        loop.run_until_complete(main(loop))
