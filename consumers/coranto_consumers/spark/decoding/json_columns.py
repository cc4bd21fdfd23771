"""Column-wise parsing of messages' JSON into typed columns, with the same results as Spark's own reader.

pyarrow parses the lines (`coranto.messages.column_parser`). Its result is used only for lines where it certainly agrees
with Spark. All other lines are *doubtful*, and are parsed by `json_values.py`. With a MAP column, which pyarrow's JSON
reader cannot parse as Spark does, all lines are doubtful. Dates, times and bytes are parsed as strings: pyarrow
converts common forms, and `json_values.py` converts the other strings, each distinct one once.
"""

from __future__ import annotations

import decimal
import functools
import re
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, DateType, StructField, TimestampNTZType, TimestampType

from coranto.messages import column_parser
from coranto.messages.arrow_values import data_of, value_offsets
from coranto.messages.columnar import Mask
from coranto_consumers.spark.decoding.json_times import NoZone
from coranto_consumers.spark.decoding.json_values import MAX_DEPTH, MAX_DIGITS, MISFIT, converter_of
from coranto_consumers.spark.session.versions import arrow_schema

TYPES: Final = (
    *(T.StringType(), T.BooleanType(), T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType()),
    T.DoubleType(),
)
"""The types whose values pyarrow parses without further conversion. CSV rows have columns of these types only."""

_DECIMAL_DIGITS: Final = 76
_STRIDE: Final = MAX_DIGITS // 2
_NUMBER_CHARACTERS: Final[Mask] = np.zeros(256, dtype=np.bool_)
_NUMBER_CHARACTERS[list(b"0123456789.eE+-")] = True
# Possessive, so that the time is linear in the length of a line.
_RUNS: Final = re.compile(rb"[0-9.eE+-]++")


class ColumnParser(column_parser.LineParser):
    """Parses lines of JSON objects into columns. `zone` is the time zone of times without one."""

    def __init__(self, schema: T.StructType, zone: tzinfo | None = None) -> None:
        self._kinds = [field.dataType for field in schema.fields]
        self._plain = all(kind in TYPES for kind in self._kinds)
        self._final = arrow_schema(schema)
        self._zone = zone
        self._has_maps = any(map(_has_maps, self._kinds))
        fields = [] if self._has_maps else [(field.name, _parsed_as(field.dataType)) for field in schema.fields]
        # A dummy column: without columns, pyarrow does not return the number of lines.
        super().__init__(pa.schema(fields or [("~", pa.null())]))

    def parse(self, content: Any) -> tuple[Any, Mask]:
        if self._has_maps:
            return self._nulls(len(content)), np.ones(len(content), dtype=np.bool_)
        parsed, doubtful = super().parse(content)
        return self._settled_table(parsed, doubtful), doubtful

    def doubtful_lines(self, content: Any) -> Mask:
        return super().doubtful_lines(content) | may_be_beyond(content)

    def doubtful_rows(self, table: Any) -> Mask:
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
        """Convert parsed columns to their final types. Adds further doubtful rows to the mask."""
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
                values, unlike = self._settled(array.flatten(), kind.elementType, to.value_type)
                borders, doubtful = _lists_around(array, unlike)
                return pa.ListArray.from_arrays(borders, values, type=to, mask=pc.is_null(array)), doubtful
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

    def _settled_structs(self, array: Any, kind: T.StructType, to: Any) -> tuple[Any, Mask]:
        doubtful: Mask = np.zeros(len(array), dtype=np.bool_)
        children = []
        for child, field, final in zip(array.flatten(), kind.fields, to, strict=True):
            settled, unlike = self._settled(child, field.dataType, final.type)
            children.append(settled)
            doubtful |= unlike
        return pa.StructArray.from_arrays(children, fields=list(to), mask=pc.is_null(array)), doubtful


def may_be_beyond(content: Any) -> Mask:
    """Return the mask of lines, in an Arrow binary array, that may exceed `MAX_DIGITS` or `MAX_DEPTH`."""
    mask: Mask = np.zeros(len(content), dtype=np.bool_)
    places = value_offsets(content)
    # A number of more than MAX_DIGITS contains two successive samples.
    of_numbers = _NUMBER_CHARACTERS[data_of(content)[places[0] : places[-1] : _STRIDE]]
    within = np.flatnonzero(of_numbers[:-1] & of_numbers[1:]) * _STRIDE + places[0]
    rows = np.searchsorted(places[1:], within, side="right")
    for row in set(rows.tolist()):
        mask[row] = max(map(len, _RUNS.findall(content[row].as_py())), default=0) > MAX_DIGITS
    long = np.flatnonzero(pc.binary_length(content).to_numpy() > 2 * MAX_DEPTH)
    if len(long):
        lines = content.take(pa.array(long))
        opened = pc.add(pc.count_substring(lines, "["), pc.count_substring(lines, "{")).to_numpy()
        mask[long[opened > MAX_DEPTH]] = True
    return mask


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
            return pa.decimal256(_DECIMAL_DIGITS - kind.scale, kind.scale)
        case T.BinaryType() | T.DateType() | T.TimestampType() | T.TimestampNTZType():
            return pa.string()
    return to_arrow_type(kind)


def _lists_around(array: Any, unlike: Mask) -> tuple[Any, Mask]:
    """Return the offsets of lists in the array of values, and the mask of lists with a value in the mask `unlike`."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    borders = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    doubtful: Mask = np.zeros(len(array), dtype=np.bool_)
    doubtful[np.repeat(np.arange(len(array)), lengths)[unlike]] = True
    return borders, doubtful


def _unlike_numbers(column: Any) -> Mask:
    numbers = column.fill_null(1.0).to_numpy(zero_copy_only=False)
    unlike: Mask = ~np.isfinite(numbers) | ((numbers == 0) & np.signbit(numbers))
    return unlike


_DAY: Final = (
    r"[12]\d{3}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_CLOCK: Final = r"[T ](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?"
_PLAIN_DAY: Final = f"^{_DAY}$"
"""Matches dates that exist in every year, so not February 29."""
_PLAIN_LOCAL: Final = f"^{_DAY}{_CLOCK}$"
_PLAIN_ZONED: Final = rf"^{_DAY}{_CLOCK}(?:Z|[+-](?:0\d|1[0-7]):[0-5]\d)$"
_LOCAL: Final = pa.timestamp("us")
_UTC: Final = pa.timestamp("us", "UTC")


def settled_texts(array: Any, kind: DataType, to: Any, zone: tzinfo | None) -> tuple[Any, Mask]:
    """Convert strings to a type. Return the values, and the mask of strings that do not fit, or lack a known zone."""
    found, unlike = _plain_values(array, kind, to, zone)
    if not unlike.any():
        return found, unlike
    odd = pa.array(unlike)
    values, misfits = _each_once(array.filter(odd), _converter(kind, zone), to)
    unlike[unlike] = misfits
    return pc.replace_with_mask(found, odd, values), unlike


def _plain_values(array: Any, kind: DataType, to: Any, zone: tzinfo | None) -> tuple[Any, Mask]:
    """Convert strings in common forms to a type. Return the values, null for other strings, and the mask of these."""
    match kind:
        case DateType():
            return _where_plain(array, _PLAIN_DAY, to)
        case TimestampNTZType():
            return _where_plain(array, _PLAIN_LOCAL, to)
        case TimestampType():
            zoned, unlike = _where_plain(array, _PLAIN_ZONED, to)
            if zone is None or not unlike.any():
                return zoned, unlike
            local, not_local = _where_plain(array, _PLAIN_LOCAL, _LOCAL)
            times, unsure = _in_zone(local, zone)
            return pc.coalesce(zoned, times.cast(to)), unlike & (not_local | unsure)
    return pa.nulls(len(array), to), mask_of(pc.is_valid(array))


def _converter(kind: DataType, zone: tzinfo | None) -> Callable[[str], object]:
    convert = converter_of(StructField("", kind), kind, zone)

    def converted(text: str) -> object:
        try:
            return convert(text, text)
        except NoZone:
            return MISFIT

    return converted


def _each_once(array: Any, convert: Callable[[str], object], to: Any) -> tuple[Any, Mask]:
    encoded = array.dictionary_encode()
    found = [convert(text) for text in encoded.dictionary.to_pylist()]
    values = pa.array([None if value is MISFIT else value for value in found], to)
    misfits = pa.array([value is MISFIT for value in found], pa.bool_())
    return values.take(encoded.indices), mask_of(misfits.take(encoded.indices))


@functools.cache
def _rules() -> tuple[Any, Any]:
    """Return the begin and end of the period where all time zone data agree.

    Before 1900, zones used local mean times, and some data end in 2037. This is a function because pyarrow imports
    pandas for its first scalar, which should not happen on import.
    """
    return tuple(pa.scalar(datetime(year, 1, 1), _LOCAL) for year in (1900, 2037))


def _in_zone(local: Any, zone: tzinfo) -> tuple[Any, Mask]:
    """Convert local times to UTC. Return the result, and the mask of times where pyarrow may differ from Spark."""
    if not isinstance(zone, ZoneInfo):
        offset = pa.scalar(zone.utcoffset(None) or timedelta(), pa.duration("us"))
        return pc.subtract(local, offset), np.zeros(len(local), dtype=np.bool_)
    since, until = _rules()
    unsure = pc.or_(pc.less(local, since), pc.greater_equal(local, until))
    sure = pc.if_else(unsure, pa.scalar(None, _LOCAL), local)
    times = pc.assume_timezone(sure, zone.key, ambiguous="earliest", nonexistent="latest")
    skipped = pc.not_equal(pc.local_timestamp(times), local)  # Clocks were set forward past this time.
    return times.cast(_UTC).cast(_LOCAL), mask_of(unsure) | mask_of(skipped)


def _where_plain(array: Any, form: str, to: Any) -> tuple[Any, Mask]:
    """Convert strings that match `form` to a type. Return the values, null for other strings, and the mask of these."""
    plain = pc.match_substring_regex(array, form)
    return pc.if_else(plain, array, pa.scalar(None, pa.string())).cast(to), mask_of(pc.invert(plain))


def mask_of(array: Any) -> Mask:
    """Return an Arrow array of booleans as a mask. Nulls are False."""
    mask: Mask = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
    return mask
