"""The ways to produce the rows of a plan: all messages of its ranges with their pieces, and the ranges' summaries.

| strategy | rows | used for |
|---|---|---|
| `DriverRows` | this process reads them | little content: a Spark job takes longer |
| `CachedRows` | tasks read them, and Spark keeps them | other content |
| `ExpectedRows` | the job that writes the outputs reads them | messages that are all expected to be committed |
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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


class InputStrategy(ABC):
    """A way to produce the rows of a plan."""

    rows: DataFrame
    _kept: DataFrame | None = None
    """A frame that Spark keeps: in memory, and on local disks if that is full."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan

    @abstractmethod
    def _texts(self) -> Sequence[str]:
        """Return the texts of summaries that were read. A task that ran twice may have added its summaries twice."""

    def summaries(self) -> dict[Range, RangeSummary] | None:
        """Return the ranges' summaries. None if some are missing: then the rows must not be used."""
        found = {summary.number: summary for summary in (RangeSummary.loads(text.encode()) for text in self._texts())}
        if not set(self._plan.numbers.values()) <= found.keys():
            return None
        return {part: found[number] for part, number in self._plan.numbers.items()}

    def close(self) -> None:
        if self._kept is not None:
            self._kept.unpersist()


class DriverRows(InputStrategy):
    """Rows that this process reads."""

    def __init__(self, spark: SparkSession, planned: PlannedRows, plan: ReadPlan) -> None:
        super().__init__(plan)
        self._table = planned.read_here()
        self.rows = spark.createDataFrame(self._table, planned.schema).coalesce(1)

    def _texts(self) -> Sequence[str]:
        is_summary = pc.equal(self._table.column(PIECE_COLUMN), SUMMARY_PIECE)
        texts: list[str] = self._table.filter(is_summary).column(SUMMARY_COLUMN).to_pylist()
        return texts


class CachedRows(InputStrategy):
    """Rows that tasks read, and that Spark keeps."""

    def __init__(self, spark: SparkSession, planned: PlannedRows, plan: ReadPlan) -> None:
        super().__init__(plan)
        self.rows = self._kept = planned.by_tasks(spark).persist()

    def _texts(self) -> Sequence[str]:
        found = self.rows.where(F.col(PIECE_COLUMN) == SUMMARY_PIECE).select(SUMMARY_COLUMN).collect()
        return [row[0] for row in found]


class ChooseTask:
    """Reads partitions, and yields messages with the chosen columns (new name to name). `texts` has the summaries."""

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
    """Return the names in `source` of the columns of `rows`; None for more than that, or in Spark Connect."""
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


class ExpectedRows(InputStrategy):
    """Rows of messages that are expected to be committed. The first action over them collects the summaries."""

    def __init__(self, spark: SparkSession, planned: PlannedRows, plan: ReadPlan, schema: StructType) -> None:
        super().__init__(plan)
        self._spark = spark
        self._planned = planned
        self._observed = Observation()
        self._added: list[str] | None = None
        texts = F.collect_list(F.when(F.col(PIECE_COLUMN) == SUMMARY_PIECE, F.col(SUMMARY_COLUMN)))
        self.rows = planned.by_tasks(spark).observe(self._observed, texts.alias(SUMMARY_COLUMN))
        messages = self.rows.where(F.col(PIECE_COLUMN) != SUMMARY_PIECE).drop(PIECE_COLUMN)
        self.committed = parsed_values(messages, schema)

    def batches_of(self, rows: DataFrame) -> tuple[DataFrame, ChooseTask] | None:
        """Return partitions, and the task that reads an output's rows there; None for more than chosen columns."""
        columns = chosen_columns(rows, self.committed)
        if columns is None:
            return None
        return self._planned.partitions(self._spark), ChooseTask(self._planned.task, columns)

    def add_summaries(self, texts: Sequence[str]) -> None:
        self._added = list(texts)

    def _texts(self) -> Sequence[str]:
        """Return the texts, after an action. Empty if it did not need the messages, or stopped before their end."""
        if self._added is not None:
            return self._added
        due = time.monotonic() + _OBSERVED_SECONDS
        observed: Any = self._observed._jo  # Spark's `get` would block forever if nothing was observed.
        while not observed.future().isCompleted():
            if time.monotonic() > due:
                return []
            time.sleep(_OBSERVED_SECONDS / 1000)
        texts: list[str] = self._observed.get[SUMMARY_COLUMN]
        return texts


def is_little(plan: ReadPlan) -> bool:
    """Return True for so little content that this process reads it."""
    return len(plan.slices) == 1 and sum(part.length for part in plan.numbers) <= WORTHWHILE_BYTES


def strategy_for(spark: SparkSession, planned: PlannedRows, plan: ReadPlan) -> InputStrategy:
    """Return the rows of a plan, to be read before they are used."""
    return DriverRows(spark, planned, plan) if is_little(plan) else CachedRows(spark, planned, plan)
