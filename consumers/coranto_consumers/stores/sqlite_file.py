"""`SqliteStore`: the state as a local SQLite database in a recovery log.

The store records SQLite's write-ahead log, commit by commit, and from time to time a copy of the database; see
`docs/recovery-logs.md`. The local files are never synced to disk, because they are recovered from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import structlog

from coranto.errors import CorruptData
from coranto.messages.checkpoints import Checkpoint, Identity
from coranto_consumers.recoverylog import Recorder
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.json_file import failed
from coranto_consumers.stores.wal import WalFollower, WalTail

DATABASE_FILE: Final = "store.db"
WAL_FILE: Final = "store.db-wal"
NEXT_FILE: Final = "store.db.next"
DEFAULT_COPY_BYTES: Final = 16 << 20

_PIECE_BYTES: Final = 1 << 20
_PENDING_BYTES: Final = 16 << 20
_CHECKPOINTS: Final = """
CREATE TABLE IF NOT EXISTS gazette_checkpoint (
    rowid INTEGER PRIMARY KEY DEFAULT 0 CHECK (rowid = 0),
    checkpoint BLOB
);
INSERT OR IGNORE INTO gazette_checkpoint (rowid, checkpoint) VALUES (0, x'');
"""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class SqliteStore(Store):
    """A store whose `connection` the application uses. Changes of a transaction commit with the checkpoint.

    The store has the only connection, and locks the file. A `COMMIT` by the application only ends SQLite's transaction.
    `schema` is a script of statements such as `CREATE TABLE IF NOT EXISTS`, which runs at each start. When the
    write-ahead log has reached both `copy_bytes` and the size of the database, a commit also records the whole
    database, and takes longer. The recovery log before this copy is then unused, and can be pruned.
    """

    def __init__(self, recorder: Recorder, schema: str = "", *, copy_bytes: int = DEFAULT_COPY_BYTES) -> None:
        self._recorder = recorder
        self._schema = schema
        self._copy_bytes = copy_bytes
        self._database = recorder.directory / DATABASE_FILE
        self._wal = WalFollower(recorder.directory / WAL_FILE)
        self._connection: sqlite3.Connection | None = None

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection. Begins a transaction if necessary. Not thread-safe."""
        connection = self._opened
        if not connection.in_transaction:
            connection.execute("BEGIN IMMEDIATE")
        return connection

    @property
    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.ProgrammingError("the store is not open: restore its checkpoint first")
        return self._connection

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        """Open the database, and return its checkpoint. Raises CorruptData when the recovered file is not a database.

        A cancelled call may leave the database open, until `destroy`.
        """
        if self._recorder.exists(NEXT_FILE):
            self._recorder.remove(NEXT_FILE)  # Left by an owner that stopped during a copy.
        try:
            fresh, content = await in_thread(self._open)
        except sqlite3.DatabaseError as error:
            raise CorruptData(
                f"{self._database} cannot be opened: {error}; "
                "the shard rebuilds it from its recovery log on another start"
            ) from error
        if fresh:
            await self._copy()
        else:
            self._record(await in_thread(self._wal.read))
        await self._recorder.barrier()
        return Checkpoint.from_bytes(content)

    def _open(self) -> tuple[bool, bytes]:
        fresh = not self._recorder.exists(DATABASE_FILE)
        connection = sqlite3.connect(self._database, isolation_level=None, check_same_thread=False)
        self._connection = connection
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA synchronous = OFF")
        if not fresh:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            self._wal.read()  # Skip content that the recovery log already holds.
        connection.executescript(_CHECKPOINTS)
        if self._schema:
            connection.executescript(self._schema)
        (content,) = connection.execute("SELECT checkpoint FROM gazette_checkpoint").fetchone()
        return fresh, bytes(content)

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        recorder = self._recorder
        try:
            recorder.after(wait_for)
            self._record(await in_thread(lambda: self._commit(checkpoint.to_bytes())))
            durable = recorder.barrier()
            if self._wal.position >= max(self._copy_bytes, self._database.stat().st_size):
                await self._copy()
        except BaseException as error:
            if not recorder.has_failed:
                raise
            return failed(error)
        return durable

    def identity(self) -> Identity:
        return Identity(outputs=frozenset(f"table {name}" for name in _tables_of(self._schema)))

    def _commit(self, checkpoint: bytes) -> WalTail:
        self.connection.execute("UPDATE gazette_checkpoint SET checkpoint = ?", (checkpoint,))
        self._opened.execute("COMMIT")
        return self._wal.read()

    def _record(self, tail: WalTail) -> None:
        if not tail.content:
            return
        recorder = self._recorder
        with recorder.together():
            fnode = recorder.fnode_of(WAL_FILE) if tail.offset else recorder.create(WAL_FILE)
            for begin in range(0, len(tail.content), _PIECE_BYTES):
                recorder.write(fnode, tail.offset + begin, tail.content[begin : begin + _PIECE_BYTES])

    async def _copy(self) -> None:
        """Checkpoint the write-ahead log into the database file, restart it, and record the database.

        Players see the previous files until the whole copy is recorded, and the commit's `wait_for` is done.
        """
        busy, *_ = await in_thread(self._opened.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone)
        if busy:
            raise CorruptData(
                f"{self._database} is in use by another connection than its store's; use store.connection only"
            )
        self._wal.restart()
        recorder = self._recorder
        fnode, offset = recorder.create(NEXT_FILE), 0
        with self._database.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                recorder.write(fnode, offset, piece)
                offset += len(piece)
                if recorder.pending_bytes > _PENDING_BYTES:
                    await recorder.barrier()
        with recorder.together():
            recorder.rename(NEXT_FILE, DATABASE_FILE)
            if recorder.exists(WAL_FILE):
                recorder.remove(WAL_FILE)
        _log.info("sqlite_store.copied", log=recorder.log, bytes=offset)

    async def destroy(self) -> None:
        await self._recorder.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):  # The database is removed with its folder anyway.
                connection.close()
        shutil.rmtree(self._recorder.directory, ignore_errors=True)


def _tables_of(schema: str) -> list[str]:
    """Return the tables that a script creates in an empty database. Returns an empty list if the script fails there."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.executescript(schema)
        except sqlite3.Error:
            return []
        found = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
        )
        return [str(name) for (name,) in found]


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return its result. It cannot be cancelled: a cancelled caller waits for its end."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
