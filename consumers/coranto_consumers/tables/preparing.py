"""Tables before their runs: the layout by journals, type and expressions, and the table in its store."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import structlog

from coranto.client import SyncJournalClient
from coranto.extras import explained
from coranto_consumers.tables.columns import TableLayout
from coranto_consumers.tables.evolving import TargetTable, prepare
from coranto_consumers.tables.inputs import find_layout
from coranto_consumers.tables.spec import TableSpec
from coranto_consumers.tables.sql_target import SqlTarget

_log = structlog.get_logger(__name__)


class ExaminedTable(NamedTuple):
    """A table with its columns, and its place in the store."""

    layout: TableLayout
    target: TargetTable


def prepared(client: SyncJournalClient, spec: TableSpec) -> TableLayout:
    """Return the layout of a table, which is in its store afterwards and has all columns.

    Raises InvalidInput, and errors of the client and the store.
    """
    layout, target = examine(client, spec)
    for change in prepare(layout, target):
        _log.warning("table.changed", table=spec.name, column=change.field.name, change=change.advice)
    return layout


def examine(client: SyncJournalClient, spec: TableSpec) -> ExaminedTable:
    """Return a table whose journals, type and expressions are found to be sound. Changes nothing.

    Starts a session of Spark for expressions. Raises InvalidInput, and errors of the client.
    """
    layout = find_layout(client, spec)
    if spec.select or spec.filter:
        layout = spark_runner().with_expressions(layout)
    return ExaminedTable(layout, target_of(layout))


def target_of(layout: TableLayout) -> TargetTable:
    """Return the table in the store of its URL. Raises InvalidInput, and MissingExtra for Iceberg without its extra."""
    if not layout.spec.is_iceberg:
        return SqlTarget(layout)
    try:
        from coranto_consumers.tables.iceberg_target import IcebergTarget
    except ModuleNotFoundError as error:
        raise explained(error) from error
    return IcebergTarget(layout)


def spark_runner() -> ModuleType:
    """Return the module that needs Spark. Raises MissingExtra without it."""
    try:
        from coranto_consumers.tables import spark_runner
    except ModuleNotFoundError as error:
        raise explained(error) from error
    return spark_runner
