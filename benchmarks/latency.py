"""Latency of commits at a fixed rate of small appends. Less is better.

Each append is sent at its due time, even if earlier ones are unanswered, so that the figures show a broker that falls
behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from benchmarks.append import FLOORS, JOURNAL, Journal, Measure, cluster_of, rate, small_messages
from benchmarks.raw_grpc import raw_server
from benchmarks.runner import Figure, measure_pairs
from coranto.wire import protocol_pb2_grpc as pb_grpc

RATE = 100
SECONDS = 3.0


def _latencies(found: list[list[float]]) -> Measure:
    async def run(stub: pb_grpc.JournalAsyncStub) -> float:
        """Add the sorted latencies of all appends, in milliseconds, to `found`."""
        latencies: list[float] = []
        begun = time.perf_counter()

        async def one(due: float) -> None:
            await asyncio.sleep(due - time.perf_counter())
            await stub.Append(small_messages())
            latencies.append((time.perf_counter() - due) * 1e3)

        await asyncio.gather(*(one(begun + number / RATE) for number in range(int(RATE * SECONDS))))
        found.append(sorted(latencies))
        return 0.0

    return run


def _figures(rounds: int, replication: int) -> Iterator[Figure]:
    subjects: list[list[float]] = []
    floors: list[list[float]] = []
    with raw_server(relays=replication - 1) as raw, cluster_of(replication) as (_, client):
        journal = Journal(client, JOURNAL, replication)
        measure_pairs(rounds, rate(lambda: raw, _latencies(floors)), rate(journal.renew, _latencies(subjects)))
    for quantile in (0.5, 0.99):
        # The first list of each is from the warm-up.
        subject, floor = ([each[int(len(each) * quantile)] for each in found[1:]] for found in (subjects, floors))
        name = f"commit latency p{quantile * 100:.0f} at {RATE} appends/s, R={replication}"
        yield Figure(name, "ms", subject, floor, FLOORS[replication], note="less is better")


def run(rounds: int) -> list[Figure]:
    return [figure for replication in (1, 3) for figure in _figures(rounds, replication)]
