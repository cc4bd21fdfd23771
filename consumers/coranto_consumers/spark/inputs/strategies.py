"""The rows of a plan and the summaries of its ranges, read in one of three ways.

| rows | used for |
|---|---|
| this process reads them (`read_rows`) | little content: a Spark job takes longer |
| tasks read them, and Spark keeps them (`read_rows`) | other content |
| the job that writes the outputs reads them (`ExpectedRows`) | messages that are all expected to be committed |
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from coranto_consumers.journals.ranges import WORTHWHILE_BYTES, Range, ReadPlan
from coranto_consumers.spark.committed.scanning import SUMMARY_PIECE, RangeSummary
from coranto_consumers.spark.inputs.frames import PIECE_COLUMN, SUMMARY_COLUMN, PlannedRows, ReadTask, parsed_values

_OBSERVED_SECONDS: Final = 2.0
"""The time in seconds to wait for an action's observed values from Spark."""


def is_little(plan: ReadPlan) -> bool:
    """Return True if a plan has so little content that this process should read it, without a Spark job."""
    return len(plan.slices) == 1 and sum(part.length for part in plan.numbers) <= WORTHWHILE_BYTES


def read_rows(
    spark: SparkSession, planned: PlannedRows, kept: ExitStack
) -> tuple[DataFrame, dict[Range, RangeSummary]]:
    """Return the rows of a plan, which Spark keeps until `kept` closes, and the ranges' summaries."""
    if is_little(planned.plan):
        table = planned.read_here()
        is_summary = pc.equal(table.column(PIECE_COLUMN), SUMMARY_PIECE)
        texts = table.filter(is_summary).column(SUMMARY_COLUMN).to_pylist()
        rows = spark.createDataFrame(table, planned.schema).coalesce(1)
    else:
        rows = planned.by_tasks(spark).persist()  # In memory, and on local disks if that is full.
        kept.callback(rows.unpersist)
        found = rows.where(F.col(PIECE_COLUMN) == SUMMARY_PIECE).select(SUMMARY_COLUMN).collect()
        texts = [row[0] for row in found]
    summaries = _summaries(planned.plan, texts)
    assert summaries is not None  # Each task has reported its ranges.
    return rows, summaries


def _summaries(plan: ReadPlan, texts: Iterable[str]) -> dict[Range, RangeSummary] | None:
    """Return the ranges' summaries. None if some are missing. `texts` may have duplicates from tasks that ran twice."""
    found = {summary.number: summary for summary in (RangeSummary.loads(text.encode()) for text in texts)}
    if not set(plan.numbers.values()) <= found.keys():
        return None
    return {part: found[number] for part, number in plan.numbers.items()}


class ChooseTask:
    """Reads partitions, and yields messages with `columns` (new name to name). `texts` collects the summaries."""

    def __init__(self, read: ReadTask, columns: Mapping[str, str]) -> None:
        self._read = read
        self._columns = columns
        self.texts: list[str] = []

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.texts.clear()
        for batch in self._read(batches):
            is_summary = pc.equal(batch.column(PIECE_COLUMN), SUMMARY_PIECE)
            texts = batch.column(SUMMARY_COLUMN).filter(is_summary).to_pylist()
            self.texts += texts
            rows = batch.filter(pc.invert(is_summary)) if texts else batch
            if rows.num_rows:
                yield pa.record_batch([rows.column(name) for name in self._columns.values()], names=list(self._columns))


def chosen_columns(rows: DataFrame, source: DataFrame) -> dict[str, str] | None:
    """Map the columns of `rows` to columns of `source`. None if `rows` does more than select columns.

    Also returns None in Spark Connect.
    """
    try:
        base: Any = source._jdf.queryExecution().analyzed()
        top: Any = rows._jdf.queryExecution().analyzed()
    except (AttributeError, PySparkException):
        return None
    plan, projects = top, []
    while not plan.fastEquals(base):
        if plan.getClass().getSimpleName() != "Project":
            return None
        projects.append(plan)
        plan = plan.child()
    names = {each.exprId().toString(): each.name() for each in _each(base.output())}
    for project in reversed(projects):
        known, names = names, {}
        for column in _each(project.projectList()):
            origin = column.child() if column.getClass().getSimpleName() == "Alias" else column
            if origin.getClass().getSimpleName() != "AttributeReference":
                return None
            names[column.exprId().toString()] = known[origin.exprId().toString()]
    output = [(each.name(), names[each.exprId().toString()]) for each in _each(top.output())]
    return dict(output) if len(dict(output)) == len(output) else None


def _each(found: Any) -> Iterator[Any]:
    """Yield the elements of a Scala sequence."""
    return (found.apply(number) for number in range(found.size()))


class ExpectedRows:
    """Rows of messages that are expected to be committed. The first action over them collects the summaries."""

    def __init__(self, spark: SparkSession, planned: PlannedRows, schema: StructType) -> None:
        self._spark = spark
        self._planned = planned
        self._observed = Observation()
        self._added: list[str] | None = None
        texts = F.collect_list(F.when(F.col(PIECE_COLUMN) == SUMMARY_PIECE, F.col(SUMMARY_COLUMN)))
        rows = planned.by_tasks(spark).observe(self._observed, texts.alias(SUMMARY_COLUMN))
        messages = rows.where(F.col(PIECE_COLUMN) != SUMMARY_PIECE).drop(PIECE_COLUMN)
        self.committed = parsed_values(messages, schema)

    def batches_of(self, rows: DataFrame) -> tuple[DataFrame, ChooseTask] | None:
        """Return partitions, and the task that reads an output's rows from them. None as for `chosen_columns`."""
        columns = chosen_columns(rows, self.committed)
        if columns is None:
            return None
        return self._planned.partitions(self._spark), ChooseTask(self._planned.task, columns)

    def add_summaries(self, texts: Sequence[str]) -> None:
        self._added = list(texts)

    def summaries(self) -> dict[Range, RangeSummary] | None:
        """Return the ranges' summaries after an action. None if some are missing, or Spark has not reported them."""
        return _summaries(self._planned.plan, self._observed_texts() if self._added is None else self._added)

    def _observed_texts(self) -> list[str]:
        due = time.monotonic() + _OBSERVED_SECONDS
        observed: Any = self._observed._jo  # Spark's `get` would block forever if nothing was observed.
        while not observed.future().isCompleted():
            if time.monotonic() > due:
                return []
            time.sleep(_OBSERVED_SECONDS / 1000)
        texts: list[str] = self._observed.get[SUMMARY_COLUMN]
        return texts
