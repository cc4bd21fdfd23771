"""An ingest of files into a stream and two tables of it, while all processes and a broker are killed.

DuckDB reads the files and compares them with the tables, row by row.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from coranto.client import JournalClient
from coranto.streams.control.lifecycle import Streams, default_template
from tests.consumers.tables.killed import KilledTables, differences, rows_of
from tests.consumers.tables.shop import table_file
from tests.platform.ingest.killing import Killing, crash_broker, two_brokers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "4"))
"""The minimum number of killed processes of the ingest, and of the tables."""
STREAM = "path/orders"
ROWS = 2000
"""The rows of a file. Each turn adds two files."""
INGEST = """
name: orders
stream: {stream}
source:
  files: {{url: "file://{folder}/"}}
key: id
batch: {{bytes: 20000, seconds: 0.2}}
"""
COLUMNS = "{id: 'VARCHAR', n: 'BIGINT', cents: 'BIGINT'}"


def put_file(folder: Path, chance: random.Random) -> None:
    """Write orders to a new file. All orders with the same id are in one file, and the last one wins."""
    folder.mkdir(exist_ok=True)
    file = len(list(folder.iterdir()))
    rows = ({"id": f"{file}-{chance.randrange(200)}", "n": n, "cents": chance.randrange(10_000)} for n in range(ROWS))
    (folder / f"{file:04}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [int(os.environ.get("CORANTO_INGEST_SEED", "5"))])
async def test_both_tables_have_the_rows_of_the_files(
    tmp_path: Path, new_store: Callable[[str], str], seed: int
) -> None:
    chance, folder, store = random.Random(seed), tmp_path / "in", new_store("postgresql")
    ingest, everything, latest = (tmp_path / f"{name}.yaml" for name in ("ingest", "everything", "latest"))
    ingest.write_text(INGEST.format(stream=STREAM, folder=folder))
    for file, mode in ((everything, "append"), (latest, "upsert")):
        columns = "id STRING, n BIGINT, cents BIGINT"
        file.write_text(table_file(f"{{stream: {STREAM}}}", store, mode, table=file.stem, columns=columns))
    with two_brokers(tmp_path) as cluster:
        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=120) as client:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            killing = Killing(client, STREAM, ingest, chance, [partial(crash_broker, cluster)])
            tables = KilledTables(endpoint, chance, everything, latest)
            while not killing.is_over(KILLS) or tables.killed < KILLS:
                for _ in range(2):
                    put_file(folder, chance)
                with tables.running(2):
                    await killing.turn()
            await asyncio.to_thread(cluster.wait_ready)
            await killing.complete()
            await tables.complete()
    files = f"read_json('{folder}/*.jsonl', format = 'newline_delimited', columns = {COLUMNS})"
    assert differences(f"SELECT id, n, cents FROM {files}", rows_of(everything)) == []
    by_id = f"SELECT id, max(n), arg_max(cents, n) FROM {files} GROUP BY id"
    assert differences(by_id, rows_of(latest)) == []


def test_a_difference_is_found() -> None:
    found = pa.table({"id": ["a", "b", "b"], "n": [1, 2, 2]})
    extra = [("b", 2, "not in the source")]
    assert differences("SELECT 'a' AS id, 1 AS n UNION ALL SELECT 'b', 2", found) == extra
    assert differences(found.slice(0, 2), found) == extra
    assert differences("SELECT 'c' AS id, 1 AS n", found.slice(3)) == [("c", 1, "not in the table")]
