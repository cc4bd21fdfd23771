"""Parsing of messages' JSON into typed columns, many lines at once, with the answers of Spark's own parser.

pyarrow parses the lines (`coranto.messages.column_parser`). It is quick, but lenient and strict in other places than
Spark's `from_json`. So its answer counts only for lines about which the two agree. All other lines are *doubtful*, and
`json_values.py` or Spark's parser decides.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from coranto.messages import column_parser
from coranto.messages.columnar import Mask

TYPES: Final = (
    (StringType(), pa.string()),
    (BooleanType(), pa.bool_()),
    (ByteType(), pa.int8()),
    (ShortType(), pa.int16()),
    (IntegerType(), pa.int32()),
    (LongType(), pa.int64()),
    (DoubleType(), pa.float64()),
)
"""The types of columns that are parsed here, with Arrow's."""


def is_parsed(kind: DataType) -> bool:
    """Return True if columns of a type are parsed here."""
    return any(kind == known for known, _ in TYPES)


class ColumnParser(column_parser.LineParser):
    """Parses lines of JSON objects into columns of a schema, whose types must all be among `TYPES`."""

    def __init__(self, schema: StructType) -> None:
        kinds = [next(arrow for known, arrow in TYPES if field.dataType == known) for field in schema.fields]
        super().__init__(pa.schema(list(zip(schema.names, kinds, strict=True))))

    def unlike(self, table: Any) -> Mask:
        """Return the mask of rows with a number that Spark reads differently: an infinite one, or the integer -0."""

        unlike: Mask = np.zeros(table.num_rows, dtype=np.bool_)
        for column in table.columns:
            if column.type == pa.float64():
                numbers = column.combine_chunks().fill_null(1.0).to_numpy(zero_copy_only=False)
                unlike |= ~np.isfinite(numbers) | ((numbers == 0) & np.signbit(numbers))
        return unlike
