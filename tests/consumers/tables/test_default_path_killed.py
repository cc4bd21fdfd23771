"""Files become a stream, and the stream two tables, while all processes and a broker are killed.

DuckDB reads the files and compares them with the tables, row by row.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
import sqlalchemy as sa

from coranto.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.streams.control.lifecycle import Streams, default_template
from coranto_consumers.stores.sql import SqlStore
from tests.consumers.tables.test_tables_killed import process
from tests.platform.ingest.killing import live, moment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "4"))
"""The least number of killed processes of the ingest. Of tables, twice as many are started."""
STREAM = "path/orders"
FILES, ROWS = 8, 1500 * KILLS
INGEST = """
name: orders
stream: {stream}
source:
  files: {{url: "file://{folder}/"}}
key: id
batch: {{bytes: 20000, seconds: 0.2}}
"""
TABLE = """
name: {table}
input: {{stream: {stream}}}
columns: id STRING, n BIGINT, cents BIGINT
store: {store}
table: {table}
mode: {mode}
"""
COLUMNS = "{id: 'VARCHAR', n: 'BIGINT', cents: 'BIGINT'}"


def put_files(folder: Path, chance: random.Random) -> None:
    """Write orders. Those of one id are in one file, and the last one counts."""
    folder.mkdir()
    for file in range(FILES):
        rows = (
            {"id": f"{file}-{chance.randrange(200)}", "n": n, "cents": chance.randrange(10_000)}
            for n in range(ROWS // FILES)
        )
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(url: str, table: str) -> pa.Table:
    with SqlStore(url).engine.connect() as connection:
        found = connection.execute(sa.text(f"SELECT id, n, cents FROM {table}"))
        return pa.Table.from_pylist([dict(row) for row in found.mappings()])


def differences(source: str, found: pa.Table) -> list[tuple[object, ...]]:
    """Return the rows that only one of both has, or has more often."""
    with duckdb.connect() as connection:
        connection.register("found", found)
        return connection.sql(
            f"(SELECT *, 'not in the table' FROM (FROM ({source}) EXCEPT ALL FROM found)) UNION ALL "
            f"(SELECT *, 'not in the source' FROM (FROM found EXCEPT ALL FROM ({source})))"
        ).fetchall()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [int(os.environ.get("CORANTO_INGEST_SEED", "5"))])
async def test_both_tables_have_the_rows_of_the_files(
    tmp_path: Path, new_store: Callable[[str], str], seed: int
) -> None:
    chance, folder, store = random.Random(seed), tmp_path / "in", new_store("postgresql")
    put_files(folder, chance)
    ingest, everything, latest = (tmp_path / f"{name}.yaml" for name in ("ingest", "everything", "latest"))
    ingest.write_text(INGEST.format(stream=STREAM, folder=folder))
    everything.write_text(TABLE.format(stream=STREAM, store=store, table="everything", mode="append"))
    latest.write_text(TABLE.format(stream=STREAM, store=store, table="latest", mode="upsert") + "key: [id]\n")
    with EmbeddedCluster(tmp_path / "cluster", brokers=2, lease_seconds=60, etcd_fsync=False) as cluster:
        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=120) as client:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            killed = tables_killed = 0
            while killed < KILLS:
                with ExitStack() as exits:
                    tables: list[subprocess.Popen[str]] = [
                        exits.enter_context(process(chance.choice((everything, latest)), endpoint)) for _ in range(2)
                    ]
                    lives = [
                        live(ingest, endpoint, moment(client, STREAM, chance)) for _ in range(chance.choice((1, 2)))
                    ]
                    if killed == KILLS // 2:
                        await asyncio.to_thread(cluster.kill_broker, 1)
                    ends = await asyncio.gather(*lives)
                    killed += ends.count(None)
                    assert 0 not in ends, "all was there too soon: give more rows"
                    tables_killed += sum(each.poll() is None for each in tables)
            await asyncio.to_thread(cluster.wait_ready)
            assert await live(ingest, endpoint, None) == 0
            for file in (everything, latest):
                with process(file, endpoint, "--once") as last:
                    _, errors = await asyncio.to_thread(last.communicate, timeout=300)
                    assert last.returncode == 0, errors
    assert tables_killed >= KILLS
    files = f"read_json('{folder}/*.jsonl', format = 'newline_delimited', columns = {COLUMNS})"
    assert differences(f"SELECT id, n, cents FROM {files}", rows_of(store, "everything")) == []
    by_id = f"SELECT id, max(n), arg_max(cents, n) FROM {files} GROUP BY id"
    assert differences(by_id, rows_of(store, "latest")) == []


def test_a_difference_is_found() -> None:
    found = pa.table({"id": ["a", "b", "b"], "n": [1, 2, 2]})
    assert differences("SELECT 'a' AS id, 1 AS n UNION ALL SELECT 'b', 2", found) == [("b", 2, "not in the source")]
    assert differences("SELECT 'c' AS id, 1 AS n", found.slice(3)) == [("c", 1, "not in the table")]
