"""One run: a cluster, its journals in an S3 server, and a workload, from the start to the verdict."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coranto.client import JournalClient
from coranto.fragments.stores import StoreRegistry
from coranto.process.staged import StagedContext
from coranto.wire import protocol_pb2 as pb
from tests.faults.cluster import FaultyCluster
from tests.faults.namespaces import Namespaces
from tests.faults.verdict import FaultVerdict, conclude
from tests.faults.workload import FaultWorkload
from tests.servers.applying import apply_specs
from tests.servers.processes import until
from tests.servers.s3 import ANY_KEY, S3Server


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run. Brokers are assigned to `zones` in turn; there is one journal per replication."""

    seed: int = 0
    brokers: int = 3
    zones: tuple[str, ...] = ("a", "b")
    replications: tuple[int, ...] = (2, 2)
    """The replication of each journal. If it is the number of brokers, a lost broker stops the journal's appends."""
    lease_seconds: float = 4.0
    pace: float = 0.05
    """The average seconds between a writer's appends."""
    outstanding: int = 6
    """The most appends in flight of a writer of batches."""


class FaultRun(StagedContext):
    """One run. Use as `async with FaultRun(…) as run:`, apply faults, and get the verdict: `await run.conclude()`."""

    def __init__(self, folder: Path, server: S3Server, options: RunOptions, network: Namespaces | None = None) -> None:
        """Create a run. With a `network`, brokers run in its namespaces, and the server must be at its gateway."""
        super().__init__()
        self.options = options
        self.rng = random.Random(options.seed)
        self.journals: Sequence[str] = [f"faults/{n}-r{count}" for n, count in enumerate(options.replications)]
        self.cluster = FaultyCluster(
            folder,
            brokers=options.brokers,
            zones=options.zones,
            lease_seconds=options.lease_seconds,
            environment=ANY_KEY.environment | server.environment,
            network=network,
        )
        self.workload = FaultWorkload(
            self.cluster, self.journals, options.zones, self.rng, options.pace, options.outstanding
        )
        self._server = server
        self._bucket = f"faults-{os.urandom(4).hex()}"
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def store(self) -> str:
        return self._server.store_url(self._bucket)

    async def _start(self) -> None:
        os.environ.update(ANY_KEY.environment | self._server.environment)
        self._server.create_bucket(self._bucket)
        await self._exits.enter_async_context(self.cluster)
        self._exits.push_async_callback(self.workload.stop)
        await self.replicate(dict(zip(self.journals, self.options.replications, strict=True)))
        self._supervisor = asyncio.create_task(self.cluster.supervise())
        self._exits.push_async_callback(self._end_supervision)
        self.workload.start()
        await self.workload.progress()

    async def replicate(self, replications: dict[str, int]) -> None:
        """Set the replication of journals, create missing ones, and return once all have their replicas."""
        async with JournalClient(self.cluster.endpoint) as client:
            await apply_specs(client, [self._spec(journal, count) for journal, count in replications.items()])
        await self.whole()

    async def whole(self) -> None:
        """Wait until all journals have all their replicas, in sync."""
        await until(
            lambda: all(map(self.cluster.ground.is_whole, self.journals)),
            f"journals are whole; {self.cluster.state_of(self.journals)}",
        )

    async def conclude(self) -> FaultVerdict:
        """Heal the cluster, prove that it works again, end the workload, and return the verdict."""
        verdict = await conclude(self.cluster, self.workload, self.journals, StoreRegistry(), self.store)
        if self._supervisor is not None and self._supervisor.done():
            verdict.problems.append(f"brokers were not restarted: {self._supervisor.exception()}")
        return verdict

    async def _end_supervision(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def _spec(self, journal: str, replication: int) -> pb.JournalSpec:
        spec = pb.JournalSpec(name=journal, replication=replication)
        spec.fragment.length = 64 << 10 if self.options.pace else 1 << 20
        spec.fragment.compression_codec = pb.ZSTANDARD
        spec.fragment.refresh_interval.seconds = 2
        spec.fragment.stores.append(self.store)
        return spec
