"""Runs of tables: the layout, the table in its store, and then the runner that the file names."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from types import ModuleType
from typing import Final, NamedTuple

import structlog

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.loop import shared_loop
from coranto.client.retry import JOB_SECONDS, Retry
from coranto.errors import CorantoError
from coranto.extras import explained
from coranto_consumers.tables.columns import TableLayout
from coranto_consumers.tables.evolving import TargetTable, prepare
from coranto_consumers.tables.inputs import find_layout
from coranto_consumers.tables.runs import RunOptions, TableReport
from coranto_consumers.tables.spec import TableSpec
from coranto_consumers.tables.sql_target import SqlTarget
from coranto_consumers.tables.type_watch import TypeChanged, TypeWatch

_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 60.0
"""The time for a table to complete its transactions after an interruption."""

_log = structlog.get_logger(__name__)


class ExaminedTable(NamedTuple):
    """A table with its columns, and its place in the store."""

    layout: TableLayout
    target: TargetTable


def examine(client: SyncJournalClient, spec: TableSpec) -> ExaminedTable:
    """Return a table whose journals, type and expressions are found to be sound. Changes nothing.

    Starts a session of Spark for expressions. Raises InvalidInput, and errors of the client.
    """
    layout = find_layout(client, spec)
    if spec.select or spec.filter:
        spark = _spark_runner()
        layout = spark.with_expressions(layout, spark.session_of(spec))
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


def run_table(
    config: ClientConfig,
    spec: TableSpec,
    *,
    once: bool = False,
    stop: Callable[[], bool] = lambda: False,
    wait: Callable[[], object] = lambda: time.sleep(1.0),
    accept_changes: str = "",
) -> TableReport:
    """Write a table until all present messages are in it (`once`), or until `stop` returns True.

    `stop` and `wait`, which waits a moment, are called in this thread. Processes that write the same table fence one
    another off: the last one continues. Raises

    * InvalidInput for a file that does not fit the journals, the type or the table,
    * Fenced when another process has started, and ConsumerChanged for other sources or another store than before,
    * CorruptMessage and RejectedRow for a message that does not become a row,
    * OffsetJump, StreamTruncated and CorruptData for content that is gone before it was read,
    * errors of the client and the store, if they do not pass: `once` after ten minutes.

    After any of them, the next run continues from the last commit.
    """
    run = _runs_on_spark if spec.runner == "spark" else _runs_as_shard
    options = RunOptions(once, stop, wait, accept_changes)
    before = TableReport(0, 0)
    while True:
        with SyncJournalClient.of(config) as client:
            layout = _prepared(client, spec, options)
            if layout is None:
                return before
            with TypeWatch(client, layout) as watch:
                report, is_done = run(client, layout, watch, options)
        before = TableReport(before.messages + report.messages, before.transactions + report.transactions)
        if is_done:
            return before


class _Run(NamedTuple):
    """The end of a run of one version of a type. It is not done if there is a later version."""

    report: TableReport
    is_done: bool = True


def _runs_as_shard(client: SyncJournalClient, layout: TableLayout, watch: TypeWatch, options: RunOptions) -> _Run:
    from coranto_consumers.tables.shard_runner import ShardRunner

    runner = ShardRunner(client, layout, watch.require_latest, options.once, options.accept_changes)
    running = shared_loop().submit(runner.run())
    try:
        while not concurrent.futures.wait([running], _POLL_SECONDS).done:
            if options.stop():
                runner.stop()
        running.result()
    except TypeChanged:
        return _Run(runner.report, is_done=False)
    except BaseException:
        runner.stop()
        concurrent.futures.wait([running], _STOP_SECONDS)
        running.cancel()
        raise
    return _Run(runner.report)


def _runs_on_spark(client: SyncJournalClient, layout: TableLayout, watch: TypeWatch, options: RunOptions) -> _Run:
    spark = _spark_runner()
    try:
        return _Run(spark.run_spark(client.config, layout, watch.require_latest, options))
    except TypeChanged:
        return _Run(TableReport(0, 0), is_done=False)


def _spark_runner() -> ModuleType:
    """Return the module that needs Spark. Raises MissingExtra without it."""
    try:
        from coranto_consumers.tables import spark_runner
    except ModuleNotFoundError as error:
        raise explained(error) from error
    return spark_runner


def _prepared(
    client: SyncJournalClient,
    spec: TableSpec,
    options: RunOptions,
) -> TableLayout | None:
    """Return the layout of a table that is ready for rows; None if `stop` returned True while something was away."""
    retry = Retry(JOB_SECONDS) if options.once else Retry()
    while True:
        try:
            layout, target = examine(client, spec)
            for change in prepare(layout, target):
                _log.warning("table.changed", table=spec.name, column=change.field.name, change=change.advice)
            return layout
        except CorantoError as error:
            now = time.monotonic()
            if not error.retriable or retry.failed(now) is None:
                raise
            if retry.is_report_due(now):
                _log.warning("table.waiting", table=spec.name, error=str(error))
        if options.stop():
            return None
        options.wait()
