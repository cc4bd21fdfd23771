"""Reads through the broker against a bare `grpc.aio` stream of messages of the same size.

A tail read is served from the journal's local files, a historical read from a fragment store. The broker fetches,
decompresses and verifies stored content at the first read (`first time`), and serves later reads from its cache
(`again`).
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.append import Measure, rate
from benchmarks.raw_grpc import raw_server
from benchmarks.runner import Figure, measure_pairs
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

READ_BYTES = 128 << 20
FRAGMENT_BYTES = 32 << 20
FLOOR = "a bare grpc.aio stream of as many bytes in messages of 1 MiB"
LINE = b'{"carrier": "UA", "flight": 1545, "origin": "EWR", "dest": "IAH", "delay": %d}\n'


def _read(journal: str) -> Measure:
    async def run(stub: pb_grpc.JournalAsyncStub) -> float:
        """Return the MB/s of one read of READ_BYTES."""
        begun, received = time.perf_counter(), 0
        request = pb.ReadRequest(journal=journal, end_offset=READ_BYTES)
        async for response in stub.Read(request):
            received += len(response.content)
        assert received == READ_BYTES, received
        return READ_BYTES / 1e6 / (time.perf_counter() - begun)

    return run


def _written(client: SyncJournalClient, journal: str, *, store: str = "", interval: int = 3600) -> str:
    """Write READ_BYTES of lines to a new journal, in fragments of FRAGMENT_BYTES."""
    spec = pb.JournalSpec(name=journal, replication=1, labels=label_set(), flags=pb.JournalSpec.O_RDWR)
    spec.fragment.length = FRAGMENT_BYTES - 1 if store else 1 << 31
    spec.fragment.compression_codec = pb.ZSTANDARD
    spec.fragment.refresh_interval.FromSeconds(interval)
    spec.fragment.stores.extend([store] if store else [])
    client.apply([pb.ApplyRequest.Change(upsert=spec)])
    lines = itertools.count()
    for _ in range(READ_BYTES // FRAGMENT_BYTES):
        piece = bytearray()
        while len(piece) < FRAGMENT_BYTES:
            piece += LINE % next(lines)
        client.append(journal, bytes(piece[:FRAGMENT_BYTES]))
    if store:
        client.append(journal, b"the last of these is not stored")
    return journal


def _await_stored(client: SyncJournalClient, journal: str) -> None:
    """Wait until the broker has dropped its local files of stored fragments."""
    deadline = time.monotonic() + 60
    while True:
        fragments = [info.fragment for info in client.fragments(journal)]
        if sum(fragment.backing_store != "" for fragment in fragments) >= READ_BYTES // FRAGMENT_BYTES:
            time.sleep(5.0)  # The next listings make the broker drop the files.
            return
        assert time.monotonic() < deadline, fragments
        time.sleep(0.2)


def _figures(rounds: int) -> Iterator[Figure]:
    with (
        raw_server() as raw,
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(Path(folder)) as cluster,
        SyncJournalClient(cluster.info.endpoint, file_root=cluster.info.file_root) as client,
    ):
        endpoint = cluster.info.endpoint.removeprefix("http://")
        tail = _written(client, "bench/tail")
        subjects, floors = measure_pairs(rounds, rate(lambda: raw, _read(tail)), rate(lambda: endpoint, _read(tail)))
        yield Figure("tail read", "MB/s", subjects, floors, FLOOR)
        first: list[float] = []
        first_floors: list[float] = []
        for number in range(rounds):
            stored = _written(client, f"bench/stored-{number}", store="file:///", interval=2)
            _await_stored(client, stored)
            first_floors.append(rate(lambda: raw, _read(stored))())
            first.append(rate(lambda: endpoint, _read(stored))())
        yield Figure("historical read, first time", "MB/s", first, first_floors, FLOOR)
        subjects, floors = measure_pairs(
            rounds, rate(lambda: raw, _read(stored)), rate(lambda: endpoint, _read(stored))
        )
        yield Figure("historical read, again", "MB/s", subjects, floors, FLOOR)


def run(rounds: int) -> list[Figure]:
    return list(_figures(rounds))
