"""Reading and copying processes of a table are killed while others write, and its copies are equal to it.

DuckDB compares the table with its copy, row by row.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from functools import partial
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from coranto.client import JournalClient
from coranto.streams.control.lifecycle import Streams, default_template
from tests.consumers.tables.killed import KilledTables, differences, rows_of
from tests.consumers.tables.shop import table_file
from tests.platform.ingest.killing import Killing, crash_broker, two_brokers
from tests.platform.ingest.lists import events
from tests.platform.ingest.postgres.database import ORDERS, SETTINGS, Copies, Database
from tests.servers.sql import PostgresServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "4"))
STREAM = "kill/orders"
SPEC = """
name: killed
stream: {stream}
source:
  postgres: {{url: "{url}", publication: shop, look: 0.5, operation: op}}
batch: {{bytes: 20000, seconds: 0.2}}
"""


def write(database: Database, end: threading.Event, chance: random.Random) -> None:
    """Change random rows in transactions, roll one in four back, and wait while the server restarts."""
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
async def test_copies_are_equal_to_the_table(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    file, copy = tmp_path / "killed.yaml", tmp_path / "copy.yaml"
    with PostgresServer(*SETTINGS) as server, Database(server) as database, two_brokers(tmp_path) as cluster:
        database.execute(ORDERS)
        database.execute("INSERT INTO orders SELECT n, repeat('y', 200), n FROM generate_series(1, 5000) n")
        file.write_text(SPEC.format(stream=STREAM, url=database.url))
        columns = "id BIGINT, customer STRING, cents BIGINT, version INT, op STRING"
        operation = "{column: op, deletes: [delete]}"
        copy.write_text(
            table_file(f"{{stream: {STREAM}}}", server.new_database(), "changes", columns=columns, operation=operation)
        )

        def crash() -> None:
            server.restart(crash=True)
            database.reconnect()

        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=120) as client:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            outages = [partial(crash_broker, cluster), crash]
            killing = Killing(client, STREAM, file, chance, outages, "--follow")
            copies = KilledTables(endpoint, chance, copy)
            end = threading.Event()
            writer = threading.Thread(target=write, args=(database, end, random.Random(seed + 1)))
            writer.start()
            try:
                while not killing.is_over(KILLS):
                    with copies.running():
                        await killing.turn()
            finally:
                end.set()
                await asyncio.to_thread(writer.join)
            await asyncio.to_thread(cluster.wait_ready)
            await killing.complete()
            await copies.complete()
            found = await events(client, STREAM)
        expected = database.rows()
        rows = [{name: each[name] for name in each if name != "op"} for each in found]
        assert Copies(rows)["public.orders"] == expected
        assert sum(each["_meta"]["op"] == "read" for each in found) >= 4000
        assert differences(pa.Table.from_pylist(list(expected.values())), rows_of(copy)) == []
        assert copies.killed >= KILLS // 2
