"""A forked consumer's row in a SQL store, and copies of tables with it.

Each change is one transaction, and raises the fence of the row that it changes. So a process that still runs as that
consumer is fenced off, and only one of two concurrent changes succeeds. A row is never deleted: its fence would start
over, and a process that was fenced off long ago could commit again. The row of a dropped or promoted consumer is
retired (`stores/retired.py`), so a restarted process cannot take it over either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    Column,
    Connection,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    Result,
    Select,
    Table,
    UniqueConstraint,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from coranto.errors import Fenced, InvalidInput
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.durability import commit_durably
from coranto_consumers.stores.engines import READS_ONLY
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.retired import Retired, checkpoint_of
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore
from coranto_consumers.stores.staging import PREFIX as STAGE_PREFIX
from coranto_consumers.stores.staging import delete_stale

_OURS: Final = (CHECKPOINTS.name, STAGE_PREFIX)


def copy_row(
    store: SqlStore,
    name: str,
    new: str,
    renamed: Callable[[Checkpoint], Checkpoint],
    tables: Mapping[str, str],
) -> Checkpoint:
    """Copy the checkpoint of `name`, changed by `renamed`, to the consumer `new`, and tables to their new names.

    The checkpoint and the tables are consistent: the transaction has the lock that each commit of `name` needs, so the
    next commit waits for the copy. Returns the new checkpoint. Raises InvalidInput if `name` has no
    checkpoint, `new` has one already, or a table cannot be copied, and SqlStoreError.
    """
    store.create_tables()
    copies = _copies(store, tables)
    try:
        with store.engine.begin() as connection:
            found = _locked(connection, name)
            checkpoint = Checkpoint() if found is None else checkpoint_of(name, found.content)
            if not checkpoint.sources:
                raise InvalidInput(f"{name!r} has no checkpoint in the store", field="consumer")
            present = _locked(connection, new)
            if present is not None:
                _require_free(new, present.content)
            checkpoint = renamed(checkpoint)
            for source, target in copies:
                _copy_rows(connection, source, target)
            _write(connection, new, present, checkpoint.to_bytes())
    except SQLAlchemyError as error:
        raise store.failure(f"the checkpoint of {name} could not be copied", error) from error
    return checkpoint


def look_up(store: SqlStore, name: str) -> Restored | Retired | None:
    """Return a consumer's row, or its note if it is retired. None without a row. Raises SqlStoreError."""
    try:
        with store.engine.connect().execution_options(**{READS_ONLY: True}) as connection:
            if not inspect(connection).has_table(CHECKPOINTS.name):
                return None
            return _read(_row(connection.execute(_select(name))))
    except SQLAlchemyError as error:
        raise store.failure(f"the checkpoint of {name} could not be read", error) from error


def promote_row(store: SqlStore, name: str, expected: Restored, new: str, checkpoint: Checkpoint) -> None:
    """Retire a consumer if its row is as expected, and give `checkpoint` to its successor `new`, in one transaction.

    The consumer's staged rows are deleted. Raises Fenced if it has started or committed since, InvalidInput if it is
    retired already or the store has a row of `new`, and SqlStoreError.
    """
    _retire(store, name, expected, Retired(new), checkpoint)


def retire_row(store: SqlStore, name: str, expected: Restored | None) -> None:
    """Retire a consumer that is dropped, if its row is as expected. Raises as `promote_row`."""
    _retire(store, name, expected, Retired(), Checkpoint())


def _retire(store: SqlStore, name: str, expected: Restored | None, note: Retired, checkpoint: Checkpoint) -> None:
    store.create_tables()
    try:
        with store.engine.begin() as connection:
            present = _locked(connection, name)
            found = _read(present)
            if isinstance(found, Retired):
                raise found.error(name)
            if found != expected:
                raise Fenced(f"consumer {name} has started or committed during this call; stop it, and try again")
            if note.successor:
                if _locked(connection, note.successor) is not None:
                    raise InvalidInput(
                        f"{note.successor!r} is a consumer of the store already, or was one; choose another name",
                        field="--as",
                    )
                _write(connection, note.successor, None, checkpoint.to_bytes())
            fence = _write(connection, name, present, note.to_bytes())
            delete_stale(store, connection, name, fence)
    except SQLAlchemyError as error:
        raise store.failure(f"the checkpoint of {name} could not be changed", error) from error


def drop_tables(store: SqlStore, names: Sequence[str]) -> list[str]:
    """Drop tables that exist, and return their names. Raises InvalidInput for the store's own tables."""
    if ours := [name for name in names if name.startswith(_OURS)]:
        raise InvalidInput(f"{ours[0]} is of all consumers of the store", field="--table")
    dropped = []
    try:
        with store.engine.begin() as connection:
            for name in names:
                if inspect(connection).has_table(name):
                    Table(name, MetaData(), autoload_with=connection).drop(connection)
                    dropped.append(name)
    except SQLAlchemyError as error:
        raise store.failure("tables could not be dropped", error) from error
    return dropped


class _Row(NamedTuple):
    fence: int
    content: bytes


def _select(name: str) -> Select[Any]:
    return select(CHECKPOINTS.c.fence, CHECKPOINTS.c.checkpoint).where(CHECKPOINTS.c.shard_fqn == name)


def _locked(connection: Connection, name: str) -> _Row | None:
    """Return a consumer's row, locked until the transaction ends."""
    return _row(connection.execute(_select(name).with_for_update()))


def _row(result: Result[Any]) -> _Row | None:
    row = result.one_or_none()
    return None if row is None else _Row(int(row.fence), bytes(row.checkpoint))


def _read(row: _Row | None) -> Restored | Retired | None:
    if row is None:
        return None
    return Retired.from_bytes(row.content) or Restored(row.fence, Checkpoint.from_bytes(row.content))


def _require_free(name: str, content: bytes) -> None:
    """Raise InvalidInput if a row has a checkpoint, or belongs to a promoted consumer."""
    retired = Retired.from_bytes(content)
    if retired is not None and retired.successor:
        raise retired.error(name)
    if retired is None and Checkpoint.from_bytes(content) != Checkpoint():
        raise InvalidInput(f"{name!r} has a checkpoint already; choose another name", field="--as")


def _write(connection: Connection, name: str, present: _Row | None, content: bytes) -> int:
    """Write a row under the next fence, and return the fence."""
    commit_durably(connection)
    fence = 1 if present is None else present.fence + 1
    values = {"fence": fence, "checkpoint": content}
    if present is None:
        connection.execute(insert(CHECKPOINTS).values(shard_fqn=name, **values))
    else:
        connection.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.shard_fqn == name).values(**values))
    return fence


def _copies(store: SqlStore, names: Mapping[str, str]) -> list[tuple[Table, Table]]:
    """Return tables and their targets. Targets that do not exist are created. Raises InvalidInput."""
    found = []
    try:
        with store.engine.connect() as connection:
            inspector = inspect(connection)
            for name, new in names.items():
                if name == new or new.startswith(_OURS):
                    raise InvalidInput(f"cannot be copied to {new}; choose another name", field=f"table {name}")
                if not inspector.has_table(name):
                    raise InvalidInput(f"is not in {store.name}; check its name", field=f"table {name}")
                source = Table(name, MetaData(), autoload_with=connection)
                target = (
                    Table(new, MetaData(), autoload_with=connection) if inspector.has_table(new) else _like(source, new)
                )
                if missing := sorted(set(source.c.keys()) - set(target.c.keys())):
                    raise InvalidInput(f"has no column {missing[0]}, which {name} has", field=f"table {new}")
                found.append((source, target))
    except SQLAlchemyError as error:
        raise store.failure("tables could not be looked up", error) from error
    store.create_tables(*(target for _, target in found))
    return found


def _like(source: Table, name: str) -> Table:
    """Return a table with the columns, keys and indexes of another one. The database names the keys."""
    columns: list[Any] = []
    for column in source.columns:
        default = str(getattr(column.server_default, "arg", ""))
        if column.identity is not None or "nextval(" in default:
            raise InvalidInput(
                f"takes its numbers from a sequence; create the table {name} yourself, and fork again",
                field=f"column {column.name} of table {source.name}",
            )
        columns.append(
            Column(
                column.name,
                column.type,
                nullable=column.nullable,
                server_default=column.server_default,
                autoincrement=False,
            )
        )
    keys: list[Any] = [
        PrimaryKeyConstraint(*(column.name for column in source.primary_key.columns))
        if len(source.primary_key.columns)
        else None,
        *(
            UniqueConstraint(*(column.name for column in each.columns))
            for each in source.constraints
            if isinstance(each, UniqueConstraint)
        ),
    ]
    target = Table(name, MetaData(), *columns, *(each for each in keys if each is not None))
    for number, index in enumerate(sorted(source.indexes, key=lambda each: str(each.name))):
        Index(f"{name}_{number}", *(target.c[column.name] for column in index.columns), unique=index.unique)
    return target


def _copy_rows(connection: Connection, source: Table, target: Table) -> None:
    if connection.execute(select(func.count()).select_from(target)).scalar_one():
        raise InvalidInput("has rows already; choose another name, or empty it", field=f"table {target.name}")
    names = [column.name for column in source.columns]
    connection.execute(insert(target).from_select(names, select(*(source.c[name] for name in names))))
