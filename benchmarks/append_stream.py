"""Small appends that share a stream, against one call for each append, and beyond saturation.

Both sides of the first comparison use the public client, `JournalClient.append`, with and without `append_streams`, and
the same brokers. So the ratio shows the savings of client and broker together. The benchmark also counts the brokers'
processor time, because with few cores the client shares them. The second comparison uses many more tasks than saturate
the brokers. Their rate must not drop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import psutil

from benchmarks.append import CLIENTS, JOURNAL, SMALL_BYTES, Journal, cluster_of
from benchmarks.runner import Figure, measure_pairs
from coranto.client import JournalClient

SECONDS = 1.5
BEYOND = (256, 1024)
"""Numbers of tasks that exceed the concurrency of a broker."""
CONTENT = b"x" * SMALL_BYTES
_FLOOR = "the same client, one call for each append"


class _Side:
    """Appends of one kind of client. Each turn records the appends per second of the brokers' processor time."""

    def __init__(self, endpoint: str, clients: int, processor: Callable[[], float], *, append_streams: bool) -> None:
        self._endpoint = endpoint
        self._clients = clients
        self._processor = processor
        self._append_streams = append_streams
        self.per_second: list[float] = []
        """Appends per second of the brokers' processor time, one value for each turn."""

    def turn(self) -> float:
        """Append for SECONDS, and return the appends per second."""
        return asyncio.run(self._turn())

    async def _turn(self) -> float:
        done = 0
        async with JournalClient(self._endpoint, append_streams=self._append_streams) as client:

            async def task(until: float) -> None:
                nonlocal done
                while time.perf_counter() < until:
                    await client.append(JOURNAL, CONTENT)
                    done += 1

            await client.append(JOURNAL, CONTENT)  # Get the route and open the stream before the measurement.
            spent, begun = self._processor(), time.perf_counter()
            await asyncio.gather(*(task(begun + SECONDS) for _ in range(self._clients)))
            self.per_second.append(done / (self._processor() - spent))
            return done / (time.perf_counter() - begun)


def broker_processes() -> list[psutil.Process]:
    """Return the processes of the brokers that this process started."""
    return [each for each in psutil.Process().children(recursive=True) if "broker" in " ".join(each.cmdline())]


def _brokers() -> Callable[[], float]:
    """Return a function that returns the brokers' processor time in seconds."""
    processes = broker_processes()
    return lambda: sum(sum(each.cpu_times()[:2]) for each in processes)


def _figures(rounds: int, replication: int) -> Iterator[Figure]:
    with cluster_of(replication) as (cluster, client):
        Journal(client, JOURNAL, replication).renew()
        endpoint, processor = cluster.info.endpoint, _brokers()
        for clients in CLIENTS:
            stream = _Side(endpoint, clients, processor, append_streams=True)
            calls = _Side(endpoint, clients, processor, append_streams=False)
            name = f"{SMALL_BYTES} B appends by {clients} task{'s' if clients > 1 else ''}, R={replication}"
            subjects, floors = measure_pairs(rounds, calls.turn, stream.turn)
            yield Figure(name, "appends/s", subjects, floors, _FLOOR)
            used = f"{name}, by the brokers' processor time"
            yield Figure(used, "appends/s", stream.per_second[1:], calls.per_second[1:], _FLOOR)
        busy = _Side(endpoint, CLIENTS[-1], processor, append_streams=True)
        for clients in BEYOND:
            stream = _Side(endpoint, clients, processor, append_streams=True)
            subjects, floors = measure_pairs(rounds, busy.turn, stream.turn)
            name = f"{SMALL_BYTES} B appends by {clients} tasks over a stream, R={replication}"
            yield Figure(name, "appends/s", subjects, floors, f"{CLIENTS[-1]} tasks over a stream")


def run(rounds: int) -> list[Figure]:
    return [figure for replication in (1, 3) for figure in _figures(rounds, replication)]
