"""Run and kill processes of tables, and compare tables with their sources row by row in DuckDB."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from coranto_consumers.tables import read_table
from tests.consumers.tables.shop import rows_in

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]


@contextlib.contextmanager
def process(file: Path, endpoint: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, "table", "run", str(file), "--endpoint", endpoint, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


class KilledTables:
    """Processes of the tables of given files, which are run and killed."""

    def __init__(self, endpoint: str, chance: random.Random, *files: Path) -> None:
        self.killed = 0
        self._endpoint = endpoint
        self._chance = chance
        self._files = files

    @contextlib.contextmanager
    def running(self, count: int = 1) -> Iterator[None]:
        """Run processes of random tables, and kill them at the end of the block."""
        with contextlib.ExitStack() as exits:
            made = [
                exits.enter_context(process(self._chance.choice(self._files), self._endpoint)) for _ in range(count)
            ]
            yield
            self.killed += sum(each.poll() is None for each in made)

    async def complete(self) -> None:
        """Run a process of each table until it has read the whole stream."""
        for file in self._files:
            with process(file, self._endpoint, "--once") as last:
                _, errors = await asyncio.to_thread(last.communicate, timeout=300)
                assert last.returncode == 0, errors


def rows_of(file: Path) -> pa.Table:
    """Return the rows of the table of a file."""
    return pa.Table.from_pylist(rows_in(read_table(file.read_text())))


def differences(source: str | pa.Table, found: pa.Table) -> list[tuple[object, ...]]:
    """Return the rows that one side has more often. `source` is a table or a query."""
    with duckdb.connect() as connection:
        connection.register("found", found)
        if isinstance(source, pa.Table):
            connection.register("source", source)
            source = "FROM source"
        return connection.sql(
            f"(SELECT *, 'not in the table' FROM (FROM ({source}) EXCEPT ALL FROM found)) UNION ALL "
            f"(SELECT *, 'not in the source' FROM (FROM found EXCEPT ALL FROM ({source})))"
        ).fetchall()
