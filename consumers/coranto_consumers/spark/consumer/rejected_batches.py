"""Finds rows of a batch that the store rejects, and treats them as the `misfits` of `exactly_once` decide.

The rows of a batch that was read from journals have the places of their messages, and rows with the same place are
treated together (`rejections.py`). Other rows are numbered from 0, in the order of `batch.collect()`. Such a batch is
evaluated again and kept by the executors, because each evaluation may have another order, and other numbers. If an
executor loses its part, the batch fails.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, LongType, StringType

from coranto.errors import RejectedRow
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy
from coranto_consumers.spark.application.outputs import Outputs, column_named
from coranto_consumers.spark.consumer.rejections import PlaceColumns, Rejections, left_out, treated
from coranto_consumers.spark.inputs.frames import METADATA

_FEWER: Final = "have the source plan smaller batches"
_PARSED: Final = PlaceColumns(fewer=_FEWER)
_UNPARSED: Final = PlaceColumns("journal", "offset", fewer=_FEWER)
_UNPARSED_ONLY: Final = "next_offset"
"""A column that only unparsed journals have: `journal` and `offset` alone may be columns of anything."""
_NUMBERED: Final = PlaceColumns("_coranto_batch", "_coranto_row", are_rows=True, fewer=_FEWER)
_PART, _SHIFT = "_coranto_part", "_coranto_shift"
_ROW_BITS: Final = 33
"""The bits of `monotonically_increasing_id` below the partition number."""


class SettledBatch(NamedTuple):
    """A batch that the store accepts."""

    rows: DataFrame
    dead: DataFrame | None
    """The dead letters of rows that are left out, if any."""
    misfits: int


def settled(
    batch: DataFrame,
    name: str,
    query: str,
    outputs: Callable[[DataFrame], Outputs],
    misfits: MisfitPolicy | DeadLetters,
    reject: Callable[[Outputs], RejectedRow | None],
    problem: RejectedRow,
) -> SettledBatch:
    """Return a batch without the rows that the store rejects, or with nulls in them.

    `name` names the batch in errors and dead letters, `query` the query in the log. `reject` is as in `Rejections`, and
    `problem` rejects all rows together. Raises RejectedRow, with the place, for a row that `misfits` forbids.
    """
    columns = batch.columns
    if len({each.lower() for each in columns}) < len(columns):
        raise problem  # Column names are ambiguous.
    places = _places_of(batch)
    if places is _NUMBERED:
        batch = _numbered(batch).withColumn(places.journal, F.lit(name))
    kept = {places.journal, places.offset, *METADATA, *(each.name for each in batch.schema if not each.nullable)}

    def made(rows: DataFrame) -> Outputs:
        return outputs(rows.select(*map(column_named, columns)))

    found = Rejections(query, made, misfits, reject, places).treatments(batch, kept, problem)
    is_left_out = None in found.values()
    return SettledBatch(
        treated(batch, found, places).select(*map(column_named, columns)),
        left_out(batch, found, places, columns) if is_left_out else None,
        len(found),
    )


def _places_of(batch: DataFrame) -> PlaceColumns:
    """Return the batch's columns with the places of messages. Without them, its rows have to be numbered."""
    types: dict[str, DataType] = {each.name: each.dataType for each in batch.schema}
    for places in (_PARSED, _UNPARSED):
        if places is _UNPARSED and not isinstance(types.get(_UNPARSED_ONLY), LongType):
            continue
        if isinstance(types.get(places.journal), StringType) and isinstance(types.get(places.offset), LongType):
            unknown = F.col(places.journal).isNull() | F.col(places.offset).isNull()
            return places if batch.where(unknown).isEmpty() else _NUMBERED
    return _NUMBERED


def _numbered(batch: DataFrame) -> DataFrame:
    """Return a batch whose rows are numbered from 0. The executors keep it, so it is not evaluated again."""
    number, part = F.col(_NUMBERED.offset), F.shiftright(_NUMBERED.offset, _ROW_BITS)
    kept = batch.withColumn(_NUMBERED.offset, F.monotonically_increasing_id()).localCheckpoint()
    counts = sorted((row[0], row[1]) for row in kept.groupBy(part).count().collect())
    before = accumulate((count for _, count in counts), initial=0)
    begins = [(each, begin - (each << _ROW_BITS)) for (each, _), begin in zip(counts, before, strict=False)]
    shifts = F.broadcast(batch.sparkSession.createDataFrame(begins, f"{_PART} BIGINT, {_SHIFT} BIGINT"))
    shifted = kept.join(shifts, part == F.col(_PART)).withColumn(_NUMBERED.offset, number + F.col(_SHIFT))
    return shifted.drop(_PART, _SHIFT)
