"""Parsing of messages' JSON into typed columns, many lines at once, with the answers of Spark's own reader.

pyarrow parses the lines (`coranto.messages.column_parser`). It is quick, but lenient and strict in other places than
Spark. So its answer counts only for lines about which the two agree. All other lines are *doubtful*, and
`json_values.py` decides. What pyarrow has no types for is rewritten before (`json_rewriting.py`): maps always, other
forms if lines turn out to have them. Dates, times and bytes are parsed as texts. Those of a plain form are converted
at once, and each other text once, however often it occurs.
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
    BinaryType,
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
from coranto_consumers.spark.json_limits import may_be_beyond
from coranto_consumers.spark.json_rewriting import ENTRY, rewrites, rewritten
from coranto_consumers.spark.text_values import mask_of, settled_texts

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

_FEW_DOUBTFUL: Final = 8
"""So many lines are looked at one by one rather than rewritten together."""
_MOST_DIGITS: Final = 76


def is_parsed(kind: DataType) -> bool:
    """Return True if pyarrow parses columns of a type."""
    return any(kind == known for known, _ in TYPES)


class ColumnParser(column_parser.LineParser):
    """Parses lines of JSON objects into columns of a schema, of types that `json_values.py` reads.

    `zone` is that of times that name none.
    """

    def __init__(self, schema: StructType, zone: tzinfo | None = None) -> None:
        self._asked = schema
        self._kinds = [field.dataType for field in schema.fields]
        self._plain = all(map(is_parsed, self._kinds))
        self._final = to_arrow_schema(schema, timezone="UTC")
        self._zone = zone
        self._has_maps = rewrites(schema, maps_only=True)
        self._may_rewrite = rewrites(schema)
        self._rewrites = False
        """True to rewrite more than maps from the first, because most lines before had to be."""
        self._spare = _spare(schema)
        fields = [(field.name, _parsed_as(field.dataType)) for field in schema.fields]
        # Without a column, pyarrow does not tell how many lines it has parsed.
        super().__init__(pa.schema(fields or [(self._spare, pa.null())]))

    def parse(self, content: Any) -> tuple[Any, Mask]:
        first = self._rewrites
        if first or self._has_maps:
            parsed, doubtful = self._rewritten(content, maps_only=not first)
        else:
            parsed, doubtful = super().parse(content)
        found = self._settled_table(parsed, doubtful, first)
        if self._may_rewrite and not first and (rows := int(doubtful.sum())) > _FEW_DOUBTFUL:
            chosen = pa.array(np.flatnonzero(doubtful))
            again, still = self._rewritten(content.take(chosen), maps_only=False)
            settled = self._settled_table(again, still, True)
            place = np.arange(len(content))
            place[doubtful] = len(content) + np.arange(rows)
            found = pa.concat_tables([found, settled]).take(pa.array(place))
            self._rewrites = 2 * (rows - int(still.sum())) > len(content)
            doubtful[doubtful] = still
        return found, doubtful

    def unlike_lines(self, content: Any) -> Mask:
        return super().unlike_lines(content) | may_be_beyond(content)

    def unlike(self, table: Any) -> Mask:
        """Return the mask of rows with a number that Spark reads differently: an infinite one, or the integer -0."""
        unlike: Mask = np.zeros(table.num_rows, dtype=np.bool_)
        if not self._plain:
            return unlike  # `_settled` looks at numbers on every level.
        for column in table.columns:
            if pa.types.is_floating(column.type):
                unlike |= _unlike_numbers(column.combine_chunks())
        return unlike

    def _rewritten(self, content: Any, *, maps_only: bool) -> tuple[Any, Mask]:
        """Parse lines that are rewritten, but for those that are doubtful anyway."""
        doubtful = self.unlike_lines(content)
        rows = np.flatnonzero(~doubtful)
        if not len(rows):
            return self._assembled([], doubtful), doubtful
        lines, unclear = rewritten(content.take(pa.array(rows)), self._asked, self._spare, maps_only=maps_only)
        doubtful[rows[unclear]] = True
        rows = np.flatnonzero(~doubtful)
        parsed, unlike = super().parse(lines.filter(pa.array(~unclear)))
        doubtful[rows] = unlike
        if len(rows) == len(content):
            return parsed, doubtful
        place = np.zeros(len(content), dtype=np.int64)
        place[rows] = np.arange(len(rows))
        return parsed.take(pa.array(place, mask=doubtful)), doubtful

    def _settled_table(self, parsed: Any, doubtful: Mask, marked: bool) -> Any:
        """Return a parsed table, of rewritten lines if `marked`, with the final columns. Adds to the mask."""
        if self._plain:
            return parsed if self._kinds else pa.table({}).select([])
        columns = []
        known = len(parsed) and not doubtful.all()
        for column, kind, to in zip(parsed.columns, self._kinds, self._final, strict=True):
            if not known:
                columns.append(pa.nulls(len(parsed), to.type))
                continue
            settled, unlike = self._settled(column.combine_chunks(), kind, to.type, marked)
            columns.append(settled)
            doubtful |= unlike
        found = pa.Table.from_arrays(columns, schema=self._final)
        if known and doubtful.any():
            found = found.take(pa.array(np.arange(len(parsed)), mask=doubtful))
        return found

    def _settled(self, array: Any, kind: DataType, to: Any, marked: bool) -> tuple[Any, Mask]:
        """Return parsed values as values of a column's type, and the mask of those that are doubtful.

        `marked`: they are fields of objects of rewritten lines, in which numbers may be marked texts.
        """
        match kind:
            case ArrayType():
                return self._settled_lists(array, kind, to, marked and kind.elementType != TimestampType())
            case MapType():
                return self._settled_maps(array, kind, to, marked and kind.valueType != TimestampType())
            case StructType():
                return self._settled_structs(array, kind, to, marked)
            case BinaryType() | DateType() | TimestampNTZType() | TimestampType():
                return settled_texts(array, kind, to, self._zone, marked)
            case DecimalType():
                most = pa.scalar(decimal.Decimal((0, (9,) * kind.precision, -kind.scale)), array.type)
                fits = pc.less_equal(pc.abs(array), most)
                return pc.if_else(fits, array, pa.scalar(None, array.type)).cast(to), mask_of(pc.invert(fits))
            case FloatType() | DoubleType():
                return array, _unlike_numbers(array)
        return array, np.zeros(len(array), dtype=np.bool_)

    def _settled_lists(self, array: Any, kind: ArrayType, to: Any, marked: bool) -> tuple[Any, Mask]:
        values, unlike = self._settled(array.flatten(), kind.elementType, to.value_type, marked)
        borders, doubtful = _lists_around(array, unlike)
        return pa.ListArray.from_arrays(borders, values, type=to, mask=pc.is_null(array)), doubtful

    def _settled_maps(self, array: Any, kind: MapType, to: Any, marked: bool) -> tuple[Any, Mask]:
        keys, values = array.flatten().flatten()
        items, unlike = self._settled(values, kind.valueType, to.item_type, marked)
        borders, doubtful = _lists_around(array, unlike)
        return pa.MapArray.from_arrays(borders, keys, items, type=to, mask=pc.is_null(array)), doubtful

    def _settled_structs(self, array: Any, kind: StructType, to: Any, marked: bool) -> tuple[Any, Mask]:
        doubtful: Mask = np.zeros(len(array), dtype=np.bool_)
        children = []
        for child, field, final in zip(array.flatten(), kind.fields, to, strict=True):
            settled, unlike = self._settled(child, field.dataType, final.type, marked)
            children.append(settled)
            doubtful |= unlike
        return pa.StructArray.from_arrays(children, fields=list(to), mask=pc.is_null(array)), doubtful


def _spare(schema: StructType) -> str:
    """Return a name that no field of a schema has, on any level."""
    text, name = schema.json(), "~"
    while f'"{name}"' in text:
        name += "~"
    return name


def _parsed_as(kind: DataType) -> Any:
    """Return the type that pyarrow parses a column into."""
    match kind:
        case ArrayType():
            return pa.list_(_parsed_as(kind.elementType))
        case MapType():
            key, value = ENTRY
            return pa.list_(pa.struct([(key, pa.string()), (value, _parsed_as(kind.valueType))]))
        case StructType():
            return pa.struct([(field.name, _parsed_as(field.dataType)) for field in kind.fields])
        case DecimalType():
            # pyarrow does not notice when a number with its scale has more digits than a decimal has bits for.
            return pa.decimal256(_MOST_DIGITS - kind.scale, kind.scale)
        case FloatType():
            return pa.float32()
        case BinaryType() | DateType() | TimestampType() | TimestampNTZType():
            return pa.string()
    return next(arrow for known, arrow in TYPES if kind == known)


def _lists_around(array: Any, unlike: Mask) -> tuple[Any, Mask]:
    """Return the borders of lists in what they hold, and the mask of lists that hold what is `unlike`."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    borders = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    doubtful: Mask = np.zeros(len(array), dtype=np.bool_)
    doubtful[np.repeat(np.arange(len(array)), lengths)[unlike]] = True
    return borders, doubtful


def _unlike_numbers(column: Any) -> Mask:
    numbers = column.fill_null(1.0).to_numpy(zero_copy_only=False)
    unlike: Mask = ~np.isfinite(numbers) | ((numbers == 0) & np.signbit(numbers))
    return unlike
