"""Ingest processes that are killed at random moments."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coranto.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.streams.model.stream import transactions_journal
from tests.platform.ingest.lists import until

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
_GROWN_SECONDS = 240.0
"""The time for a batch while servers of source and stream restart."""


@contextmanager
def two_brokers(folder: Path) -> Iterator[EmbeddedCluster]:
    """Run a cluster that survives the death of its second broker, which it restarts."""
    with EmbeddedCluster(folder / "cluster", brokers=2, lease_seconds=60, etcd_fsync=False) as cluster:
        yield cluster


def crash_broker(cluster: EmbeddedCluster) -> None:
    """Kill the second broker and restart it. The cluster itself gives up after ten deaths in quick succession."""
    cluster.kill_broker(1)
    cluster.start_broker(1)


class Killing:
    """A runner of ingest processes, one or two at a time, that kills each at a random moment.

    Every second turn has one of `outages`, such as the death of a broker.
    """

    def __init__(
        self,
        client: JournalClient,
        stream: str,
        file: Path,
        chance: random.Random,
        outages: Sequence[Callable[[], object]],
        *options: str,
    ) -> None:
        self._client = client
        self._stream = stream
        self._file = file
        self._chance = chance
        self._outages = outages
        self._options = options
        self._turns = self._killed = 0

    def is_over(self, kills: int) -> bool:
        """Return True once `kills` processes are killed and each outage has happened."""
        return self._killed >= kills and self._turns >= 2 * len(self._outages)

    async def turn(self) -> None:
        """Run processes until they are killed or have read everything."""
        outage = self._outages[self._turns // 2 % len(self._outages)] if self._turns % 2 else None
        self._turns += 1
        # Some die during startup, most during commits. Two at a time compete.
        lives = [
            live(self._file, self._client, self._moment(), *self._options) for _ in range(self._chance.choice((1, 2)))
        ]
        ends, _ = await asyncio.gather(asyncio.gather(*lives), self._later(outage))
        self._killed += ends.count(None)

    async def complete(self) -> None:
        """Run a process until everything is in the stream."""
        await live(self._file, self._client, None)

    async def _later(self, outage: Callable[[], object] | None) -> None:
        if outage is not None:
            await asyncio.sleep(self._chance.uniform(0, 2))
            await asyncio.to_thread(outage)

    async def _moment(self) -> None:
        """Return at a random moment: during the startup of a process, or after a batch was decided."""
        seconds = self._chance.uniform(0, 0.5)
        if self._chance.random() < 0.75:
            await self._grown()
        await asyncio.sleep(seconds)

    async def _grown(self) -> None:
        """Return once another batch is decided."""
        journal = transactions_journal(self._stream)
        before = await self._client.head(journal)

        async def has_grown() -> bool:
            return await self._client.head(journal) > before

        await until(has_grown, _GROWN_SECONDS)


async def live(file: Path, client: JournalClient, moment: Awaitable[object] | None, *options: str) -> int | None:
    """Run an ingest process and kill it after `moment`. Return its exit code, or None if it was killed."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("ingest", "run", str(file), "--endpoint", client.config.endpoint, *options),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    ended = asyncio.ensure_future(process.communicate())
    try:
        if moment is not None:
            waited = asyncio.ensure_future(moment)
            await asyncio.wait([ended, waited], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await waited
                return None
            waited.cancel()
        _, errors = await ended
        assert process.returncode == 0, errors.decode()
        return process.returncode
    finally:
        if process.returncode is None:
            process.kill()
            await ended
