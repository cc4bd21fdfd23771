"""Run of a table: its layout, its table in the store, and its runner."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from types import ModuleType
from typing import Final, NamedTuple

import structlog

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.loop import shared_loop
from coranto.extras import with_install_advice
from coranto_consumers.tables.columns import TableLayout
from coranto_consumers.tables.evolving import TargetTable, prepare
from coranto_consumers.tables.inputs import find_layout
from coranto_consumers.tables.runs import RunOptions, TableReport
from coranto_consumers.tables.spec import TableSpec
from coranto_consumers.tables.sql_target import SqlTarget
from coranto_consumers.tables.type_watch import TypeWatch

_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 60.0
"""Seconds that a table may complete its transactions after an interruption."""
_DEFAULTS: Final = RunOptions()

_log = structlog.get_logger(__name__)


class ExaminedTable(NamedTuple):
    """The layout of a table, and the table in its store."""

    layout: TableLayout
    target: TargetTable


def examine(client: SyncJournalClient, spec: TableSpec) -> ExaminedTable:
    """Check the journals, type and expressions of a table, and return it. Changes nothing.

    Starts a Spark session for expressions. Raises InvalidInput, and errors of the client.
    """
    layout = find_layout(client, spec)
    if spec.select or spec.filter:
        layout = _spark_runner().with_expressions(layout)
    return ExaminedTable(layout, target_of(layout))


def target_of(layout: TableLayout) -> TargetTable:
    """Return the table in the store of its URL. Raises InvalidInput, and MissingExtra for Iceberg without its extra."""
    if not layout.spec.is_iceberg:
        return SqlTarget(layout)
    try:
        from coranto_consumers.tables.iceberg_target import IcebergTarget
    except ModuleNotFoundError as error:
        raise with_install_advice(error) from error
    return IcebergTarget(layout)


def run_table(config: ClientConfig, spec: TableSpec, options: RunOptions = _DEFAULTS) -> TableReport:
    """Write a table until it is stopped, or with `RunOptions.once` until all present messages are in it.

    Processes that write the same table fence one another off: the last one continues. Raises

    * InvalidInput for a file that does not fit the journals, the type or the table,
    * Fenced when another process has started, and ConsumerChanged for other sources or another store than before,
    * CorruptMessage and RejectedRow for a message that cannot become a row,
    * OffsetJump, StreamTruncated and CorruptData for content that is gone before it was read,
    * errors of the client and the store that are not temporary, or with `once`, last for ten minutes.

    After any of them, the next run continues from the last commit.
    """
    with SyncJournalClient.of(config) as client, TypeWatch(client, spec) as watch:
        run = _spark_runner().run_spark if spec.runner == "spark" else _run_as_shard
        report: TableReport = run(client, spec, lambda: _prepared(client, spec), watch, options)
        return report


def _run_as_shard(
    client: SyncJournalClient,
    spec: TableSpec,
    prepared: Callable[[], TableLayout],
    watch: TypeWatch,
    options: RunOptions,
) -> TableReport:
    from coranto_consumers.tables.shard_runner import ShardRunner

    runner = ShardRunner(client, spec, prepared, watch, options)
    running = shared_loop().submit(runner.run())
    try:
        while not concurrent.futures.wait([running], _POLL_SECONDS).done:
            options.on_progress(runner.report)
            if options.stop():
                runner.stop()
        running.result()
    except BaseException:
        runner.stop()
        concurrent.futures.wait([running], _STOP_SECONDS)
        running.cancel()
        raise
    return runner.report


def _prepared(client: SyncJournalClient, spec: TableSpec) -> TableLayout:
    """Create or change the table in its store if necessary, and return its layout.

    Raises InvalidInput, and errors of the client and the store.
    """
    layout, target = examine(client, spec)
    for change in prepare(layout, target):
        _log.warning("table.changed", table=spec.name, column=change.field.name, change=change.advice)
    return layout


def _spark_runner() -> ModuleType:
    """Return the module that needs Spark. Raises MissingExtra without it."""
    try:
        from coranto_consumers.tables import spark_runner
    except ModuleNotFoundError as error:
        raise with_install_advice(error) from error
    return spark_runner
