"""Packed rows: rows that Spark caches as whole Arrow batches, for outputs that write them unchanged.

Normally Spark converts the batches of a Python task to its own rows, caches those, and converts them to Arrow batches
again for the next Python task. That is wasted work where an output only has columns of the committed messages. So the
batches of a task are cached as bytes, and the writing task gets them unchanged. Where rows are needed, they are made
from the batches (`PackedRows.rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from coranto.messages.columnar import Mask
from coranto_consumers.spark.committed.sequencing import PieceLimit

PACKED: Final = "summary STRING, batch BINARY"
_BATCH_ROWS: Final = 1 << 14
"""The most rows of a cached batch. A batch is one value of a Spark row, of some MB at most."""


@dataclass(frozen=True, slots=True)
class PackTask:
    """Reads partitions by another task, and yields its batches as bytes, and the texts of summaries."""

    read: Any
    piece: str
    """The column of pieces."""
    summary_piece: int
    text: str
    """The column with the text of a summary."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in self.read(batches):
            texts, rows = _apart(batch, self.piece, self.summary_piece, self.text)
            if len(texts):
                yield pa.record_batch({"summary": texts, "batch": pa.nulls(len(texts), pa.binary())})
            for begin in range(0, rows.num_rows, _BATCH_ROWS):
                yield _packed(rows.slice(begin, _BATCH_ROWS))


@dataclass(frozen=True, slots=True)
class UnpackTask:
    """Unpacks the batches of `PackTask`.

    `columns`, if given, maps new names to the columns to keep. `limits` selects the rows within their pieces' limits.
    """

    piece: str | None = None
    clock: str | None = None
    columns: Mapping[str, str] | None = None
    limits: tuple[PieceLimit, ...] = ()

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        limits = sorted(self.limits, key=lambda each: each.piece)
        pieces = np.array([each.piece for each in limits], dtype=np.int64)
        bounds = np.array([(each.lo, each.hi) for each in limits], dtype=np.int64).reshape(-1, 2)
        for packed in batches:
            for content in packed.column("batch"):
                for batch in pa.ipc.open_stream(pa.BufferReader(content.as_buffer())):
                    yield self._chosen(batch, pieces, bounds)

    def _chosen(self, batch: Any, pieces: Any, bounds: Any) -> Any:
        if len(pieces):
            within = _within(batch.column(self.piece).to_numpy(), batch.column(self.clock).to_numpy(), pieces, bounds)
            batch = batch if within.all() else batch.filter(pa.array(within))
        return batch if self.columns is None else _renamed(batch, self.columns)


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


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows that are cached as Arrow batches: `kept` has the columns `PACKED`, and `schema` is the rows' schema."""

    kept: DataFrame
    schema: StructType

    def rows(self) -> DataFrame:
        """Return the rows."""
        return self._batches().mapInArrow(UnpackTask(), self.schema)

    def summaries(self) -> list[str]:
        """Return the texts of summaries. Fills the cache if necessary."""
        return [row.summary for row in self.kept.where(F.col("summary").isNotNull()).select("summary").collect()]

    def _batches(self) -> DataFrame:
        return self.kept.where(F.col("batch").isNotNull()).select("batch")


@dataclass(frozen=True, slots=True)
class PackedInput:
    """The committed messages of a transaction as packed rows, and as the application's frame."""

    packed: PackedRows
    committed: DataFrame
    limits: tuple[PieceLimit, ...]
    piece: str
    clock: str

    def batches_of(self, rows: DataFrame) -> tuple[DataFrame, UnpackTask] | None:
        """Return the packed batches with an output's rows, and the task that unpacks them.

        None if the rows are more than chosen columns of the committed messages.
        """
        columns = chosen_columns(rows, self.committed)
        if columns is None:
            return None
        return self.packed._batches(), UnpackTask(self.piece, self.clock, columns, self.limits)


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


def _packed(batch: Any) -> Any:
    """Return a row with the bytes of a record batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    content = sink.getvalue()
    borders = pa.py_buffer(np.array([0, content.size], dtype=np.int32))
    value = pa.Array.from_buffers(pa.binary(), 1, [None, borders, content])
    return pa.record_batch({"summary": pa.nulls(1, pa.string()), "batch": value})


def _within(row_pieces: Any, clocks: Any, pieces: Any, bounds: Any) -> Mask:
    """Return the mask of rows whose clocks are within the bounds of their pieces, or whose pieces have none.

    `pieces` are sorted, and `bounds` are (low, high] of each.
    """
    at = np.minimum(np.searchsorted(pieces, row_pieces), len(pieces) - 1)
    low, high = bounds[at].T
    within: Mask = (pieces[at] != row_pieces) | ((clocks > low) & (clocks <= high))
    return within
