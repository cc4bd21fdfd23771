"""The latency of one client while another client offers ten times its quota.

Each appends to its own journal at one broker (R=1). The modest client appends at a fixed rate. The greedy client is a
separate process. Its appends are due at ten times its quota, and it does not wait for answers. The floor is the modest
client alone at the same broker.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import statistics
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.append import cluster_of
from benchmarks.runner import Figure
from coranto.client import ClientConfig, JournalClient
from coranto.errors import CorantoError
from coranto.security.tokens import Keys
from coranto.wire import protocol_pb2 as pb

QUOTA = 200
"""Appends per second that the greedy client may make."""
TIMES = 10
RATE = 100
"""Appends per second of the modest client."""
SECONDS = 10.0
CONTENT = b"x" * 200


def _client(endpoint: str, key: str, name: str, retry_timeout: float) -> JournalClient:
    return JournalClient.of(ClientConfig(endpoint, auth=Keys.parse(key), name=name, retry_timeout=retry_timeout))


def _spec(name: str) -> pb.ApplyRequest.Change:
    fragment = pb.JournalSpec.Fragment(length=1 << 26, compression_codec=pb.NONE)
    fragment.refresh_interval.FromSeconds(60)
    return pb.ApplyRequest.Change(upsert=pb.JournalSpec(name=name, replication=1, fragment=fragment))


async def _offer(client: JournalClient, journal: str, rate: float) -> tuple[list[float], int]:
    """Append at a rate for SECONDS. Return the latencies of committed appends, and the number of rejected ones.

    Appends without an answer one second after the end are cancelled.
    """
    latencies: list[float] = []
    rejected = 0

    async def one() -> None:
        nonlocal rejected
        begun = time.perf_counter()
        try:
            await client.append(journal, CONTENT)
        except CorantoError:
            rejected += 1
        else:
            latencies.append(time.perf_counter() - begun)

    await client.append(journal, CONTENT)
    begun = time.perf_counter()
    tasks = []
    for number in range(int(rate * SECONDS)):
        await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one()))
    _, late = await asyncio.wait(tasks, timeout=1.0)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return latencies, rejected


def greedy(endpoint: str, key: str) -> tuple[int, int]:
    """Offer TIMES the quota. Return the numbers of committed and of rejected appends."""

    async def run() -> tuple[int, int]:
        async with _client(endpoint, key, "greedy", 0.0) as client:
            latencies, rejected = await _offer(client, "bench/greedy", TIMES * QUOTA)
            return len(latencies), rejected

    return asyncio.run(run())


async def _modest(endpoint: str, key: str) -> float:
    """Return the 99th percentile of latencies in milliseconds."""
    async with _client(endpoint, key, "modest", 30.0) as client:
        latencies, _ = await _offer(client, "bench/modest", RATE)
        return statistics.quantiles(latencies, n=100)[98] * 1e3


async def _create(endpoint: str, key: str) -> None:
    async with _client(endpoint, key, "admin", 30.0) as client:
        await client.apply([_spec("bench/greedy"), _spec("bench/modest")])


def _figures(rounds: int) -> Iterator[Figure]:
    key = b64encode(secrets.token_bytes(32)).decode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "quotas.yaml"
        file.write_text(f"callers: {{greedy: {{appends: {QUOTA}}}}}")
        settings = {"CORANTO_BROKER_QUOTAS": str(file), "CORANTO_BROKER_AUTH_KEYS": key}
        spawn = multiprocessing.get_context("spawn")
        with cluster_of(1, **settings) as (cluster, _), ProcessPoolExecutor(1, mp_context=spawn) as pool:
            endpoint = cluster.info.endpoint
            asyncio.run(_create(endpoint, key))
            alone, contended = [], []
            committed = rejected = 0
            for _ in range(rounds):
                alone.append(asyncio.run(_modest(endpoint, key)))
                other = pool.submit(greedy, endpoint, key)
                contended.append(asyncio.run(_modest(endpoint, key)))
                found = other.result()
                committed, rejected = committed + found[0], rejected + found[1]
        offered = f"of the other's appends {committed} were committed, {rejected} rejected"
        name = f"p99 of {RATE} appends/s while another client offers {TIMES} times its quota"
        yield Figure(name, "ms", contended, alone, "the same alone", f"less is better; {offered}")


def run(rounds: int) -> list[Figure]:
    return list(_figures(rounds))
