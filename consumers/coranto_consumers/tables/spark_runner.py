"""Runner that writes a table with a Spark consumer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.retry import JOB_SECONDS, RetryPolicy
from coranto.errors import InvalidInput
from coranto.types.kinds import PlainKind, TypeField, format_fields
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.spark import (
    MergeRule,
    Outputs,
    Replace,
    SparkConsumer,
    TableOutput,
)
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.consumer.outages import Outages
from coranto_consumers.spark.consumer.progress import NOTHING, ConsumeReport, Hooks
from coranto_consumers.spark.decoding.type_columns import fields_of_spark, spark_schema
from coranto_consumers.spark.session.sessions import start_session
from coranto_consumers.spark.session.task_errors import text_of_task
from coranto_consumers.tables.columns import TableLayout, sql_table, with_rows
from coranto_consumers.tables.inputs import several_journals
from coranto_consumers.tables.runs import RunOptions, TableReport
from coranto_consumers.tables.spec import DELETED, TableSpec
from coranto_consumers.tables.type_watch import TypeChanged, TypeWatch

_COMMIT = "_commit_offset"
_COMMIT_FIELD = TypeField(_COMMIT, PlainKind.BIGINT)
_PLACES = ("_journal", _COMMIT, "_offset")


class _Stopped(Exception):
    """Ends a run that has been asked to stop before it has caught up."""


def with_expressions(layout: TableLayout) -> TableLayout:
    """Return a layout with the columns of its expressions. Raises InvalidInput if Spark rejects an expression."""
    rows = _rows(layout.spec, _session(layout.spec).createDataFrame([], spark_schema(layout.messages)))
    if not layout.spec.select:
        return layout
    columns = rows.select(*(_column(name) for name, _ in layout.spec.select))
    return with_rows(layout, [replace(each, nullable=True) for each in fields_of_spark(columns.schema)])


def run_spark(
    client: SyncJournalClient,
    spec: TableSpec,
    prepared: Callable[[], TableLayout],
    watch: TypeWatch,
    options: RunOptions,
) -> TableReport:
    """Write a table as `run_table` does. Raises as `SparkConsumer`.

    `prepared` prepares the table and returns its layout. `watch` is checked before each commit.
    """
    policy = RetryPolicy(JOB_SECONDS) if options.once else RetryPolicy()
    outages = Outages(spec.name, policy, Hooks(), lambda report: None)
    earlier = report = TableReport()

    def show(progress: ConsumeReport) -> None:
        nonlocal report
        report = TableReport(progress.messages, progress.transactions).after(earlier)
        options.on_progress(report)
        if options.once and options.stop():
            raise _Stopped

    while (layout := outages.run(prepared, lambda: NOTHING, options.stop)) is not None:
        outages.progressed()
        consumer = _consumer(client.config, layout, watch, options, show)
        try:
            if options.once:
                consumer.run_until_caught_up()
            else:
                consumer.run_until_stopped(options.stop, wait=options.wait)
            break
        except _Stopped:
            break
        except TypeChanged:
            earlier = report
    return report


def _session(spec: TableSpec) -> SparkSession:
    """Return the Spark session of this process, or a new one."""
    return start_session(f"table {spec.name}")


def _consumer(
    config: ClientConfig,
    layout: TableLayout,
    watch: TypeWatch,
    options: RunOptions,
    show: Callable[[ConsumeReport], None],
) -> SparkConsumer:
    spec = layout.spec
    return SparkConsumer(
        SparkTable(layout, lambda: watch.require_latest(layout)),
        config,
        spec.store_url,
        lambda: _session(spec),
        ConsumerOptions(
            min_transaction_seconds=spec.interval,
            misfits=MisfitPolicy.NULLS if spec.keeps_misfits else MisfitPolicy.FAIL,
            accept_changes=options.accept_changes or None,
            registry=spec.registry or None,
        ),
        on_progress=show,
    )


class SparkTable:
    """A table as an application of a Spark consumer."""

    def __init__(self, layout: TableLayout, require_latest: Callable[[], None] = lambda: None) -> None:
        """`require_latest` is called before a transaction commits, once its messages are known."""
        spec = layout.spec
        self._layout = layout
        self._spec = spec
        self._require_latest = require_latest
        self._table = spec.table if spec.is_iceberg else sql_table(layout)
        self._merge: dict[str, MergeRule] = {name: Replace() for name in layout.names if name not in spec.key}
        self.name = spec.name
        self.sources = spec.input.selector
        self.message_type = spec.type
        self.value_schema = format_fields((*layout.messages, *([_COMMIT_FIELD] if spec.key else [])))

    def outputs(self, committed: DataFrame) -> Outputs:
        self._require_latest()
        spec, names = self._spec, self._layout.names
        rows = _rows(spec, committed)
        if not spec.key:
            return Outputs(tables=[TableOutput(self._table, rows.select(*map(_column, names)))])
        last = self._last(rows)
        delete = DELETED if spec.operation is not None else ""
        return Outputs(tables=[TableOutput(self._table, last, spec.key, self._merge, delete)])

    def _last(self, rows: DataFrame) -> DataFrame:
        """Return the last row of each key. The query fails with InvalidInput for a key in several journals."""
        spec = self._spec
        values = [name for name in self._layout.names if name not in spec.key]
        values += [DELETED] if spec.operation is not None else []
        places = F.struct(*_PLACES[1:])
        chosen = F.max_by(F.struct(*map(_column, values)), places) if values else F.max(F.lit(True))
        found = rows.groupBy(*map(_column, spec.key)).agg(
            chosen.alias("coranto_last"),
            F.min("_journal").alias("coranto_first_journal"),
            F.max("_journal").alias("coranto_last_journal"),
        )
        several = F.col("coranto_first_journal") != F.col("coranto_last_journal")
        problem = text_of_task(several_journals(spec, "several journals"))
        checked = found.where(F.when(several, F.raise_error(F.lit(problem)).cast("boolean")).otherwise(F.lit(True)))
        columns = [F.col(f"coranto_last.{_quoted(name)}").alias(name) for name in values]
        return checked.select(*map(_column, spec.key), *columns)


def _rows(spec: TableSpec, messages: DataFrame) -> DataFrame:
    """Return the rows of messages, with their journals and offsets, and the column that marks deletions."""
    try:
        if spec.filter:
            messages = messages.where(F.expr(spec.filter))
        places = [F.col(name) for name in _PLACES if name in messages.columns]
        marks = [_deleted(spec).alias(DELETED)] if spec.operation is not None else []
        if spec.select:
            columns = [F.expr(expression).alias(name) for name, expression in spec.select]
        else:
            columns = [_column(name) for name in messages.columns if name not in _PLACES]
        return messages.select(*columns, *marks, *places)
    except PySparkException as error:
        field = "select" if spec.select else "filter"
        raise InvalidInput(f"Spark refuses an expression: {' '.join(str(error).split())}", field=field) from error


def _deleted(spec: TableSpec) -> Column:
    operation = spec.operation
    assert operation is not None
    column = _column(operation.column)
    found = column.isin(*operation.deletes) if operation.deletes else column
    return F.coalesce(found, F.lit(False))


def _column(name: str) -> Column:
    return F.col(_quoted(name))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
