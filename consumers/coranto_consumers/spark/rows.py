"""Rows of the source: its columns, and Arrow batches with exactly the types that Spark requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.columnar import Int64s, UInt64s
from coranto_consumers.spark.reading import Lines

ROWS_PER_BATCH: Final = 32_768
UUID_FIELDS: Final = ("producer", "clock", "flags")
FIELDS: Final[Mapping[str, StructField]] = {
    field.name: field
    for field in (
        StructField("journal", StringType()),
        StructField("offset", LongType()),
        StructField("next_offset", LongType()),
        StructField("producer", BinaryType()),
        StructField("clock", LongType()),
        StructField("flags", IntegerType()),
        StructField("value", StringType()),
    )
}
PIECE: Final = StructField("piece", LongType())
"""The column of sequenced reads that holds a row's range and segment (see `scanning.py`)."""


def require_known_columns(schema: StructType, *, sequenced: bool) -> None:
    """Raise InvalidInput for a column that the source does not have, or does not have in that type."""
    known = {**FIELDS, PIECE.name: PIECE} if sequenced else FIELDS
    for field in schema.fields:
        expected = known.get(field.name)
        if expected is None:
            raise InvalidInput(f"there is no column {field.name!r}; there are {', '.join(known)}", field="schema")
        if field.dataType != expected.dataType and not (field.name == "value" and field.dataType == BinaryType()):
            raise InvalidInput(
                f"column {field.name!r} is {expected.dataType.simpleString()}, not {field.dataType.simpleString()}",
                field="schema",
            )


class BatchBuilder:
    """Builds Arrow batches of a schema from lines."""

    def __init__(self, schema: StructType) -> None:
        self._schema: Any = to_arrow_schema(schema, timezone="UTC")

    def build(self, lines: Lines, pieces: Int64s | None = None) -> Iterator[Any]:
        """Yield record batches of the lines. Raises CorruptMessage for a text that is not UTF-8."""
        if not len(lines):
            return
        columns: dict[str, Callable[[Any], Any]] = {
            "journal": lambda kind: pa.repeat(pa.scalar(lines.journal, kind), len(lines)),
            "offset": lambda kind: pa.array(lines.begins, kind),
            "next_offset": lambda kind: pa.array(lines.ends, kind),
            "producer": lambda kind: producer_ids(lines.producers),
            "clock": lambda kind: pa.array(lines.clocks.view(np.int64), kind),
            "flags": lambda kind: pa.array(lines.flags.astype(np.int32), kind),
            "value": lambda kind: lines.values if kind == pa.binary() else _as_text(lines),
            PIECE.name: lambda kind: pa.array(pieces, kind),
        }
        whole = pa.RecordBatch.from_arrays(
            [columns[field.name](field.type) for field in self._schema], schema=self._schema
        )
        for start in range(0, len(lines), ROWS_PER_BATCH):
            yield whole.slice(start, ROWS_PER_BATCH)


def producer_ids(producers: UInt64s) -> Any:
    """Return producer ids as an Arrow binary array of six bytes each."""
    data = np.ascontiguousarray(producers.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 2:])
    borders = np.arange(0, 6 * len(producers) + 1, 6, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(producers), [None, pa.py_buffer(borders), pa.py_buffer(data)])


def _as_text(lines: Lines) -> Any:
    try:
        return lines.values.cast(pa.string())
    except pa.ArrowInvalid:
        for begin, value in zip(lines.begins.tolist(), lines.values, strict=True):
            try:
                value.as_py().decode()
            except UnicodeDecodeError as error:
                raise CorruptMessage(lines.journal, begin, f"not UTF-8: {error}") from error
        raise
