"""Clients that use frames: streams that move to them while appends are in flight, and clients that never read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import grpc.aio

from coranto.client.values import AppendResult
from coranto.testing.histories import Operation, OperationOutcome
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswers, AppendBatch
from tests.simulation.broker.frame_audit import FrameAudit
from tests.simulation.broker.world import BrokerHost, World
from tests.simulation.kit.checker import Anomaly

if TYPE_CHECKING:
    from tests.simulation.broker.workload import Workload

ANSWER_SECONDS = 120.0
"""The time until each append ends, under all faults: with an answer or a broken connection."""
GONE = "gone away"
"""The error of an operation whose caller did not wait for its outcome."""


class FrameLoad:
    """Appends over frames, for a workload."""

    def __init__(self, world: World, workload: Workload) -> None:
        self._world = world
        self._workload = workload
        self._rng = world.rng
        self._audit = FrameAudit(world)

    async def step(self, name: str, machine: BrokerHost) -> None:
        """Run one of a client's operations over frames."""
        rng = self._rng
        if rng.random() < 0.2:
            await self._append_unread(name, machine)
        else:
            streams = rng.choice((1, 1, 2))
            await asyncio.gather(*(self._busy(name, machine) for _ in range(streams)))

    async def _busy(self, name: str, machine: BrokerHost) -> None:
        """Append by several tasks over one stream, fast enough that it and replication move to frames."""
        world, rng, workload = self._world, self._rng, self._workload
        retry_timeout = rng.choice((0.0, 0.0, 2.0))
        connection = world.connection(name, machine)
        client = world.client_over(connection, retry_timeout)
        pause = rng.choice((0.0, 0.005, 0.1))
        given: list[Operation] = []

        async def task() -> None:
            for _ in range(rng.randint(3, 9)):
                operation = workload.begin_append(name, rng.choice(world.journals), plain=rng.random() < 0.8)
                given.append(operation)
                await workload.finish(operation, self._in_time(operation, workload.begun(client, operation)))
                self._audit.check(operation, retried=retry_timeout > 0, given_up=operation.error == GONE)
                await asyncio.sleep(rng.uniform(0, pause))

        await asyncio.gather(*(task() for _ in range(rng.randint(2, 5))))
        world.coverage.sometimes("appends moved to frames", connection.append_streams.over_frames)
        if not retry_timeout:
            self.check_order(name, given)
        if rng.random() < 0.5:
            await client.close()

    async def _in_time(self, operation: Operation, append: Awaitable[AppendResult]) -> None:
        rng = self._rng
        gives_up = rng.random() < 0.05
        seconds = rng.uniform(0, 0.02) if gives_up else ANSWER_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._workload.applied(operation, append)
        except TimeoutError:
            operation.outcome, operation.error = OperationOutcome.INFO, GONE
            if not gives_up:
                what = f"{operation} has neither an answer nor a broken connection after {seconds:.0f} s"
                self._world.anomalies.append(Anomaly("unanswered", operation.journal, what))

    async def _append_unread(self, name: str, machine: BrokerHost) -> None:
        """Append and read no answer, for a while or until the end of the run."""
        world, rng, workload = self._world, self._rng, self._workload
        dialer, broker = world.dialer(name, machine.endpoint), machine.broker
        if dialer is None or broker is None or broker.frames is None:
            return
        seconds = rng.choice((0.5, 5.0, 1000.0))
        given: list[Operation] = []
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            call: Any = await dialer.open("AppendStream", broker.frames, None, AppendAnswers.FromString)
            try:
                async with asyncio.timeout(2.0):
                    await call.write(AppendBatch())
                    for _ in range(rng.randint(1, 4)):
                        batch = AppendBatch()
                        for _ in range(rng.randint(1, 20)):
                            operation = workload.begin_append(name, rng.choice(world.journals), plain=True)
                            given.append(operation)
                            request = pb.AppendRequest(journal=operation.journal)
                            batch.appends.add(id=operation.number, request=request, content=operation.content)
                        await call.write(batch)
            finally:
                for operation in given:
                    operation.outcome, operation.error = OperationOutcome.INFO, GONE
                    operation.returned = world.loop.time()
                world.loop.later(seconds, call.cancel)
            world.coverage.sometimes("a client read no answers")

    def check_order(self, name: str, given: list[Operation]) -> None:
        """Check that a client's committed appends are in the journal in the order of its calls."""
        committed = [each for each in given if each.outcome is OperationOutcome.OK]
        options = self._world.options
        if options.shuffle or not options.append_streams or len(committed) < 2:
            return  # The order of sending differs, or is undefined.
        self._world.coverage.sometimes("appends that were given together committed in their order")
        for journal in self._world.journals:
            offsets = [each.begin for each in committed if each.journal == journal]
            if offsets != sorted(offsets):
                self._world.anomalies.append(Anomaly("out-of-order", journal, f"given by {name}: {offsets}"))
