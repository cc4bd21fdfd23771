"""The Iceberg store of a shard: appended rows, the checkpoint and the fence are in one commit of one table.

**State.** A shard's fence and checkpoint are a property of the table. The commit that appends rows sets it, too. (The
summary of a snapshot would be another place. But expiring snapshots would lose it, and each snapshot would have a copy
in the table's metadata.)

**Fence.** Each commit, and each raising of the fence, makes a new snapshot, and requires that the table's current
snapshot is the one whose state it has checked. So a commit that began before the fence was raised fails, however late
it arrives. Iceberg's own retries would build it anew on the new snapshot and commit it: they are turned off, and each
attempt checks the fence again.

**Losers.** Rows are written to a file once, before the first attempt. If it turns out that they will never commit, the
file is removed. A process that dies leaves its file. No snapshot names it, so no reader sees it, and the next owner
removes it: an owner numbers its files, and commits one after the other, so the state tells the only name that can be
left. The next owners look for it, too, because a process that hung may still write it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table, TableProperties, Transaction
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from coranto.errors import CommitOutcomeUnknown, CorruptData, Fenced, InvalidInput, SqlStoreError
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.durability import risks
from coranto_consumers.stores.engines import is_transient
from coranto_consumers.stores.json_file import checkpoint_from_json, checkpoint_to_json

PREFIX: Final = "coranto.shard."
_ATTEMPTS: Final = 20
_SYNCHRONOUS: Final = text("SELECT current_setting('synchronous_commit')")
_MOST_WAIT: Final = 1.0
_SWEPT_OWNERS: Final = 3
"""The number of earlier owners whose last file each new owner removes."""

_log = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardState:
    """A shard's state in a table. `snapshot` and `sequence` are of the snapshot that was committed with it.

    `files` begins the names of the owner's files, and `committed` is the number of the last one that it has committed.
    `left` are the names of files that earlier owners may have left.
    """

    fence: int = 0
    checkpoint: Checkpoint = Checkpoint()  # noqa: RUF009
    snapshot: int = 0
    sequence: int = 0
    files: str = ""
    committed: int = 0
    left: tuple[str, ...] = ()

    @property
    def uncommitted(self) -> tuple[str, ...]:
        """The names of files that may be there, and are never committed once a later owner has raised the fence."""
        own = (file_name(self.files, self.committed + 1),) if self.files else ()
        return (*self.left, *own)[-_SWEPT_OWNERS:]


def file_name(prefix: str, number: int) -> str:
    """Return the name of an owner's file."""
    return f"{prefix}-{number}.parquet"


class IcebergShardStore(Store):
    """A table of an Iceberg catalog to which a shard appends rows, each exactly once.

    Several shards, and other writers that only append or compact, may share the table. It must not be partitioned. Each
    transaction makes a snapshot and, if it has rows, a file: give shards a long `min_txn_duration`.

    The catalog must be pyiceberg's SQL catalog on PostgreSQL or SQLite, which swaps the table's metadata in one
    statement. If another catalog called a commit failed that it has made, pyiceberg would remove its files.
    """

    def __init__(
        self, catalog: Catalog, table: str, schema: pa.Schema | None = None, *, relaxed_durability: bool = False
    ) -> None:
        """`table` is `namespace.name`. With `schema` it is created if it is absent.

        `relaxed_durability` accepts a catalog's server that may lose commits when its machine crashes. Raises
        InvalidInput for a catalog that this store cannot use.
        """
        if not isinstance(catalog, SqlCatalog) or catalog.engine.dialect.name not in ("postgresql", "sqlite"):
            raise InvalidInput(
                f"is a {type(catalog).__name__}, which may call a commit failed that it has made; use a SqlCatalog on "
                "PostgreSQL or SQLite",
                field="catalog",
            )
        self._catalog = catalog
        self._relaxed = relaxed_durability
        self._name = table
        self._schema = schema
        self._shard = ""
        self._fence = 0
        self._files = ""
        self._committed = 0  # The number of the last file that this owner has committed.
        self._left: tuple[str, ...] = ()
        self._unknown = False  # A commit's outcome is unknown: this owner must not go on.
        self._pending: list[pa.Table] = []
        self._commit: asyncio.Future[None] | None = None
        self._columns: pa.Schema = pa.schema([])

    def append(self, rows: Sequence[Mapping[str, object]] | pa.Table) -> None:
        """Add rows to the current transaction. Raises InvalidInput for rows that do not fit the table."""
        try:
            if isinstance(rows, pa.Table):
                added = rows.select(self._columns.names).cast(self._columns)
            else:
                if unknown := {name for row in rows for name in row} - set(self._columns.names):
                    raise InvalidInput(f"{self._name} has no column {min(unknown)!r}", field="rows")
                added = pa.Table.from_pylist(list(rows), self._columns)
            added.validate(full=True)
        except (pa.ArrowException, KeyError, TypeError, OverflowError, UnicodeError) as error:
            raise InvalidInput(f"do not fit {self._name}: {error}", field="rows") from error
        for field in self._columns:
            if not field.nullable and added.column(field.name).null_count:
                raise InvalidInput(f"{self._name} needs {field.name}, which is null", field="rows")
        if added.num_rows:
            self._pending.append(added)

    async def rows(self) -> pa.Table:
        """Return all rows of the table, and those of the current transaction."""
        if self._commit is not None:
            await asyncio.wait([self._commit])
        pending = list(self._pending)

        def read() -> pa.Table:
            return pa.concat_tables([self._load().scan().to_arrow().cast(self._columns), *pending])

        return await asyncio.to_thread(read)

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        self._shard = shard

        def raise_fence(table: Table) -> ShardState:
            state = state_of(table, shard)
            # The random part keeps names apart if a table was made again in the place of another.
            files = f"coranto-{_digest(shard)}-{state.fence + 1}-{uuid.uuid4().hex[:8]}"
            raised = ShardState(state.fence + 1, state.checkpoint, files=files, left=state.uncommitted)
            self._stage_and_commit(table, raised, None)
            self._files, self._left = files, raised.left
            return state

        def restore() -> Checkpoint:
            self._require_durability()
            self._create()
            before = self._attempt(raise_fence)
            self._fence, self._committed, self._unknown = before.fence + 1, 0, False
            self._sweep()
            return before.checkpoint

        return await asyncio.to_thread(restore)

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        rows, self._pending = self._pending, []
        self._commit = asyncio.ensure_future(self._complete(rows, checkpoint, wait_for))
        return self._commit

    async def destroy(self) -> None:
        if self._commit is not None:
            await asyncio.wait([self._commit])
        self._pending = []

    def is_transient(self, error: BaseException) -> bool:
        if isinstance(error, DBAPIError):
            return is_transient(error)
        return super().is_transient(error)

    async def _complete(
        self, rows: Sequence[pa.Table], checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> None:
        for awaited in wait_for:
            await awaited
        # Work in a thread cannot be cancelled, so a cancelled caller waits for its end.
        working = asyncio.ensure_future(asyncio.to_thread(self._commit_rows, rows, checkpoint))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def _commit_rows(self, rows: Sequence[pa.Table], checkpoint: Checkpoint) -> None:
        number = self._committed + bool(rows)

        def commit(table: Table) -> None:
            self._require_fence(table)
            state = ShardState(self._fence, checkpoint, files=self._files, committed=number, left=self._left)
            self._stage_and_commit(table, state, file)
            self._committed = number

        if self._unknown:
            raise CommitOutcomeUnknown(f"{self._name}: the outcome of an earlier commit is unknown; restore anew")
        table = self._load()
        self._require_fence(table)
        file = self._write(table, file_name(self._files, number), pa.concat_tables(rows)) if rows else None
        try:
            self._attempt(commit)
        except CommitOutcomeUnknown:
            self._unknown = True  # The table may name the file.
            raise
        except BaseException:
            if file is not None:
                _remove(table, file)
            raise

    def _require_durability(self) -> None:
        """Refuse a server that may lose a commit: acknowledgements follow it, and cannot be taken back."""
        with self._catalog.engine.connect() as connection:
            found = risks(connection)
            if connection.dialect.name == "postgresql" and connection.execute(_SYNCHRONOUS).scalar_one() == "off":
                found.append("synchronous_commit is off: set it to on")
        if found and not self._relaxed:
            raise InvalidInput(
                f"may lose commits: {'; '.join(found)}; or accept that with relaxed_durability=True", field="catalog"
            )
        if found:
            _log.warning("iceberg.relaxed_durability", table=self._name, risks=found)

    def _require_fence(self, table: Table) -> None:
        found = state_of(table, self._shard).fence
        if found != self._fence:
            raise Fenced(
                f"shard {self._shard}: a later owner has raised the fence to {found}; this one had {self._fence}"
            )

    def _attempt(self, work: Callable[[Table], T]) -> T:
        """Do `work` on the table as it is now, again if another writer comes first. Raises SqlStoreError at last."""
        wait = 0.01
        for _ in range(_ATTEMPTS):
            try:
                return work(self._load())
            except CommitFailedException as error:
                failure = error
            time.sleep(random.uniform(wait / 2, wait))
            wait = min(2 * wait, _MOST_WAIT)
        raise SqlStoreError(
            f"{self._name}: other writers came first {_ATTEMPTS} times: {failure}; have them commit less often"
        ) from failure

    def _stage_and_commit(self, table: Table, state: ShardState, file: str | None) -> None:
        """Commit a snapshot with the rows of `file` and the shard's state, on the snapshot that `table` shows.

        Raises CommitFailedException if the table has another one by now, and CommitOutcomeUnknown.
        """
        # Only in this object: the table's own property is the user's.
        table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        transaction = Transaction(table)
        summary = {"coranto.shard": self._shard, "coranto.fence": str(state.fence)}
        if file is None:
            transaction.append(self._columns.empty_table(), snapshot_properties=summary)
        else:
            transaction.add_files([file], snapshot_properties=summary, check_duplicate_files=False)
        staged = transaction.table_metadata.current_snapshot()
        if staged is None or staged.sequence_number is None:
            raise InvalidInput(f"{self._name} has format 1; upgrade it to format 2", field="table")
        value = json.dumps(
            {
                "shard": self._shard,
                "fence": state.fence,
                "snapshot": staged.snapshot_id,
                "sequence": staged.sequence_number,
                "checkpoint": checkpoint_to_json(state.checkpoint),
                "files": state.files,
                "committed": state.committed,
                "left": list(state.left),
            },
            separators=(",", ":"),
        )
        transaction.set_properties({_key(self._shard): value})
        try:
            transaction.commit_transaction()
        except CommitFailedException:
            raise
        except Exception as error:
            raise CommitOutcomeUnknown(
                f"{self._name}: the catalog failed while it committed: {type(error).__name__}"
            ) from error

    def _sweep(self) -> None:
        """Remove the files that earlier owners have left. The fence is raised: nobody can commit them any more."""
        table = self._load()
        for name in self._left:
            try:
                table.io.delete(_path(table, name))
            except FileNotFoundError:
                continue  # Nearly always.
            except OSError as error:
                _log.warning("iceberg.file_left", file=_path(table, name), error=str(error))
            else:
                _log.info("iceberg.file_swept", file=_path(table, name))

    def _write(self, table: Table, name: str, rows: pa.Table) -> str:
        path = _path(table, name)
        with table.io.new_output(path).create() as stream:
            pq.write_table(rows, stream, compression="zstd")
        return path

    def _load(self) -> Table:
        return self._catalog.load_table(self._name)

    def _create(self) -> None:
        try:
            table = self._load()
        except NoSuchTableError:
            if self._schema is None:
                raise InvalidInput(f"there is no table {self._name}; create it, or give its schema") from None
            self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            table = self._catalog.create_table_if_not_exists(self._name, self._schema)
        if not table.spec().is_unpartitioned():
            raise InvalidInput(f"{self._name} is partitioned, and shards append to tables that are not", field="table")
        self._columns = schema_to_pyarrow(table.schema(), include_field_ids=False)


def state_of(table: Table, shard: str) -> ShardState:
    """Return a shard's state in a table. Raises CorruptData if the table lost commits that the state knows of."""
    value = table.properties.get(_key(shard))
    if value is None:
        return ShardState()
    try:
        document: Any = json.loads(value)
        state = ShardState(
            int(document["fence"]),
            checkpoint_from_json(document["checkpoint"]),
            int(document["snapshot"]),
            int(document["sequence"]),
            str(document.get("files", "")),
            int(document.get("committed", 0)),
            tuple(map(str, document.get("left", ()))),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"{_key(shard)} is not a shard's state: {error}; restore the table's properties") from error
    if _was_rolled_back(table, state):
        raise CorruptData(
            f"{'.'.join(table.name())} was rolled back behind the checkpoint of {shard}, whose rows are gone. Roll it "
            f"forward to snapshot {state.snapshot} or one that follows it, or delete the property "
            f"{_key(shard)} and the shard's rows to consume all anew"
        )
    return state


def _was_rolled_back(table: Table, state: ShardState) -> bool:
    """Return True if the history leads past the state's snapshot. Where snapshots have expired, nobody can tell."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return True
    while snapshot.snapshot_id != state.snapshot:
        if (snapshot.sequence_number or 0) <= state.sequence:
            return True
        before = snapshot.parent_snapshot_id
        parent = table.snapshot_by_id(before) if before is not None else None
        if parent is None:  # It has expired: there is a snapshot for each sequence number.
            return False
        snapshot = parent
    return False


def _path(table: Table, name: str) -> str:
    return f"{table.location().rstrip('/')}/data/{name}"


def _remove(table: Table, file: str) -> None:
    try:
        table.io.delete(file)
    except OSError as error:
        _log.warning("iceberg.file_left", file=file, error=str(error))


def _digest(shard: str) -> str:
    return hashlib.sha256(shard.encode()).hexdigest()[:16]


def _key(shard: str) -> str:
    return PREFIX + _digest(shard)
