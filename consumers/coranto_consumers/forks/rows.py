"""A forked consumer's row in a SQL store, and copies of tables with it.

Each change is one transaction, and raises the fence of the row that it changes. So a process that still works as that
consumer cannot commit any more, and of two changes at once one wins. A row is never deleted: its fence would begin
anew, and a process that was fenced off long ago could commit again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    Column,
    Connection,
    Index,
    MetaData,
    PrimaryKeyConstraint,
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
from coranto_consumers.stores.sql import CHECKPOINTS, Restored, SqlStore
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
    """Give the consumer `new` the checkpoint of `name`, as `renamed` changes it, and copies of tables, by their names.

    The checkpoint and the tables are of one moment: the transaction has the lock that each commit of `name` needs, so
    its next commit waits until the copy is made. Returns the new checkpoint. Raises InvalidInput if `name` has no
    checkpoint, `new` has one already, or a table cannot be copied, and SqlStoreError.
    """
    store.create_tables()
    copies = _copies(store, tables)
    try:
        with store.engine.begin() as connection:
            found = _locked(connection, name)
            if found is None or not found.checkpoint.sources:
                raise InvalidInput(f"{name!r} has no checkpoint in the store", field="consumer")
            present = _locked(connection, new)
            if present is not None and present.checkpoint != Checkpoint():
                raise InvalidInput(f"{new!r} has a checkpoint already; choose another name", field="--as")
            checkpoint = renamed(found.checkpoint)
            for source, target in copies:
                _copy_rows(connection, source, target)
            _write(connection, new, present, checkpoint)
    except SQLAlchemyError as error:
        raise store.failure(f"the checkpoint of {name} could not be copied", error) from error
    return checkpoint


def replace_row(store: SqlStore, name: str, expected: Restored, checkpoint: Checkpoint) -> int:
    """Replace a consumer's checkpoint if its row is as expected, raise its fence, and delete what it staged.

    Returns the fence. Raises Fenced if the consumer has started or committed since, and SqlStoreError.
    """
    store.create_tables()
    try:
        with store.engine.begin() as connection:
            present = _locked(connection, name)
            if present != expected:
                raise Fenced(f"consumer {name} has started or committed meanwhile; stop it, and try again")
            fence = _write(connection, name, present, checkpoint)
            delete_stale(store, connection, name, fence)
    except SQLAlchemyError as error:
        raise store.failure(f"the checkpoint of {name} could not be changed", error) from error
    return fence


def drop_tables(store: SqlStore, names: Sequence[str]) -> list[str]:
    """Drop tables that exist, and return their names. Raises InvalidInput for a consumer's own tables."""
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


def _locked(connection: Connection, name: str) -> Restored | None:
    """Return a consumer's row, which nobody else can change before the transaction ends."""
    row = connection.execute(
        select(CHECKPOINTS.c.fence, CHECKPOINTS.c.checkpoint).where(CHECKPOINTS.c.shard_fqn == name).with_for_update()
    ).one_or_none()
    return None if row is None else Restored(int(row.fence), Checkpoint.from_bytes(bytes(row.checkpoint)))


def _write(connection: Connection, name: str, present: Restored | None, checkpoint: Checkpoint) -> int:
    """Write a row under a higher fence, and return that."""
    commit_durably(connection)
    fence = 1 if present is None else present.fence + 1
    values = {"fence": fence, "checkpoint": checkpoint.to_bytes()}
    if present is None:
        connection.execute(insert(CHECKPOINTS).values(shard_fqn=name, **values))
    else:
        connection.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.shard_fqn == name).values(**values))
    return fence


def _copies(store: SqlStore, names: Mapping[str, str]) -> list[tuple[Table, Table]]:
    """Return tables and the tables to copy them to, which are created if they are absent. Raises InvalidInput."""
    found = []
    try:
        with store.engine.connect() as connection:
            looked = inspect(connection)
            for name, new in names.items():
                if name == new or new.startswith(_OURS):
                    raise InvalidInput(f"cannot be copied to {new}; choose another name", field=f"table {name}")
                if not looked.has_table(name):
                    raise InvalidInput(f"is not in {store.name}; check its name", field=f"table {name}")
                source = Table(name, MetaData(), autoload_with=connection)
                target = (
                    Table(new, MetaData(), autoload_with=connection) if looked.has_table(new) else _like(source, new)
                )
                if missing := sorted(set(source.c.keys()) - set(target.c.keys())):
                    raise InvalidInput(f"has no column {missing[0]}, which {name} has", field=f"table {new}")
                found.append((source, target))
    except SQLAlchemyError as error:
        raise store.failure("tables could not be looked up", error) from error
    store.create_tables(*(target for _, target in found))
    return found


def _like(source: Table, name: str) -> Table:
    """Return a table with the columns, keys and indexes of another one. Their names are left to the database."""
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
