"""The state of a table in its store: its position, its rows, and how it differs from its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sqlalchemy import MetaData, Table, func, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from coranto_consumers.stores.engines import READS_ONLY
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.reading import read_checkpoint
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.tables.columns import TableLayout
from coranto_consumers.tables.evolving import TableState, not_evolved
from coranto_consumers.tables.spec import TableSpec


def offsets_of(spec: TableSpec) -> Mapping[str, int]:
    """Return the offsets that the table has of journals; none before the first commit. Raises SqlStoreError."""
    if spec.is_iceberg and count_rows(spec) is None:
        return {}
    found: Restored | None = read_checkpoint(spec.store_url, spec.name)
    return {} if found is None else found.checkpoint.offsets


def count_rows(spec: TableSpec) -> int | None:
    """Return the number of rows of the table; None if there is no table. Raises SqlStoreError."""
    if spec.is_iceberg:
        from pyiceberg.exceptions import NoSuchTableError

        from coranto_consumers.stores.iceberg.catalogs import FAILURES, failure
        from coranto_consumers.stores.iceberg.urls import IcebergHome

        home = IcebergHome.at(spec.store_url)
        try:
            return int(home.catalog.load_table(home.table).scan().count())
        except NoSuchTableError:
            return None
        except FAILURES as error:
            raise failure(f"table {home.table} could not be read", error) from error
    store = SqlStore(spec.store)
    try:
        with store.engine.connect().execution_options(**{READS_ONLY: True}) as connection:
            if not inspect(connection).has_table(spec.table):
                return None
            table = Table(spec.table, MetaData())
            return int(connection.execute(select(func.count()).select_from(table)).scalar_one())
    except SQLAlchemyError as error:
        raise store.failure(f"table {spec.table} could not be read", error) from error


def expectation_of(spec: TableSpec) -> list[str]:
    """Return what audits expect of the table: as many rows as messages, where each message is a row."""
    if spec.mode != "append" or spec.filter:
        return []
    if spec.is_iceberg:  # Only small letters, digits and _: names are checked when a file is read.
        table = ".".join(f'"{part}"' for part in spec.table.split("."))
    else:
        table = SqlStore(spec.store).engine.dialect.identifier_preparer.quote(spec.table)
    return [f"SELECT COUNT(*) FROM {table} == messages"]


class StateLine(NamedTuple):
    """A line about a table. It is a problem if `run` would refuse the table because of it."""

    text: str
    is_problem: bool = False


def describe(layout: TableLayout, state: TableState) -> Iterator[StateLine]:
    """Yield lines about a table, compared with its file."""
    spec = layout.spec
    columns = ", ".join(layout.names)
    yield StateLine(f"{spec.input} becomes table {spec.table} ({columns})")
    if not state.exists:
        yield StateLine("the table does not exist; `coranto table run` creates it")
    for problem in state.problems:
        yield StateLine(f"table {spec.table}: {problem}", is_problem=True)
    if not state.changes:
        return
    if not spec.evolves:
        yield StateLine(str(not_evolved(layout, state)), is_problem=True)
        return
    for change in state.changes:
        yield StateLine(f"the table {change.problem}; `coranto table run` makes the change: {change.advice}")
