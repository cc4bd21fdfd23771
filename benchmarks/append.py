"""Appends against a bare `grpc.aio` stream that carries the same messages.

The same client code drives both sides: one channel, the raw `Append` method, the same chunks. Only the server differs,
so the ratio shows the cost of the broker: spool, SHA-1, commit log, state machine, response. With three replicas the
floor is a bare server that forwards the messages to two others and awaits an answer from each, because on one machine
the copies use the same cores.

Each turn starts with a new journal. Otherwise its files would grow, and the benchmark would also measure the allocation
of memory for them.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from benchmarks.raw_grpc import raw_server
from benchmarks.runner import Figure, measure_pairs
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

JOURNAL = "bench/append"
BULK_BYTES = 256 << 20
BULK_CHUNK = 512 << 10
STREAM_BYTES = 64 << 20
STREAM_CHUNK = 32 << 10
"""Buffer size of Go's `io.Copy`, and therefore the message size of Go programs."""
SMALL_BYTES = 200
SMALL_SECONDS = 1.2
CLIENTS = (1, 16, 64)
FLOORS = {
    1: "the same messages to a bare grpc.aio server",
    3: "the same messages to a bare grpc.aio server that relays them to two",
}

STORING_FLOOR = "the same messages to a bare server that also hashes and writes them"

SMALL = pb.AppendRequest(content=b"x" * SMALL_BYTES)
COMMIT = pb.AppendRequest()

Measure = Callable[["pb_grpc.JournalAsyncStub"], Awaitable[float]]


async def bulk_messages(size: int, chunk: int) -> AsyncIterator[pb.AppendRequest]:
    """Yield the messages of one append of `size` bytes, with `chunk` bytes each."""
    message = pb.AppendRequest(content=bytes(range(256)) * (chunk // 256))
    yield pb.AppendRequest(journal=JOURNAL)
    for _ in range(size // chunk):
        yield message
    yield COMMIT


def _bulk(size: int, chunk: int) -> Measure:
    async def run(stub: pb_grpc.JournalAsyncStub) -> float:
        """Return the MB/s of one bulk append."""
        begun = time.perf_counter()
        response = await stub.Append(bulk_messages(size, chunk))
        seconds = time.perf_counter() - begun
        assert response.commit.end - response.commit.begin == size, response
        return size / 1e6 / seconds

    return run


def hashed() -> float:
    """Return the MB/s of SHA-1 over `BULK_BYTES` bytes, on an otherwise idle core."""
    chunk, digest = bytes(range(256)) * (BULK_CHUNK // 256), hashlib.sha1(usedforsecurity=False)
    begun = time.perf_counter()
    for _ in range(BULK_BYTES // BULK_CHUNK):
        digest.update(chunk)
    return BULK_BYTES / 1e6 / (time.perf_counter() - begun)


async def small_messages(journal: str = JOURNAL) -> AsyncIterator[pb.AppendRequest]:
    """Yield the messages of one small append."""
    yield pb.AppendRequest(journal=journal)
    yield SMALL
    yield COMMIT


def _small(clients: int) -> Measure:
    async def run(stub: pb_grpc.JournalAsyncStub) -> float:
        """Return the appends per second of `clients` that each wait for the answer before the next append."""
        done = 0
        begun = time.perf_counter()
        until = begun + SMALL_SECONDS

        async def client() -> None:
            nonlocal done
            while time.perf_counter() < until:
                response = await stub.Append(small_messages())
                assert response.commit.end - response.commit.begin == SMALL_BYTES, response
                done += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        return done / (time.perf_counter() - begun)

    return run


class Journal:
    """A cluster's journal, which can be recreated."""

    def __init__(self, client: SyncJournalClient, name: str, replication: int) -> None:
        self._client = client
        self._name = name
        self._replication = replication
        self._exists = False

    def renew(self) -> str:
        """Delete the journal, create it, and wait for all replicas. Return the primary's endpoint, `host:port`."""
        if self._exists:
            revision = self._client.list(f"name={self._name}").journals[0].mod_revision
            self._client.apply([pb.ApplyRequest.Change(delete=self._name, expect_mod_revision=revision)])
        spec = pb.JournalSpec(
            name=self._name, replication=self._replication, labels=label_set(), flags=pb.JournalSpec.O_RDWR
        )
        # No store: the benchmark measures the append path, not the compression of fragments.
        spec.fragment.length = 1 << 31
        spec.fragment.compression_codec = pb.NONE
        spec.fragment.refresh_interval.FromSeconds(3600)
        self._client.apply([pb.ApplyRequest.Change(upsert=spec)])
        self._exists = True
        # Begin a fragment, so that the measured append completes it and begins a new one, as every bulk append does.
        self._client.append(self._name, b"warm\n")
        route = self._client.list(f"name={self._name}").journals[0].route
        return route.endpoints[route.primary].removeprefix("http://")


@contextmanager
def cluster_of(
    brokers: int, *, lease_seconds: float = 5.0, supervise: bool = True, **environment: str
) -> Iterator[tuple[EmbeddedCluster, SyncJournalClient]]:
    """Yield a new cluster and a client of it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(Path(folder), brokers, lease_seconds, supervise=supervise, environment=environment) as cluster,
        SyncJournalClient(cluster.info.endpoint, file_root=cluster.info.file_root) as client,
    ):
        yield cluster, client


def rate(endpoint: Callable[[], str], measure: Measure) -> Callable[[], float]:
    """Return a function that calls `endpoint`, which is not measured, and runs `measure` at its result."""

    async def once() -> float:
        async with grpc.aio.insecure_channel(endpoint()) as channel:
            return await measure(pb_grpc.JournalStub(channel))

    return lambda: asyncio.run(once())


def _figures(rounds: int, replication: int) -> Iterator[Figure]:
    copies = f"R={replication}"
    with (
        raw_server(relays=replication - 1) as raw,
        raw_server(storing=True) as storing,
        cluster_of(replication) as (_, client),
        cluster_of(replication, CORANTO_BROKER_GROUP_APPEND_BYTES="0") as (_, ungrouped_client),
    ):
        grouped = Journal(client, JOURNAL, replication)
        ungrouped = Journal(ungrouped_client, JOURNAL, replication)

        def figure(name: str, unit: str, measure: Measure, journal: Journal) -> Figure:
            subjects, floors = measure_pairs(rounds, rate(lambda: raw, measure), rate(journal.renew, measure))
            return Figure(f"{name}, {copies}", unit, subjects, floors, FLOORS[replication])

        bulk, whole = f"bulk append, one RPC of {BULK_BYTES >> 20} MiB", _bulk(BULK_BYTES, BULK_CHUNK)
        yield figure(bulk, "MB/s", whole, grouped)
        in_pieces = f"append of {STREAM_BYTES >> 20} MiB in messages of {STREAM_CHUNK >> 10} KiB"
        yield figure(in_pieces, "MB/s", _bulk(STREAM_BYTES, STREAM_CHUNK), grouped)
        if replication == 1:
            # The practical limit: hashing and writing share the cores with receiving and with the client.
            subjects, floors = measure_pairs(rounds, rate(lambda: storing, whole), rate(grouped.renew, whole))
            yield Figure(f"{bulk}, {copies}", "MB/s", subjects, floors, STORING_FLOOR)
            subjects, floors = measure_pairs(rounds, rate(lambda: raw, whole), rate(lambda: storing, whole))
            yield Figure("the same bytes to a bare server that hashes and stores", "MB/s", subjects, floors, FLOORS[1])
            subjects, floors = measure_pairs(rounds, rate(lambda: raw, whole), hashed)
            yield Figure("SHA-1 alone of as many bytes", "MB/s", subjects, floors, FLOORS[1])
        for clients in CLIENTS:
            name = f"{SMALL_BYTES} B appends, {clients} client{'s' if clients > 1 else ''}"
            yield figure(name, "appends/s", _small(clients), grouped)
            yield figure(f"{name}, no group commit", "appends/s", _small(clients), ungrouped)


def run(rounds: int) -> list[Figure]:
    return list(_figures(rounds, 1))


def run_replicated(rounds: int) -> list[Figure]:
    return list(_figures(rounds, 3))
