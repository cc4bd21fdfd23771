"""Processes that read tables are killed while others write, and copies of the stream are equal to the tables."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from pathlib import Path

import psycopg
import pytest

from coranto.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.streams.control.lifecycle import Streams, default_template
from tests.platform.ingest.killing import live, moment
from tests.platform.ingest.lists import events
from tests.platform.ingest.postgres.database import ORDERS, SETTINGS, Copies, Database
from tests.servers.sql import PostgresServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "4"))
STREAM = "kill/orders"
SPEC = """
name: killed
stream: {stream}
source:
  postgres: {{url: "{url}", publication: shop, look: 0.5}}
batch: {{bytes: 20000, seconds: 0.2}}
"""


def write(database: Database, end: threading.Event, chance: random.Random) -> None:
    """Change random rows in transactions, roll one in four back, and wait when the server restarts."""
    while not end.is_set():
        try:
            with database.connect() as connection:
                while not end.is_set():
                    with connection.transaction(force_rollback=chance.random() < 0.25):
                        for _ in range(chance.randrange(1, 20)):
                            _change(connection, chance)
        except psycopg.OperationalError:
            end.wait(0.1)


def _change(connection: psycopg.Connection[tuple[object, ...]], chance: random.Random) -> None:
    number, size = chance.randrange(1, 6000), chance.choice((10, 300, 9000))
    if chance.random() < 0.2:
        connection.execute("DELETE FROM orders WHERE id = %s", [number])
    elif chance.random() < 0.1:
        free = "NOT EXISTS (SELECT FROM orders WHERE id = %s)"
        connection.execute(
            f"UPDATE orders SET id = %s WHERE id = %s AND {free}", [number + 6000, number, number + 6000]
        )
    else:
        connection.execute(
            "INSERT INTO orders VALUES (%s, %s, 0) ON CONFLICT (id) DO UPDATE SET version = orders.version + 1",
            [number, "x" * size],
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [int(os.environ.get("CORANTO_INGEST_SEED", "7"))])
async def test_a_copy_is_equal_to_the_table(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with (
        PostgresServer(*SETTINGS) as server,
        Database(server) as database,
        EmbeddedCluster(tmp_path / "cluster", brokers=2, lease_seconds=60, etcd_fsync=False) as cluster,
    ):
        database.execute(ORDERS)
        database.execute("INSERT INTO orders SELECT n, repeat('y', 200), n FROM generate_series(1, 5000) n")
        file = tmp_path / "killed.yaml"
        file.write_text(SPEC.format(stream=STREAM, url=database.url))
        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=120) as client:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            end = threading.Event()
            writer = threading.Thread(target=write, args=(database, end, random.Random(seed + 1)))
            writer.start()
            try:
                killed, has_crashed = 0, False
                while killed < KILLS:
                    # Some die while they start, most while they commit; two at a time compete.
                    count = chance.choice((1, 2))
                    ends = await asyncio.gather(
                        *(live(file, endpoint, moment(client, STREAM, chance), "--follow") for _ in range(count))
                    )
                    killed += ends.count(None)
                    if killed >= KILLS // 2 and not has_crashed:
                        has_crashed = True
                        await asyncio.to_thread(cluster.kill_broker, 1)
                        await asyncio.to_thread(server.restart, crash=True)
                        database.reconnect()
            finally:
                end.set()
                await asyncio.to_thread(writer.join)
            await asyncio.to_thread(cluster.wait_ready)
            assert await live(file, endpoint, None) == 0
            found = await events(client, STREAM)
        assert Copies(found)["public.orders"] == database.rows()
        assert sum(each["_meta"]["op"] == "read" for each in found) >= 4000
