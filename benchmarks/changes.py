"""Changes of PostgreSQL to a stream, against bare clients that receive the same changes by `pgoutput` and drop them.

Before each pair, the server gets the changes: inserts in transactions of a thousand. The floors neither parse nor store
changes: the replication connection of the ingest, and psycopg2's if it is installed (`pip install psycopg2-binary`).
The subject is the ingest in the same process, which commits the changes to a stream of two segments. The second figures
divide by the processor time of this process alone, without the server's and the broker's.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import select
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks.runner import Figure
from coranto.client.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.ingest.opening import open_ingest
from coranto.ingest.postgres.replication import ReplicationConnection
from coranto.ingest.spec import read_spec
from tests.servers.sql import PostgresServer

CHANGES: Final = 200_000
_PER_TRANSACTION: Final = 1000
_SLOT: Final = "floor"
_TABLE: Final = """
CREATE TABLE orders (id bigserial PRIMARY KEY, customer text, cents bigint, at timestamptz DEFAULT now(), note text);
ALTER TABLE orders REPLICA IDENTITY FULL;
CREATE PUBLICATION shop FOR TABLE orders;
"""
_INSERT: Final = """
INSERT INTO orders (customer, cents, note)
SELECT 'customer-' || mod(n, 97), 995, repeat('x', 80) FROM generate_series(1, %s) n
"""
_SPEC: Final = """
name: bench
stream: bench/orders
source:
  postgres: {{url: "{url}", publication: shop}}
create: {{segments: 2}}
"""
_Rates = tuple[float, float]
"""Changes per second, and per second of this process's processor time."""


def run(rounds: int) -> list[Figure]:
    """Measure inserts of rows of about 130 bytes."""
    floors: dict[str, Callable[[str], None]] = {"the ingest's connection, dropping": _receive}
    if importlib.util.find_spec("psycopg2") is not None:
        floors["psycopg2, dropping"] = _receive_by_psycopg2
    found: dict[str, list[_Rates]] = {name: [] for name in (*floors, "subject")}
    settings = ("wal_level=logical", "max_wal_size=4GB")
    with (
        tempfile.TemporaryDirectory() as folder,
        PostgresServer(*settings) as server,
        EmbeddedCluster(Path(folder), brokers=1) as cluster,
    ):
        name = server.new_database().rpartition("/")[2].partition("?")[0]
        url = f"postgresql://postgres:secret@127.0.0.1:{server.port}/{name}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_TABLE.encode())
            asyncio.run(_ingest(cluster.info.endpoints[0], url))  # Create its slot, and take an empty snapshot.
            for _ in range(rounds + 1):  # The first round is the warm-up.
                connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [_SLOT])
                for _ in range(CHANGES // _PER_TRANSACTION):
                    connection.execute(_INSERT.encode(), [_PER_TRANSACTION])
                for floor, receive in floors.items():
                    found[floor].append(_measured(functools.partial(receive, url)))
                    _await_free(connection)
                found["subject"].append(
                    _measured(lambda: asyncio.run(_ingest(cluster.info.endpoints[0], url, CHANGES)))
                )
                connection.execute("SELECT pg_drop_replication_slot(%s)", [_SLOT])
    note = f"{CHANGES} inserts in transactions of {_PER_TRANSACTION}"
    return [
        Figure(
            measure,
            unit,
            [each[at] for each in found["subject"][1:]],
            [each[at] for each in found[floor][1:]],
            floor,
            note,
        )
        for floor in floors
        for at, measure, unit in (
            (0, "changes of PostgreSQL", "changes/s"),
            (1, "the same by the client's processor time", "changes/s of processor"),
        )
    ]


def _measured(receive: Callable[[], object]) -> _Rates:
    began, used = time.perf_counter(), time.process_time()
    receive()
    return CHANGES / (time.perf_counter() - began), CHANGES / (time.process_time() - used)


async def _ingest(endpoint: str, url: str, expected: int = 0) -> None:
    """Ingest all existing changes into the stream."""
    spec = read_spec(_SPEC.format(url=url))
    async with JournalClient(endpoint) as client:
        report = await open_ingest(client, spec).run()
    assert report.rows == expected, f"{report.rows} rows instead of {expected}"


def _receive(url: str) -> None:
    connection = ReplicationConnection(url)
    try:
        connection.start(_SLOT, 0, "shop")
        left = CHANGES
        while left:
            payload = connection.receive(time.monotonic() + 60)
            assert payload is not None, "the server sends nothing"
            left -= payload[0] == 0x49  # "I", an insert.
    finally:
        connection.close()


def _receive_by_psycopg2(url: str) -> None:
    extras: Any = importlib.import_module("psycopg2.extras")
    connection = importlib.import_module("psycopg2").connect(
        url, connection_factory=extras.LogicalReplicationConnection
    )
    try:
        cursor = connection.cursor()
        options = {"proto_version": "1", "publication_names": "shop"}
        cursor.start_replication(slot_name=_SLOT, decode=False, options=options)
        left = CHANGES
        while left:
            message = cursor.read_message()
            if message is None:
                select.select([cursor], [], [], 10)
            else:
                left -= message.payload[0] == 0x49
    finally:
        connection.close()


def _await_free(connection: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Wait until the server has released the slot of the disconnected reader."""
    deadline = time.monotonic() + 30
    while connection.execute("SELECT active FROM pg_replication_slots WHERE slot_name = %s", [_SLOT]).fetchone() != (
        False,
    ):
        assert time.monotonic() < deadline, "the slot stays in use"
        time.sleep(0.02)
