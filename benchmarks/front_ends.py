"""Processor time of small appends with and without front-end processes of a broker, which do not exist.

A front end would terminate a client's call and hand its append to the owner of the spools over a stream. Its cost is
that of a bare server for the same call, and of a client that shares a stream. The cost of the owner is that of a broker
for an append of a stream. The floor is a broker that serves the calls itself (`docs/decisions`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
import psutil

from benchmarks.append import CLIENTS, JOURNAL, SMALL_BYTES, Journal, cluster_of, small_messages
from benchmarks.raw_grpc import raw_server
from benchmarks.runner import Figure
from coranto.client import JournalClient
from coranto.wire import protocol_pb2_grpc as pb_grpc

SECONDS = 1.5
CONTENT = b"x" * SMALL_BYTES

Append = Callable[[], Awaitable[object]]


def _processor(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _server_at(endpoint: str) -> psutil.Process:
    """Return the child process that listens at an endpoint."""
    port = int(endpoint.rpartition(":")[2])
    children = psutil.Process().children(recursive=True)
    listens = (each for each in children for at in each.net_connections() if at.status == "LISTEN")
    return next(each for each in listens if port in {at.laddr.port for at in each.net_connections()})


async def _costs(append: Append, tasks: int, server: psutil.Process) -> tuple[float, float]:
    """Return the seconds of processor time of an append: of the server, and of this process."""
    done = 0

    async def task(until: float) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await append()
            done += 1

    await append()
    theirs, ours = _processor(server), time.process_time()
    until = time.perf_counter() + SECONDS
    await asyncio.gather(*(task(until) for _ in range(tasks)))
    return (_processor(server) - theirs) / done, (time.process_time() - ours) / done


async def _by_calls(endpoint: str, tasks: int) -> float:
    """Return what a server spends on an append that is a call of its own."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub: pb_grpc.JournalAsyncStub = pb_grpc.JournalStub(channel)

        async def append() -> None:
            await stub.Append(small_messages())

        return (await _costs(append, tasks, _server_at(endpoint)))[0]


async def _over_a_stream(endpoint: str, tasks: int) -> tuple[float, float]:
    """Return what the broker and its client spend on an append that shares a stream."""
    async with JournalClient(endpoint) as client:
        return await _costs(lambda: client.append(JOURNAL, CONTENT), tasks, _server_at(endpoint))


def run(rounds: int) -> list[Figure]:
    figures = []
    with raw_server() as bare, cluster_of(1) as (_, client):
        broker = Journal(client, JOURNAL, 1).renew()
        for clients in CLIENTS:
            now, split, parts = [], [], []
            for _ in range(rounds):
                now.append(asyncio.run(_by_calls(broker, clients)))
                call = asyncio.run(_by_calls(bare, clients))
                owner, handing = asyncio.run(_over_a_stream(broker, clients))
                split.append(call + handing + owner)
                parts.append((call, handing, owner))
            least = [min(part) * 1e6 for part in zip(*parts, strict=True)]
            note = "call {:.0f} µs, handing over {:.0f} µs, owner {:.0f} µs".format(*least)
            print(f"{clients} clients: {note}; without front ends {min(now) * 1e6:.0f} µs")
            figures.append(
                Figure(
                    f"appends of {clients} client{'s' if clients > 1 else ''} through front ends, by processor time",
                    "appends/s",
                    [1 / each for each in split],
                    [1 / each for each in now],
                    "the same calls, served by the broker itself",
                    note,
                )
            )
    return figures
