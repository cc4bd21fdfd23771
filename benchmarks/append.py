"""Appends against a bare `grpc.aio` stream that carries the same messages.

Both sides are driven by the same client code: one channel, the raw `Append` method, the same chunks. What differs is
the server, so the ratio says what the broker costs: spool, SHA-1, commit log, state machine, response.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc

from benchmarks.raw_grpc import raw_server
from benchmarks.runner import Figure, in_turns
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

JOURNAL = "bench/append"
BULK_BYTES = 256 << 20
BULK_CHUNK = 512 << 10
SMALL_BYTES = 200
SMALL_APPENDS = 3000

CHUNK = pb.AppendRequest(content=bytes(range(256)) * (BULK_CHUNK // 256))
SMALL = pb.AppendRequest(content=b"x" * SMALL_BYTES)
COMMIT = pb.AppendRequest()


async def _bulk_messages() -> AsyncIterator[pb.AppendRequest]:
    yield pb.AppendRequest(journal=JOURNAL)
    for _ in range(BULK_BYTES // BULK_CHUNK):
        yield CHUNK
    yield COMMIT


async def _bulk(stub: pb_grpc.JournalAsyncStub) -> float:
    """MB/s of one append of BULK_BYTES."""
    begun = time.perf_counter()
    response = await stub.Append(_bulk_messages())
    seconds = time.perf_counter() - begun
    assert response.commit.end - response.commit.begin == BULK_BYTES, response
    return BULK_BYTES / 1e6 / seconds


def _small(clients: int) -> Callable[[pb_grpc.JournalAsyncStub], Awaitable[float]]:
    async def messages() -> AsyncIterator[pb.AppendRequest]:
        yield pb.AppendRequest(journal=JOURNAL)
        yield SMALL
        yield COMMIT

    async def run(stub: pb_grpc.JournalAsyncStub) -> float:
        """Appends per second of `clients` that each append, wait for the answer, and append again."""

        async def client() -> None:
            for _ in range(SMALL_APPENDS // clients):
                response = await stub.Append(messages())
                assert response.commit.end - response.commit.begin == SMALL_BYTES, response

        begun = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return (SMALL_APPENDS // clients) * clients / (time.perf_counter() - begun)

    return run


def _rate(endpoint: str, measure: Callable[[pb_grpc.JournalAsyncStub], Awaitable[float]]) -> Callable[[], float]:
    async def once() -> float:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            return await measure(pb_grpc.JournalStub(channel))

    return lambda: asyncio.run(once())


def run(rounds: int) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedCluster(Path(folder)) as cluster, raw_server() as raw:
        info = cluster.info
        spec = pb.JournalSpec(name=JOURNAL, replication=1, labels=label_set(), flags=pb.JournalSpec.O_RDWR)
        # No store: what is measured is the append path, not the compression of fragments behind it.
        spec.fragment.length = 1 << 30
        spec.fragment.compression_codec = pb.NONE
        spec.fragment.refresh_interval.FromSeconds(3600)
        with SyncJournalClient(info.endpoint, file_root=info.file_root) as client:
            client.apply([pb.ApplyRequest.Change(upsert=spec)])
            client.append(JOURNAL, b"first write\n")
        for name, unit, measure in (
            (f"bulk append, one RPC of {BULK_BYTES >> 20} MiB", "MB/s", _bulk),
            (f"{SMALL_BYTES} B appends, 1 client", "appends/s", _small(1)),
            (f"{SMALL_BYTES} B appends, 16 clients", "appends/s", _small(16)),
        ):
            subjects, floors = in_turns(rounds, _rate(raw, measure), _rate(info.endpoint, measure))
            figures.append(Figure(name, unit, subjects, floors, "the same messages to a bare grpc.aio server"))
    return figures
