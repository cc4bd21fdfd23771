"""Rows that Spark keeps as whole Arrow batches, for outputs that take them as they were read.

Spark makes rows of its own of what a task of Python yields, keeps those, and makes Arrow batches of them again for the
next task of Python. Where an output has columns of the committed messages and no more, that work is for nothing: so the
batches of a task are kept as bytes, and the task that writes them gets them as they are. Where anybody asks for rows,
they are made of the batches (`PackedRows.rows`).
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
"""The rows of a batch that is kept at most. A batch is one value of a row of Spark's: of some MB, not of hundreds."""


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
    """Yields the batches that `PackTask` has packed.

    With `columns`, names of theirs by new names, only these. With `limits`, only the rows within those of their pieces.
    """

    piece: str = ""
    clock: str = ""
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
    """Reads partitions by another task, and yields its batches with columns, names of theirs by new names, only.

    `texts` has the texts of summaries that it has met.
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
    """Rows that are kept as Arrow batches: `kept` has the columns `PACKED`, and `schema` is that of the rows."""

    kept: DataFrame
    schema: StructType

    def rows(self) -> DataFrame:
        """Return the rows."""
        return self._batches().mapInArrow(UnpackTask(), self.schema)

    def summaries(self) -> list[str]:
        """Return the texts of summaries. Reads what is to be kept, if it is not kept yet."""
        return [row.summary for row in self.kept.where(F.col("summary").isNotNull()).select("summary").collect()]

    def _batches(self) -> DataFrame:
        return self.kept.where(F.col("batch").isNotNull()).select("batch")


@dataclass(frozen=True, slots=True)
class PackedInput:
    """The committed messages of a transaction as packed rows, and as the frame that an application gets of them."""

    packed: PackedRows
    committed: DataFrame
    limits: tuple[PieceLimit, ...]
    piece: str
    clock: str

    def batches_of(self, rows: DataFrame) -> tuple[DataFrame, UnpackTask] | None:
        """Return the packed batches that have an output's rows, and the task that unpacks them.

        None if an application has made the rows by more than choosing columns of the committed messages.
        """
        columns = chosen_columns(rows, self.committed)
        if columns is None:
            return None
        return self.packed._batches(), UnpackTask(self.piece, self.clock, columns, self.limits)


def chosen_columns(rows: DataFrame, source: DataFrame) -> dict[str, str] | None:
    """Return the columns of a source that are the columns of rows, by the names that they have there.

    None if the rows are more than chosen columns of the source, or where Spark does not tell (Spark Connect).
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
    """Yield the elements of a sequence of Scala."""
    return (found.apply(number) for number in range(found.size()))


def _apart(batch: Any, piece: str, summary_piece: int, text: str) -> tuple[Any, Any]:
    """Return the texts of a batch's summaries, and the batch without the rows of summaries."""
    summaries = batch.column(piece).to_numpy() == summary_piece
    texts = batch.column(text).filter(pa.array(summaries))
    return texts, batch.filter(pa.array(~summaries)) if len(texts) else batch


def _renamed(batch: Any, columns: Mapping[str, str]) -> Any:
    """Return a batch with some of its columns, whose names are given by their new names."""
    return pa.record_batch([batch.column(name) for name in columns.values()], names=list(columns))


def _packed(batch: Any) -> Any:
    """Return a record batch as a row that has its bytes."""
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
