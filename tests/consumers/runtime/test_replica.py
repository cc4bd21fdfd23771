"""What a replica tells of itself, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from coranto.coordination.etcd import EtcdHeader, KeyValue, TxnResult
from coranto.coordination.layout import MemberId
from coranto.effects import SystemClock
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
