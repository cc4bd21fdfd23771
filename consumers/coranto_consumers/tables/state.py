"""State of a table in its store: its position, its rows, and its differences from its file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlalchemy import MetaData, Table, func, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from coranto.audit import Report, run_checks
from coranto.client import JournalClient
from coranto.messages.uuids import clock_to_ns
from coranto_consumers.audit import ConsumerCheck, EvidenceSource, SqlEvidence, parse_expectation
from coranto_consumers.positions.lag import JournalLag, lag_of
from coranto_consumers.stores.engines import READS_ONLY
from coranto_consumers.stores.reading import read_checkpoint
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.tables.columns import TableLayout
from coranto_consumers.tables.evolving import TableState, not_evolved
from coranto_consumers.tables.spec import TableSpec


@dataclass(frozen=True, slots=True)
class TableProgress:
    """The progress of a table: its position, its rows and its lag."""

    offsets: Mapping[str, int]
    """The offsets in the table's checkpoint, by journal. Empty before the first commit."""
    last_commit: float | None
    """The time when the last transaction in the table was committed in its journal, in Unix seconds. None: unknown."""
    rows: int | None
    """None if there is no table."""
    journals: Sequence[JournalLag] = ()

    @property
    def bytes_behind(self) -> int:
        """The bytes of the journals that are not in the table, as far as they are known."""
        return sum(each.behind or 0 for each in self.journals)

    @property
    def messages_behind(self) -> int:
        """The messages that are not in the table. An estimate if there are many."""
        return sum(each.messages or 0 for each in self.journals)


async def progress_of(client: JournalClient, spec: TableSpec) -> TableProgress:
    """Return the progress of a table. Raises SqlStoreError, and errors of the client."""
    found = await asyncio.to_thread(stored_progress, spec)
    return replace(found, journals=await lag_of(client, found.offsets, spec.input.selector))


def stored_progress(spec: TableSpec) -> TableProgress:
    """Return the progress of a table in its store, without the lag. Raises SqlStoreError."""
    rows = count_rows(spec)
    if spec.is_iceberg and rows is None:
        return TableProgress({}, None, None)
    found = read_checkpoint(spec.store_url, spec.name)
    if found is None:
        return TableProgress({}, None, rows)
    clocks = [state.last_ack for source in found.checkpoint.sources.values() for state in source.producers.values()]
    last = max(clocks, default=0)
    return TableProgress(found.checkpoint.offsets, clock_to_ns(last) / 1e9 if last else None, rows)


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
    """Return the expectations for audits of the table: if each message is a row, as many rows as messages."""
    if spec.mode != "append" or spec.filter:
        return []
    if spec.is_iceberg:  # Only small letters, digits and _: names are checked when a file is read.
        table = ".".join(f'"{part}"' for part in spec.table.split("."))
    else:
        table = SqlStore(spec.store).engine.dialect.identifier_preparer.quote(spec.table)
    return [f"SELECT COUNT(*) FROM {table} == messages"]


async def audit_table(client: JournalClient, spec: TableSpec) -> Report:
    """Audit the consumer of a table, as `coranto consumer audit` does. Raises SqlStoreError, and errors of the client.

    It reads the table's journals from their beginnings.
    """
    evidence: EvidenceSource
    if spec.is_iceberg:
        from coranto_consumers.audit.iceberg import IcebergEvidence
        from coranto_consumers.stores.iceberg.urls import IcebergHome

        evidence = IcebergEvidence(IcebergHome.at(spec.store_url))
    else:
        evidence = SqlEvidence(SqlStore(spec.store))
    expected = [parse_expectation(each) for each in expectation_of(spec)]
    check = ConsumerCheck(spec.name, client, evidence, expectations=expected)
    return await run_checks(f"table {spec.name}", [check])


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
