"""The workload: clients that append in all possible ways, request heads and tail journals. All calls are recorded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

from coranto.client import JournalClient
from coranto.client.values import AppendResult
from coranto.errors import CorantoError, CorruptData, OffsetJump
from coranto.labels import label_set
from coranto.testing.histories import Observation, Operation, OperationKind, OperationOutcome, unique_content
from coranto.wire import protocol_pb2 as pb
from tests.simulation.broker.audit import check_acknowledged, check_backlog, check_claims, check_demand
from tests.simulation.broker.frame_load import GONE, FrameLoad
from tests.simulation.broker.world import BrokerHost, World

_OWNERS = ("ada", "bob", "cleo")


class Workload:
    """Writers and tail readers. `run` ends when all writers are done. Readers continue until `stop`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._known_end: dict[str, int] = {}
        self._frames = FrameLoad(world, self)
        self._readers: list[asyncio.Task[None]] = []
        self.read_to: dict[tuple[str, str], int] = {}
        """The offset that each reader has reached, by reader and journal."""

    async def run(self) -> None:
        world = self._world
        for number in range(world.options.readers):
            for journal in world.journals:
                reader = world.clients.start(self._tail(f"reader-{number}", journal), name=f"read {journal}")
                self._readers.append(reader)
        writers = [world.clients.start(self._write(f"writer-{n}")) for n in range(world.options.writers)]
        await asyncio.gather(*writers)

    async def stop(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _write(self, name: str) -> None:
        world, rng = self._world, self._rng
        pause = world.options.seconds / world.options.appends
        for _ in range(world.options.appends):
            await asyncio.sleep(rng.uniform(0, 1.6 * pause) if rng.random() < 0.8 else 0.0)
            await self.step(name)

    async def step(self, name: str) -> None:
        """Run one operation of a client, of a random kind."""
        rng, world = self._rng, self._world
        journal = rng.choice(world.journals)
        client = world.client(name, rng.choice(world.machines), retry_timeout=rng.choice((0.0, 2.0, 10.0)))
        if world.options.frames and rng.random() < 0.15:
            await self._frames.step(name, rng.choice(world.machines))
            return
        kind = rng.random()
        if kind < 0.1:
            await self.head(name, client, journal)
        elif kind < 0.2:
            await self.barrier(name, client, journal)
        elif kind < 0.45:
            await self.stream(name, client, journal)
        elif kind < 0.55:
            await self.append_concurrently(name, rng.choice(world.machines))
        else:
            await self.append(name, client, journal)

    async def head(self, name: str, client: JournalClient, journal: str) -> Operation:
        operation = self._begin(name, OperationKind.HEAD, journal)

        async def request() -> None:
            operation.begin = operation.end = await client.head(journal)
            operation.outcome = OperationOutcome.OK

        await self.finish(operation, request())
        return operation

    async def barrier(self, name: str, client: JournalClient, journal: str) -> Operation:
        operation = self._begin(name, OperationKind.BARRIER, journal)
        await self.finish(operation, self.applied(operation, client.append(journal, b"")))
        return operation

    async def append(self, name: str, client: JournalClient, journal: str, *, plain: bool = False) -> Operation:
        """Append, and repeat it until it may have been applied."""
        operation = self.begin_append(name, journal, plain=plain)
        await self.finish(operation, self.applied(operation, self.begun(client, operation)))
        return operation

    async def append_concurrently(self, name: str, machine: BrokerHost) -> None:
        """Append concurrently to any journals. Some callers do not wait for the outcome.

        Without retries, appends that share a stream commit in the order of the calls.
        """
        rng, world = self._rng, self._world
        retry_timeout = rng.choice((0.0, 2.0))
        client = world.client(name, machine, retry_timeout=retry_timeout)
        given = [self.begin_append(name, rng.choice(world.journals)) for _ in range(rng.randint(2, 10))]

        async def one(operation: Operation) -> None:
            try:
                async with asyncio.timeout(rng.uniform(0, 0.02) if rng.random() < 0.1 else None):
                    await self.applied(operation, self.begun(client, operation))
            except TimeoutError:
                world.coverage.sometimes("one of several appends was given up")
                operation.outcome, operation.error = OperationOutcome.INFO, GONE

        await asyncio.gather(*(self.finish(operation, one(operation)) for operation in given))
        if not retry_timeout:  # Each is sent once.
            self._frames.check_order(name, given)

    async def stream(self, name: str, client: JournalClient, journal: str) -> Operation:
        """Append in one call, in pieces. Some are abandoned before or after the commit may have been sent."""
        rng = self._rng
        operation = self.begin_append(name, journal)
        give_up = rng.random()
        appender = client.appender(
            journal,
            offset=operation.offset,
            check_registers=operation.check,
            union_registers=operation.union,
            subtract_registers=operation.subtract,
        )

        async def work() -> None:
            async with appender as append:
                left = operation.content
                while left:
                    size = rng.randint(1, len(left))
                    await append.write(left[:size])
                    left = left[size:]
                    if give_up < 0.25 and rng.random() < 0.4:
                        self._world.coverage.sometimes("an append was aborted mid-stream")
                        operation.outcome, operation.error = OperationOutcome.FAIL, "aborted"
                        return
                    if rng.random() < 0.2:
                        await asyncio.sleep(rng.uniform(0, 0.05))
                commit = asyncio.ensure_future(append.commit())
                try:
                    async with asyncio.timeout(rng.uniform(0, 0.01) if give_up > 0.85 else None):
                        await self.applied(operation, asyncio.shield(commit))
                except TimeoutError:
                    self._world.coverage.sometimes("a client went away during its commit")
                    operation.outcome, operation.error = OperationOutcome.INFO, GONE
                finally:
                    commit.cancel()
                    await asyncio.gather(commit, return_exceptions=True)

        await self.finish(operation, work())
        return operation

    # -- Steps ---------------------------------------------------------------------------------------------------------

    def begun(self, client: JournalClient, operation: Operation) -> Awaitable[AppendResult]:
        return client.append(
            operation.journal,
            operation.content,
            offset=operation.offset,
            check_registers=operation.check,
            union_registers=operation.union,
            subtract_registers=operation.subtract,
        )

    def _begin(self, name: str, kind: OperationKind, journal: str) -> Operation:
        return self._world.history.begin(name, kind, journal, self._world.loop.time())

    def begin_append(self, name: str, journal: str, *, plain: bool = False) -> Operation:
        rng = self._rng
        operation = self._begin(name, OperationKind.APPEND, journal)
        operation.content = unique_content(operation.number, rng, 20, 400)
        if plain:
            return operation
        if rng.random() < 0.15:
            operation.offset = self._known_end.get(journal, 0)
        if rng.random() < 0.3:
            owner = rng.choice(_OWNERS)
            if rng.random() < 0.6:
                operation.check = pb.LabelSelector(include=label_set(owner=rng.choice((*_OWNERS, owner))))
            operation.union = label_set(owner=owner)
            if rng.random() < 0.3:
                operation.subtract = label_set(owner=rng.choice(_OWNERS))
        return operation

    async def applied(self, operation: Operation, work: Awaitable[AppendResult]) -> None:
        result = await work
        operation.begin, operation.end = result.begin, result.end
        operation.registers = result.registers
        operation.outcome = OperationOutcome.OK
        operation.returned = self._world.loop.time()
        journal = operation.journal
        self._known_end[journal] = max(self._known_end.get(journal, 0), result.end)
        if result.end > result.begin:
            check_acknowledged(self._world, operation, result.header.route)
            check_backlog(self._world, operation, result.header.route)
            if self._world.options.durability:
                await self._assure(operation, result)

    async def _assure(self, operation: Operation, result: AppendResult) -> None:
        """Check the durability that was reported to the client, and sometimes wait for more."""
        world, rng = self._world, self._rng
        assert result.durability is not None
        check_claims(world, operation, result.durability)
        check_demand(world, operation, result.durability)
        if rng.random() < 0.3:
            synced, number = rng.random() < 0.7, rng.randint(1, 2)
            with contextlib.suppress(CorantoError):  # It is less durable, or no broker answers.
                found = await result.durable(
                    replicas=number, zones=number, synced=synced, retry_timeout=rng.choice((0, 3))
                )
                world.coverage.sometimes("an append survived what its client waited for")
                check_claims(world, operation, found)

    async def finish(self, operation: Operation, work: Awaitable[None]) -> None:
        """Await an operation and record its outcome."""
        coverage = self._world.coverage
        try:
            await work
        except CorantoError as error:
            operation.failed(error)
            if isinstance(error, CorruptData):
                self._world.problems.append(f"{operation}: {error}")
            coverage.sometimes(f"{operation.kind.value}: {type(error).__name__}")
        operation.returned = self._world.loop.time()
        self._world.loop.note(str(operation))

    async def _tail(self, name: str, journal: str) -> None:
        """Follow a journal from its beginning, through one broker after another."""
        world, rng = self._world, self._rng
        offset = 0
        while True:
            machine = rng.choice(world.machines)
            client = world.client(name, machine, retry_timeout=5.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(1.0, 8.0)):
                    try:
                        async with contextlib.aclosing(
                            client.read(journal, offset, block=True, direct=False, fail_on_jump=True)
                        ) as chunks:
                            async for chunk in chunks:
                                by = f"{name} through {machine.name}"
                                content = world.unflipped(journal, chunk.offset, chunk.content)
                                seen = Observation(by, journal, chunk.offset, content, world.loop.time())
                                world.history.observations.append(seen)
                                offset = chunk.end
                                self.read_to[name, journal] = offset
                    except (OffsetJump, CorruptData) as error:
                        damaged = any(flip.fragment.journal == journal for flip in world.flips)
                        if isinstance(error, OffsetJump) or not damaged:
                            world.problems.append(f"{name}: {error}")
                        await asyncio.sleep(1.0)
                    except CorantoError as error:
                        world.coverage.sometimes(f"read: {type(error).__name__}")
                        await asyncio.sleep(0.2)
