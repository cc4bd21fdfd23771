"""Evidence of a shard whose store is in a recovery log: the files that `coranto shards recover` rebuilt.

Such a store has no fence in a row, because the author of its log fences it. Its fence counts as 0.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from coranto.errors import CorruptData, InvalidInput
from coranto.messages import Checkpoint
from coranto_consumers.audit.evidence import Evidence, Row
from coranto_consumers.stores.json_file import STATE_FILE, decode_state
from coranto_consumers.stores.sqlite_file import DATABASE_FILE, WAL_FILE


class RecoveredEvidence:
    """Evidence in the recovered files of one shard in `folder`: of a `JsonFileStore` or a `SqliteStore`.

    Queries need a `SqliteStore`. The folder is not changed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def name(self) -> str:
        return str(self._folder)

    def read(self, shards: Sequence[str], queries: Sequence[str]) -> Evidence:
        """Return the evidence of the shard. Raises InvalidInput for several shards, or without such files."""
        if len(shards) != 1:
            raise InvalidInput(f"{self._folder} has the files of one shard, not of {len(shards)}", field="shards")
        try:
            if (self._folder / DATABASE_FILE).exists():
                return self._of_sqlite(shards[0], queries)
            if (self._folder / STATE_FILE).exists():
                _, checkpoint = decode_state((self._folder / STATE_FILE).read_text(encoding="utf-8"))
                problem = ValueError("the store is a JSON file, which takes no queries")
                row = Row(0, checkpoint.to_bytes(), checkpoint)
                return Evidence({shards[0]: row}, values=[problem for _ in queries])
        except (CorruptData, OSError, UnicodeDecodeError) as error:
            return Evidence({shards[0]: Row(0, b"", Checkpoint(), str(error))}, values=[error for _ in queries])
        raise InvalidInput(
            f"{self._folder} has neither {STATE_FILE} nor {DATABASE_FILE}; recover a shard into it: "
            "coranto shards recover SHARD --dir DIR",
            field="recovered",
        )

    def _of_sqlite(self, shard: str, queries: Sequence[str]) -> Evidence:
        # Opening a database changes its files, so a copy is opened.
        with tempfile.TemporaryDirectory(prefix="coranto-audit-") as folder:
            for file in (DATABASE_FILE, WAL_FILE):
                if (self._folder / file).exists():
                    shutil.copyfile(self._folder / file, Path(folder) / file)
            with closing(sqlite3.connect(Path(folder) / DATABASE_FILE, isolation_level=None)) as connection:
                try:
                    (payload,) = connection.execute("SELECT checkpoint FROM gazette_checkpoint").fetchone()
                    connection.execute("PRAGMA query_only = ON")
                except (sqlite3.DatabaseError, TypeError) as error:
                    raise CorruptData(f"{self._folder / DATABASE_FILE} has no checkpoint: {error}") from error
                content = bytes(payload)
                row = Row(0, content, Checkpoint.from_bytes(content))
                return Evidence({shard: row}, values=[_value(connection, query) for query in queries])


def _value(connection: sqlite3.Connection, query: str) -> object:
    try:
        rows = connection.execute(query).fetchmany(2)
    except sqlite3.Error as error:
        return ValueError(str(error))
    if len(rows) != 1 or len(rows[0]) != 1:
        return ValueError("it does not return exactly one row of one column")
    value: object = rows[0][0]
    return value
