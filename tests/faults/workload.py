"""Clients of the cluster, which continuously append in several ways and read. The history records all their calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Awaitable, Sequence

from coranto.client import AppendService, ClientConfig, JournalClient
from coranto.client.append.service import Appended
from coranto.errors import CorantoError, CorruptData, OffsetJump
from coranto.labels import label_set
from coranto.testing.histories import (
    History,
    Observation,
    Operation,
    OperationKind,
    OperationOutcome,
    RecordedClient,
    unique_content,
)
from coranto.wire import protocol_pb2 as pb
from tests.faults.cluster import FaultyCluster
from tests.servers.processes import until

TIMEOUT_SECONDS = 60.0
_OWNERS = ("ada", "bob", "cleo")
_GROWTH = 0.1
"""A journal is read again once the number of acknowledged appends has grown by this share, and by ten."""


class FaultWorkload:
    """Writers and readers in each of `zones`. They run from `start` to `stop`."""

    def __init__(
        self,
        cluster: FaultyCluster,
        journals: Sequence[str],
        zones: Sequence[str],
        rng: random.Random,
        pace: float,
        outstanding: int = 6,
    ) -> None:
        """Prepare a workload. `pace` is the average number of seconds between a writer's appends.

        A writer of batches has at most `outstanding` appends in flight.

        Without a pause, appends are small, so that journals with many appends can be read often.
        """
        self._large_part = 0.08 if pace else 0.0
        self._max_bytes = 2000 if pace else 300
        self.history = History()
        self.problems: list[str] = []
        self.acknowledged: Counter[str] = Counter()
        """The number of acknowledged appends, by journal."""
        self.read_to: dict[tuple[str, str], int] = {}
        """The offset of each following reader, by its name and journal."""
        self.seen: dict[str, bytearray] = {journal: bytearray() for journal in journals}
        """The first content read at each offset, from offset zero on, by journal."""
        self._cluster = cluster
        self._journals = journals
        self._zones = zones
        self._rng = rng
        self._pace = pace
        self._outstanding = outstanding
        self._stopping = False
        self._known_end: dict[str, int] = {}
        self._writers: list[asyncio.Task[None]] = []
        self._readers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        endpoint = self._cluster.endpoint
        for zone in self._zones:
            config = ClientConfig(endpoint, retry_timeout=TIMEOUT_SECONDS, zone=zone)
            self._writers.append(asyncio.create_task(self._batches(f"batches-{zone}", config)))
            self._writers.append(asyncio.create_task(self._calls(f"calls-{zone}", config)))
            for journal in self._journals:
                self._readers.append(asyncio.create_task(self._follow(f"follower-{zone}", config, journal)))
            self._readers.append(asyncio.create_task(self._from_zero(f"rereader-{zone}", config)))
            self._readers.append(asyncio.create_task(self._lists(f"lister-{zone}", config)))

    async def progress(self, appends: int = 20) -> None:
        """Wait until `appends` more appends of every journal are acknowledged."""
        goal = {journal: self.acknowledged[journal] + appends for journal in self._journals}

        def reached() -> bool:
            self.check_alive()
            return all(self.acknowledged[journal] >= goal[journal] for journal in self._journals)

        await until(reached, f"appends continue; {self._cluster.state_of(self._journals)}")

    def check_alive(self) -> None:
        """Raise the exception that ended a writer or reader, if any."""
        for task in (*self._writers, *self._readers):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def finish_writing(self) -> None:
        """Stop the writers, and return once each has the answer to its last call."""
        self._stopping = True
        await asyncio.gather(*self._writers)

    async def stop(self) -> None:
        """End all writers and readers. The outcome of calls in progress is unknown."""
        for task in (*self._writers, *self._readers):
            task.cancel()
        await asyncio.gather(*self._writers, *self._readers, return_exceptions=True)

    async def append_plainly(self, name: str, client: JournalClient, journal: str) -> Operation:
        """Append once, and record it like the writers' appends."""
        return self._note(await RecordedClient(client, self.history, name).append(journal, self._payload(20, 100)))

    # -- Writers -----------------------------------------------------------------------------------------------------

    async def _batches(self, name: str, config: ClientConfig) -> None:
        """Append through the append service, with several appends in flight."""
        slots = asyncio.Semaphore(self._outstanding)
        waiting: set[asyncio.Task[None]] = set()
        async with JournalClient.of(config) as client:
            service = AppendService(client, retry_unknown=False, retry_timeout=TIMEOUT_SECONDS)
            while not self._stopping:
                await slots.acquire()
                operation = self._begin_append(name, self._rng.choice(self._journals), 20, self._max_bytes)
                done = service.append_nowait(operation.journal, operation.content)
                task = asyncio.create_task(self._resolve(operation, done, service, slots))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                await self._pause()
            await asyncio.gather(*waiting)

    async def _resolve(
        self, operation: Operation, done: asyncio.Future[Appended], service: AppendService, slots: asyncio.Semaphore
    ) -> None:
        async def work() -> None:
            piece = await done
            operation.succeeded(piece.begin, piece.end, piece.batch.registers)

        await self._finish(operation, work())
        if operation.outcome is not OperationOutcome.OK:
            service.reset(operation.journal)
        slots.release()

    async def _calls(self, name: str, config: ClientConfig) -> None:
        """Append in all ways, one after the other: guarded by registers, at an offset, in pieces, or empty."""
        rng = self._rng
        async with JournalClient.of(config) as client:
            recorded = RecordedClient(client, self.history, name)
            while not self._stopping:
                journal = rng.choice(self._journals)
                kind = rng.random()
                if kind < 0.1:
                    self._note(await recorded.barrier(journal))
                elif kind < 0.1 + self._large_part:
                    operation = self._begin_append(name, journal, 20_000, 60_000)
                    await self._finish(operation, self._in_pieces(operation, client))
                else:
                    self._note(await self._guarded(recorded, journal))
                await self._pause()

    async def _guarded(self, client: RecordedClient, journal: str) -> Operation:
        rng = self._rng
        owners = [label_set(owner=rng.choice(_OWNERS)) for _ in range(3)]
        return await client.append(
            journal,
            self._payload(20, 500),
            offset=self._known_end.get(journal, 0) if rng.random() < 0.2 else 0,
            check_registers=pb.LabelSelector(include=owners[0]) if rng.random() < 0.6 else None,
            union_registers=owners[1],
            subtract_registers=owners[2] if rng.random() < 0.2 else None,
        )

    async def _in_pieces(self, operation: Operation, client: JournalClient) -> None:
        content = operation.content
        async with client.appender(operation.journal) as append:
            for begin in range(0, len(content), 16_000):
                await append.write(content[begin : begin + 16_000])
            if self._rng.random() < 0.2:
                operation.outcome, operation.error = OperationOutcome.FAIL, "aborted"
                return
            result = await append.commit()
            operation.succeeded(result.begin, result.end, result.registers)

    async def _pause(self) -> None:
        if self._pace:
            await asyncio.sleep(self._rng.uniform(0, 2 * self._pace))

    # -- Readers -----------------------------------------------------------------------------------------------------

    async def _follow(self, name: str, config: ClientConfig, journal: str) -> None:
        """Read a journal from its beginning, and then follow the writers."""
        self.read_to[name, journal] = 0
        async with JournalClient.of(config) as client:
            while True:
                await self._read(name, client, journal, block=True, direct=True)

    async def _from_zero(self, name: str, config: ClientConfig) -> None:
        """Read all content of a journal repeatedly, each time with a new client: from brokers, or from the store."""
        while True:
            journal, direct = self._rng.choice(self._journals), self._rng.random() < 0.5
            goal = self._next_goal(journal)
            async with JournalClient.of(config) as client:
                await self._read(name, client, journal, block=False, direct=direct)
            await until(lambda: self.acknowledged[journal] >= goal, "appends continue", math.inf)  # noqa: B023

    async def _lists(self, name: str, config: ClientConfig) -> None:
        """Read all content linearizably, repeatedly."""
        async with JournalClient.of(config) as client:
            recorded = RecordedClient(client, self.history, name)
            while True:
                for journal in self._journals:
                    goal = self._next_goal(journal)
                    await recorded.read(journal)
                await until(lambda: self.acknowledged[journal] >= goal, "appends continue", math.inf)  # noqa: B023

    async def _read(self, name: str, client: JournalClient, journal: str, *, block: bool, direct: bool) -> None:
        offset = self.read_to[name, journal] if block else 0
        try:
            chunks = client.read(journal, offset, block=block, direct=direct, fail_on_jump=True)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    self._saw(name, journal, chunk.offset, chunk.content)
                    if block:
                        self.read_to[name, journal] = chunk.end
        except (OffsetJump, CorruptData) as error:
            self.problems.append(f"{name} of {journal}: {error}")
            raise
        except CorantoError:
            # Brokers could not serve until the client's retry timeout. The next client continues.
            await asyncio.sleep(0.2)

    def _saw(self, name: str, journal: str, offset: int, content: bytes) -> None:
        seen = self.seen[journal]
        known = seen[offset : offset + len(content)]
        if len(known) == len(content) and known == content:
            return  # Recorded already.
        self.history.observations.append(Observation(name, journal, offset, content, self._now()))
        if known == content[: len(known)]:
            seen += content[len(known) :]

    # -- History -----------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _begin_append(self, name: str, journal: str, low: int, high: int) -> Operation:
        operation = self.history.begin(name, OperationKind.APPEND, journal, self._now())
        operation.content = unique_content(operation.number, self._rng, low, high)
        return operation

    def _next_goal(self, journal: str) -> int:
        """Return the number of acknowledged appends that triggers the next read of a journal."""
        known = self.acknowledged[journal]
        return known + max(10, round(known * _GROWTH))

    def _payload(self, low: int, high: int) -> bytes:
        return self._rng.randbytes(self._rng.randint(low, high) // 2).hex().encode()

    async def _finish(self, operation: Operation, work: Awaitable[None]) -> None:
        """Await an operation and record its outcome."""
        try:
            await work
        except CorantoError as error:
            operation.failed(error)
        operation.returned = self._now()
        self._note(operation)

    def _note(self, operation: Operation) -> Operation:
        """Count an acknowledged operation, and note corrupt data as a problem."""
        journal = operation.journal
        if operation.outcome is OperationOutcome.OK:
            self._known_end[journal] = max(self._known_end.get(journal, 0), operation.end)
            self.acknowledged[journal] += 1
        elif operation.error.startswith(CorruptData.__name__):
            self.problems.append(str(operation))
        return operation
