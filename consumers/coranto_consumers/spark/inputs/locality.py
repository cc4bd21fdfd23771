"""Placement of tasks: tasks that read one fragment run on one executor, which caches its content.

Adjacent fragments also go to one executor, because a task reads the byte before its range, which shows if a line begins
there. Executors get about equal shares, and keep their fragments. A large part of one fragment is split among several
executors, because fetching takes less time than parsing. Placement is a preference: if an executor is busy for long or
gone, Spark runs the task elsewhere.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from coranto_consumers.journals.ranges import Cuts, Range, Slice, plan_slices, split

_MAX_FRAGMENTS: Final = 10_000

_log = structlog.get_logger(__name__)


class FragmentLocality:
    """The executors that recently read fragments, and probably still cache their content."""

    def __init__(self) -> None:
        self._executors: dict[tuple[str, int], tuple[str, ...]] = {}

    def assign(
        self, ranges: Sequence[Range], cuts: Cuts, executors: Sequence[str], max_bytes: int
    ) -> dict[str, list[Range]]:
        """Return each executor's ranges. Splits a fragment that exceeds both `max_bytes` and an even share."""
        pieces = [piece for each in sorted(ranges) for piece in _by_fragment(each, cuts.get(each.journal, ()))]
        share = sum(piece.length for _, piece in pieces) / len(executors)
        parts = [(name, part) for name, piece in pieces for part in split(piece, max(max_bytes, math.ceil(share)))]
        loads = dict.fromkeys(executors, 0)
        assigned: dict[str, list[Range]] = {executor: [] for executor in executors}
        before = ""
        for fragment, part in parts:
            has_it = [executor for executor in self._executors.pop(fragment, ()) if executor in loads]
            not_full = [each for each in (*has_it, before) if each in loads and loads[each] + part.length / 2 <= share]
            if has_it and part.length <= max_bytes:
                executor = min(has_it, key=lambda each: loads[each])
            else:
                executor = not_full[0] if not_full else min(executors, key=lambda each: loads[each])
            self._executors[fragment] = (*has_it, *([] if executor in has_it else [executor]))
            loads[executor] += part.length
            before, mine = executor, assigned[executor]
            if mine and (mine[-1].journal, mine[-1].end) == (part.journal, part.begin):
                mine[-1] = replace(mine[-1], end=part.end)
            else:
                mine.append(part)
        while len(self._executors) > max(_MAX_FRAGMENTS, len(pieces)):
            del self._executors[next(iter(self._executors))]
        return assigned

    def plan_slices(
        self, ranges: Sequence[Range], *, max_bytes: int, max_slices: int, cuts: Cuts, executors: Sequence[str]
    ) -> tuple[list[Slice], tuple[str, ...]]:
        """Return slices as `ranges.plan_slices` does, and each slice's executor."""
        slices: list[Slice] = []
        locations: list[str] = []
        assigned = self.assign(ranges, cuts, executors, max_bytes)
        for executor, mine in assigned.items():
            planned = plan_slices(mine, max_bytes=max_bytes, max_slices=max(1, max_slices // len(executors)), cuts=cuts)
            slices += planned
            locations += [executor] * len(planned)
        return slices, tuple(locations)


def _by_fragment(whole: Range, cuts: Sequence[int]) -> Iterator[tuple[tuple[str, int], Range]]:
    """Yield the parts of a range in each fragment, with the fragment's journal and begin."""
    begin, aligned = whole.begin, whole.aligned
    while begin < whole.end:
        index = bisect.bisect_right(cuts, begin)
        end = min(whole.end, cuts[index]) if index < len(cuts) else whole.end
        fragment = cuts[index - 1] if index else 0
        yield (whole.journal, fragment), Range(whole.journal, begin, end, whole.limit, aligned, whole.journal_id)
        begin, aligned = end, False


def executors_of(spark: SparkSession) -> tuple[str, ...]:
    """Return the executors' locations, as Spark names them. Empty for a single executor, or in Spark Connect."""
    executors = []
    try:
        found = spark.sparkContext._jsc.sc().statusStore().executorList(True).iterator()
        while found.hasNext():
            each = found.next()
            if each.id() != "driver":
                executors.append(f"executor_{each.hostPort().rpartition(':')[0]}_{each.id()}")
    except (PySparkException, Py4JError):
        return ()
    return tuple(sorted(executors)) if len(executors) > 1 else ()


def numbered_partitions(spark: SparkSession, count: int, locations: Sequence[str]) -> DataFrame:
    """Return the numbers below `count` (column `id`), each in its own partition. `locations` are preferred."""
    if locations:
        try:
            return _at_locations(spark, locations)
        except Py4JError as error:
            _log.warning("spark.tasks_not_placed", error=str(error).partition("\n")[0])
    return spark.range(0, count, 1, count)


def _at_locations(spark: SparkSession, locations: Sequence[str]) -> DataFrame:
    context = spark.sparkContext
    jvm, gateway = context._jvm, context._gateway
    assert jvm is not None  # The session belongs to this process.
    assert gateway is not None
    located = []
    for number, location in enumerate(locations):
        values = gateway.new_array(jvm.java.lang.Object, 1)
        values[0] = number
        located.append(jvm.scala.Tuple2(jvm.org.apache.spark.sql.RowFactory.create(values), _seq(jvm, [location])))
    tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("org.apache.spark.sql.Row"))
    rows = context._jsc.sc().makeRDD(_seq(jvm, located), tag).toJavaRDD()
    schema = jvm.org.apache.spark.sql.types.StructType.fromDDL("id INT NOT NULL")
    return DataFrame(spark._jsparkSession.createDataFrame(rows, schema), spark)


def _seq(jvm: object, items: Sequence[object]) -> object:
    return jvm.PythonUtils.toSeq(items)  # type: ignore[attr-defined]
