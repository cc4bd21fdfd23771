"""Rows of messages that are written unchanged: the tasks that read them write them, as whole Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame


class ChooseTask:
    """Reads partitions by another task, and yields the batches with the chosen columns (new name to name) only.

    `texts` collects the texts of summaries.
    """

    def __init__(self, read: Any, piece: str, summary_piece: int, text: str, columns: Mapping[str, str]) -> None:
        self._read = read
        self._piece, self._summary_piece, self._text = piece, summary_piece, text
        self._columns = columns
        self.texts: list[str] = []

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.texts.clear()
        for batch in self._read(batches):
            texts, rows = _apart(batch, self._piece, self._summary_piece, self._text)
            self.texts += texts.to_pylist()
            if rows.num_rows:
                yield _renamed(rows, self._columns)


def chosen_columns(rows: DataFrame, source: DataFrame) -> dict[str, str] | None:
    """Return the source's columns that are the columns of `rows`, by the names in `rows`.

    None if the rows are more than chosen columns, or if Spark does not give the plan (Spark Connect).
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


def _apart(batch: Any, piece: str, summary_piece: int, text: str) -> tuple[Any, Any]:
    """Return the texts of a batch's summaries, and the batch without the rows of summaries."""
    summaries = batch.column(piece).to_numpy() == summary_piece
    texts = batch.column(text).filter(pa.array(summaries))
    return texts, batch.filter(pa.array(~summaries)) if len(texts) else batch


def _renamed(batch: Any, columns: Mapping[str, str]) -> Any:
    """Return a batch with the given columns only, under new names."""
    return pa.record_batch([batch.column(name) for name in columns.values()], names=list(columns))
