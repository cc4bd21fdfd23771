"""Parsing of messages' JSON into typed columns, many lines at once, with the answers of Spark's own parser.

pyarrow parses the lines (`coranto.messages.column_parser`). It is quick, but lenient and strict in other places than
Spark's `from_json`. So its answer counts only for lines about which the two agree. All other lines are *doubtful*, and
`json_values.py` or Spark's parser decides. Dates and times are parsed as texts, and made of those that have a plain
form. Maps are beyond pyarrow: with one among the columns, every line is doubtful.
"""

from __future__ import annotations

import decimal
from datetime import tzinfo
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from coranto.messages import column_parser
from coranto.messages.columnar import Mask
from coranto_consumers.spark.json_times import is_utc

TYPES: Final = (
    (StringType(), pa.string()),
    (BooleanType(), pa.bool_()),
    (ByteType(), pa.int8()),
    (ShortType(), pa.int16()),
    (IntegerType(), pa.int32()),
    (LongType(), pa.int64()),
    (DoubleType(), pa.float64()),
)
"""The types of columns that pyarrow parses, and of which rows of CSV have columns, with Arrow's."""

_DAY: Final = (
    r"[12]\d{3}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_CLOCK: Final = r"[T ](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?"
_PLAIN_DAY: Final = f"^{_DAY}$"
"""Dates that are there in each year: not the 29th of February."""
_PLAIN_LOCAL: Final = f"^{_DAY}{_CLOCK}$"
_PLAIN_ZONED: Final = rf"^{_DAY}{_CLOCK}(?:Z|[+-](?:0\d|1[0-7]):[0-5]\d)$"


def is_parsed(kind: DataType) -> bool:
    """Return True if pyarrow parses columns of a type."""
    return any(kind == known for known, _ in TYPES)


class ColumnParser(column_parser.LineParser):
    """Parses lines of JSON objects into columns of a schema, of types that `json_values.py` reads.

    `zone` is that of times that name none.
    """

    def __init__(self, schema: StructType, zone: tzinfo | None = None) -> None:
        self._kinds = [field.dataType for field in schema.fields]
        self._at_once = not any(_has_map(kind) for kind in self._kinds)
        self._plain = all(map(is_parsed, self._kinds))
        self._final = to_arrow_schema(schema, timezone="UTC")
        self._utc = is_utc(zone)
        kinds = [_parsed_as(kind) for kind in self._kinds] if self._at_once else []
        super().__init__(pa.schema(list(zip(schema.names if kinds else [], kinds, strict=True))))

    def parse(self, content: Any) -> tuple[Any, Mask]:
        if self._plain:
            return super().parse(content)
        if not self._at_once:
            return self._nulls(len(content)), np.ones(len(content), dtype=np.bool_)
        table, doubtful = super().parse(content)
        columns = []
        for column, kind, to in zip(table.columns, self._kinds, self._final, strict=True):
            settled, unlike = self._settled(column.combine_chunks(), kind, to.type)
            columns.append(settled)
            doubtful |= unlike
        found = pa.Table.from_arrays(columns, schema=self._final)
        if doubtful.any():
            found = found.take(pa.array(np.arange(len(content)), mask=doubtful))
        return found, doubtful

    def unlike(self, table: Any) -> Mask:
        """Return the mask of rows with a number that Spark reads differently: an infinite one, or the integer -0."""
        unlike: Mask = np.zeros(table.num_rows, dtype=np.bool_)
        if not self._plain:
            return unlike  # `_settled` looks at numbers on every level.
        for column in table.columns:
            if pa.types.is_floating(column.type):
                unlike |= _unlike_numbers(column.combine_chunks())
        return unlike

    def _nulls(self, rows: int) -> Any:
        return pa.Table.from_arrays([pa.nulls(rows, field.type) for field in self._final], schema=self._final)

    def _settled(self, array: Any, kind: DataType, to: Any) -> tuple[Any, Mask]:
        """Return parsed values as values of a column's type, and the mask of those that are doubtful."""
        match kind:
            case ArrayType():
                return self._settled_lists(array, kind, to)
            case StructType():
                return self._settled_structs(array, kind, to)
            case DateType():
                return _where_plain(array, _PLAIN_DAY, to)
            case TimestampNTZType():
                return _where_plain(array, _PLAIN_LOCAL, to)
            case TimestampType():
                zoned, unlike = _where_plain(array, _PLAIN_ZONED, to)
                if not self._utc or not unlike.any():
                    return zoned, unlike
                local, beside = _where_plain(array, _PLAIN_LOCAL, pa.timestamp("us"))
                return pc.coalesce(zoned, local.cast(to)), unlike & beside
            case DecimalType():
                most = pa.scalar(decimal.Decimal(10**kind.precision - 1), pa.decimal128(38, 0))
                least = pa.scalar(decimal.Decimal(1 - 10**kind.precision), pa.decimal128(38, 0))
                unscaled = _unscaled(array)
                return array, _mask(pc.or_(pc.greater(unscaled, most), pc.less(unscaled, least)))
            case FloatType() | DoubleType():
                return array, _unlike_numbers(array)
        return array, np.zeros(len(array), dtype=np.bool_)

    def _settled_lists(self, array: Any, kind: ArrayType, to: Any) -> tuple[Any, Mask]:
        values, unlike = self._settled(array.flatten(), kind.elementType, to.value_type)
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        borders = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        doubtful: Mask = np.zeros(len(array), dtype=np.bool_)
        doubtful[np.repeat(np.arange(len(array)), lengths)[unlike]] = True
        return pa.ListArray.from_arrays(borders, values, type=to, mask=pc.is_null(array)), doubtful

    def _settled_structs(self, array: Any, kind: StructType, to: Any) -> tuple[Any, Mask]:
        doubtful: Mask = np.zeros(len(array), dtype=np.bool_)
        children = []
        for child, field, final in zip(array.flatten(), kind.fields, to, strict=True):
            settled, unlike = self._settled(child, field.dataType, final.type)
            children.append(settled)
            doubtful |= unlike
        return pa.StructArray.from_arrays(children, fields=list(to), mask=pc.is_null(array)), doubtful


def _has_map(kind: DataType) -> bool:
    match kind:
        case ArrayType():
            return _has_map(kind.elementType)
        case StructType():
            return any(_has_map(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType)


def _parsed_as(kind: DataType) -> Any:
    """Return the type that pyarrow parses a column into."""
    match kind:
        case ArrayType():
            return pa.list_(_parsed_as(kind.elementType))
        case StructType():
            return pa.struct([(field.name, _parsed_as(field.dataType)) for field in kind.fields])
        case DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
        case FloatType():
            return pa.float32()
        case DateType() | TimestampType() | TimestampNTZType():
            return pa.string()
    return next(arrow for known, arrow in TYPES if kind == known)


def _where_plain(array: Any, form: str, to: Any) -> tuple[Any, Mask]:
    """Return texts of a form as values of a type, with nulls for others; and the mask of those others."""
    plain = pc.match_substring_regex(array, form)
    return pc.if_else(plain, array, pa.scalar(None, pa.string())).cast(to), _mask(pc.invert(plain))


def _unscaled(array: Any) -> Any:
    """Return decimals as the integers that they are stored as."""
    kind = pa.decimal128(38, 0)
    return pa.Array.from_buffers(kind, len(array), array.buffers(), offset=array.offset)


def _mask(array: Any) -> Mask:
    """Return an Arrow array of booleans as a mask, without its nulls."""
    mask: Mask = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
    return mask


def _unlike_numbers(column: Any) -> Mask:
    numbers = column.fill_null(1.0).to_numpy(zero_copy_only=False)
    unlike: Mask = ~np.isfinite(numbers) | ((numbers == 0) & np.signbit(numbers))
    return unlike
