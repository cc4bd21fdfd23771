"""Column-wise parsing of messages' JSON into typed columns, with the same results as Spark's own reader.

pyarrow parses the lines (`coranto.messages.column_parser`). Its result counts only for lines where it agrees with
Spark. All other lines are *doubtful*, and `json_values.py` decides about them. With a MAP column, a type that pyarrow
lacks, all lines are doubtful. Dates, times and bytes are parsed as texts (`text_values.py`).
"""

from __future__ import annotations

import decimal
from datetime import tzinfo
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from coranto.messages import column_parser
from coranto.messages.columnar import Mask
from coranto_consumers.spark.decoding.json_limits import may_be_beyond
from coranto_consumers.spark.decoding.text_values import mask_of, settled_texts
from coranto_consumers.spark.session.versions import arrow_schema

TYPES: Final = (
    *(T.StringType(), T.BooleanType(), T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType()),
    T.DoubleType(),
)
"""The types that pyarrow parses as they are. They are also the types of columns of CSV rows."""

_MAX_DIGITS: Final = 76


class ColumnParser(column_parser.LineParser):
    """Parses lines of JSON objects into columns. `zone` is the time zone of texts without one."""

    def __init__(self, schema: T.StructType, zone: tzinfo | None = None) -> None:
        self._kinds = [field.dataType for field in schema.fields]
        self._plain = all(kind in TYPES for kind in self._kinds)
        self._final = arrow_schema(schema)
        self._zone = zone
        self._has_maps = any(map(_has_maps, self._kinds))
        fields = [] if self._has_maps else [(field.name, _parsed_as(field.dataType)) for field in schema.fields]
        # Without a column, pyarrow does not return the number of lines.
        super().__init__(pa.schema(fields or [("~", pa.null())]))

    def parse(self, content: Any) -> tuple[Any, Mask]:
        if self._has_maps:
            return self._nulls(len(content)), np.ones(len(content), dtype=np.bool_)
        parsed, doubtful = super().parse(content)
        return self._settled_table(parsed, doubtful), doubtful

    def unlike_lines(self, content: Any) -> Mask:
        return super().unlike_lines(content) | may_be_beyond(content)

    def unlike(self, table: Any) -> Mask:
        """Return the mask of rows with a number that Spark reads differently: an infinite one, or the integer -0."""
        unlike: Mask = np.zeros(table.num_rows, dtype=np.bool_)
        if not self._plain:
            return unlike  # `_settled` checks numbers on every level.
        for column in table.columns:
            if pa.types.is_floating(column.type):
                unlike |= _unlike_numbers(column.combine_chunks())
        return unlike

    def _nulls(self, rows: int) -> Any:
        return pa.Table.from_arrays([pa.nulls(rows, each.type) for each in self._final], schema=self._final)

    def _settled_table(self, parsed: Any, doubtful: Mask) -> Any:
        """Return a table with the final columns. Adds doubtful rows to the mask."""
        if self._plain:
            return parsed if self._kinds else pa.table({}).select([])
        if doubtful.all():
            return self._nulls(len(parsed))
        columns = []
        for column, kind, to in zip(parsed.columns, self._kinds, self._final, strict=True):
            settled, unlike = self._settled(column.combine_chunks(), kind, to.type)
            columns.append(settled)
            doubtful |= unlike
        found = pa.Table.from_arrays(columns, schema=self._final)
        return found.take(pa.array(np.arange(len(parsed)), mask=doubtful)) if doubtful.any() else found

    def _settled(self, array: Any, kind: T.DataType, to: Any) -> tuple[Any, Mask]:
        match kind:
            case T.ArrayType():
                return self._settled_lists(array, kind, to)
            case T.StructType():
                return self._settled_structs(array, kind, to)
            case T.BinaryType() | T.DateType() | T.TimestampNTZType() | T.TimestampType():
                return settled_texts(array, kind, to, self._zone)
            case T.DecimalType():
                most = pa.scalar(decimal.Decimal((0, (9,) * kind.precision, -kind.scale)), array.type)
                fits = pc.less_equal(pc.abs(array), most)
                return pc.if_else(fits, array, pa.scalar(None, array.type)).cast(to), mask_of(pc.invert(fits))
            case T.FloatType() | T.DoubleType():
                return array, _unlike_numbers(array)
        return array, np.zeros(len(array), dtype=np.bool_)

    def _settled_lists(self, array: Any, kind: T.ArrayType, to: Any) -> tuple[Any, Mask]:
        values, unlike = self._settled(array.flatten(), kind.elementType, to.value_type)
        borders, doubtful = _lists_around(array, unlike)
        return pa.ListArray.from_arrays(borders, values, type=to, mask=pc.is_null(array)), doubtful

    def _settled_structs(self, array: Any, kind: T.StructType, to: Any) -> tuple[Any, Mask]:
        doubtful: Mask = np.zeros(len(array), dtype=np.bool_)
        children = []
        for child, field, final in zip(array.flatten(), kind.fields, to, strict=True):
            settled, unlike = self._settled(child, field.dataType, final.type)
            children.append(settled)
            doubtful |= unlike
        return pa.StructArray.from_arrays(children, fields=list(to), mask=pc.is_null(array)), doubtful


def _has_maps(kind: T.DataType) -> bool:
    match kind:
        case T.ArrayType():
            return _has_maps(kind.elementType)
        case T.StructType():
            return any(_has_maps(field.dataType) for field in kind.fields)
    return isinstance(kind, T.MapType)


def _parsed_as(kind: T.DataType) -> Any:
    match kind:
        case T.ArrayType():
            return pa.list_(_parsed_as(kind.elementType))
        case T.StructType():
            return pa.struct([(field.name, _parsed_as(field.dataType)) for field in kind.fields])
        case T.DecimalType():
            # pyarrow does not detect a number that, with its scale, has more digits than a decimal can hold.
            return pa.decimal256(_MAX_DIGITS - kind.scale, kind.scale)
        case T.BinaryType() | T.DateType() | T.TimestampType() | T.TimestampNTZType():
            return pa.string()
    return to_arrow_type(kind)


def _lists_around(array: Any, unlike: Mask) -> tuple[Any, Mask]:
    """Return the offsets of lists in their values, and the mask of lists with values in `unlike`."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    borders = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    doubtful: Mask = np.zeros(len(array), dtype=np.bool_)
    doubtful[np.repeat(np.arange(len(array)), lengths)[unlike]] = True
    return borders, doubtful


def _unlike_numbers(column: Any) -> Mask:
    numbers = column.fill_null(1.0).to_numpy(zero_copy_only=False)
    unlike: Mask = ~np.isfinite(numbers) | ((numbers == 0) & np.signbit(numbers))
    return unlike
