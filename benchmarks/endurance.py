"""A broker's memory during one large append, and the failover time of a journal.

* Memory: anonymous resident memory while 1 GiB is appended in one RPC, in MiB. The floor is the memory of the process
  before. If memory grew with the size of the append, the ratio would show it.
* Failover: seconds from `SIGKILL` of the primary to the next acknowledged append by a client that retries. The floor is
  the lease: no broker may take over before it expires. Less is better.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from benchmarks.append import BULK_CHUNK, JOURNAL, Journal, bulk_messages, cluster_of
from benchmarks.runner import Figure
from coranto.client.sync import SyncJournalClient
from coranto.errors import CorantoError
from coranto.wire import protocol_pb2_grpc as pb_grpc

LARGE_BYTES = 1 << 30
LEASE_SECONDS = 3.0


def _resident(pid: int) -> float:
    """Return a process's anonymous resident memory, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


async def _append_large(endpoint: str) -> None:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        response = await pb_grpc.JournalStub(channel).Append(bulk_messages(LARGE_BYTES, BULK_CHUNK))
        assert response.commit.end - response.commit.begin == LARGE_BYTES, response


def _memory(rounds: int, replication: int) -> Figure:
    """Measure the peak memory of the largest broker."""
    before: list[float] = []
    highest: list[float] = []
    with cluster_of(replication) as (cluster, client):
        journal = Journal(client, JOURNAL, replication)
        for _ in range(rounds):
            endpoint = journal.renew()
            pids = tuple(pid for name, pid in cluster.info.pids.items() if name.startswith("broker-"))
            before.append(max(map(_resident, pids)))
            seen = [before[-1]]
            done = threading.Event()

            def watch(seen: list[float] = seen, done: threading.Event = done, pids: tuple[int, ...] = pids) -> None:
                while not done.wait(0.02):
                    seen.append(max(map(_resident, pids)))

            watcher = threading.Thread(target=watch)
            watcher.start()
            asyncio.run(_append_large(endpoint))
            done.set()
            watcher.join()
            highest.append(max(seen))
    name = f"memory while {LARGE_BYTES >> 30} GiB is appended in one RPC, R={replication}"
    return Figure(name, "MiB", highest, before, "before the append", note="less is better")


def _failover(rounds: int) -> Figure:
    seconds = [_fail_over() for _ in range(rounds)]
    name = "from SIGKILL of the primary to the next acknowledged append, R=3"
    floor = [LEASE_SECONDS] * rounds
    return Figure(name, "s", seconds, floor, f"the lease of {LEASE_SECONDS:g} s", note="less is better")


def _fail_over() -> float:
    with cluster_of(4, lease_seconds=LEASE_SECONDS, supervise=False) as (cluster, client):
        primary = Journal(client, JOURNAL, 3).renew()
        endpoints = cluster.info.endpoints
        index = endpoints.index(primary)
        with SyncJournalClient(endpoints[(index + 1) % len(endpoints)]) as survivor:
            cluster.kill_broker(index)
            begun = time.perf_counter()
            while True:
                try:
                    survivor.append(JOURNAL, b"next\n", retry_unknown=True)
                    return time.perf_counter() - begun
                except CorantoError:
                    time.sleep(0.02)


def _figures(rounds: int) -> Iterator[Figure]:
    for replication in (1, 3):
        yield _memory(min(rounds, 2), replication)
    yield _failover(rounds)


def run(rounds: int) -> list[Figure]:
    return list(_figures(rounds))
