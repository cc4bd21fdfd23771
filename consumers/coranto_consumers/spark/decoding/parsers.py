"""Parsers of messages into typed columns, one per framing: column-wise where possible, else message by message."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import tzinfo
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from pyspark.sql.types import BinaryType, BooleanType, DataType, DoubleType, StringType, StructType

from coranto.errors import InvalidInput
from coranto.messages.column_parser import is_text
from coranto.messages.columnar import Mask
from coranto.messages.framing import JsonLines
from coranto_consumers.journals.framings import AnyLines, CsvRecords, FixedRecords, ReadFraming
from coranto_consumers.spark.decoding.json_columns import TYPES, ColumnParser
from coranto_consumers.spark.decoding.json_values import BITS, MISFIT, LineValues
from coranto_consumers.spark.session.versions import arrow_schema

Values: TypeAlias = tuple[Sequence[object], bool]
"""The values of a message by column, null where they do not fit, and True if all fit."""

# Possessive, so that the time is linear in the length of a field.
_INTEGER: Final = re.compile(r"[+-]?\d{1,40}+", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d{1,9}+)?", re.ASCII)
_WORDS: Final = {"NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}


def parser_of(framing: ReadFraming, schema: StructType, zone: tzinfo | None = None) -> MessageParser:
    """Return the parser of a framing's messages. Raises InvalidInput for columns that the messages do not have."""
    match framing:
        case AnyLines():
            return _Whole(schema, "lines have", BinaryType(), StringType())
        case JsonLines():
            return _Json(schema, zone)
        case CsvRecords():
            return _Csv(framing, schema)
        case FixedRecords(message_type=None):
            return _Whole(schema, "frames without a messageType have", BinaryType())
        case FixedRecords():
            from coranto_consumers.spark.decoding.protobuf_values import reader_of  # Imports protobuf.

            return MessageParser(schema, reader_of(framing.kind(), schema))


class MessageParser:
    """Parses messages into the columns of a schema, with a function that returns a message's values."""

    def __init__(self, schema: StructType, values: Callable[[bytes], Values]) -> None:
        self._schema = arrow_schema(schema)
        self.values_of = values

    def parse(self, content: Any) -> tuple[Any, Mask]:
        """Parse messages in an Arrow binary array, each with its newline. Return a table and the mask of misfits."""
        found = [self.values_of(message[:-1]) for message in content.to_pylist()]
        misfits: Mask = np.fromiter((not fits for _, fits in found), np.bool_, len(found))
        columns = zip(*(values for values, _ in found), strict=True) if found else [()] * len(self._schema)
        arrays = [pa.array(column, each.type) for column, each in zip(columns, self._schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=self._schema), misfits

    def _completed(self, content: Any, columns: Sequence[Any], left: Mask) -> tuple[Any, Mask]:
        """Parse the messages in the mask `left` one by one. Return all columns as `parse` does."""
        if left.any():
            mask = pa.array(left)
            found, misfits = MessageParser.parse(self, content.filter(mask))
            pairs = zip(columns, found.columns, strict=True)
            columns = [_replaced(column, mask, values.combine_chunks()) for column, values in pairs]
            left[left] = misfits
        return pa.Table.from_arrays(columns, schema=self._schema), left


class _Json(MessageParser):
    def __init__(self, schema: StructType, zone: tzinfo | None) -> None:
        super().__init__(schema, LineValues(schema, zone))
        self._columns = ColumnParser(schema, zone)

    def parse(self, content: Any) -> tuple[Any, Mask]:
        table, doubtful = self._columns.parse(content)
        return self._completed(content, [column.combine_chunks() for column in table.columns], doubtful)


class _Whole(MessageParser):
    """A parser of messages with one column: `value`, the message itself."""

    def __init__(self, schema: StructType, subject: str, *kinds: DataType) -> None:
        if schema.names not in ([], ["value"]) or any(field.dataType not in kinds for field in schema.fields):
            types = " or ".join(kind.simpleString().upper() for kind in kinds)
            raise InvalidInput(
                f"{subject} one column, value {types}, and not {', '.join(schema.names) or 'none'}", field="schema"
            )
        as_text = [field.dataType == StringType() for field in schema.fields]

        def values(message: bytes) -> Values:
            fits = not any(as_text) or is_text(message)
            return [(message.decode() if text else message) if fits else None for text in as_text], fits

        super().__init__(schema, values)


class _Csv(MessageParser):
    """The parser of CSV rows. The schema has their columns, in order and without the UUID's column."""

    def __init__(self, framing: CsvRecords, schema: StructType) -> None:
        rows = framing.framing()
        for field in schema.fields:
            if field.dataType not in TYPES:
                types = ", ".join(kind.simpleString().upper() for kind in TYPES)
                raise InvalidInput(
                    f"column {field.name!r} is {field.dataType.simpleString()}, and rows of CSV are parsed into "
                    f"{types}. Declare one of these and cast it",
                    field="schema",
                )
        if schema.fields and len(schema.fields) != rows.rows.width:
            raise InvalidInput(
                f"rows of CSV have {rows.rows.width} columns and their UUID (csvColumns, csvUuidColumn), and "
                f"{len(schema.fields)} are declared: declare all of them, in order",
                field="schema",
            )
        kinds = self._kinds = [field.dataType for field in schema.fields]
        self._width, self._uuid_column = rows.width, rows.uuid_column

        def values(message: bytes) -> Values:
            try:
                row = rows.unmarshal(message)
            except InvalidInput:
                return [None] * len(kinds), False
            found = [_value(kind, text) for kind, text in zip(kinds, row, strict=False)]
            return [None if value is MISFIT else value for value in found], MISFIT not in found

        super().__init__(schema, values)

    def parse(self, content: Any) -> tuple[Any, Mask]:
        texts = text_columns(content, self._width, self._uuid_column) if self._kinds and len(content) else None
        if texts is None:
            return super().parse(content)
        columns, left = typed_columns(texts, self._kinds, self._schema.types)
        return self._completed(content, columns, left)


def _value(kind: DataType, text: str) -> object:
    """Convert a CSV field to a column's type. Return MISFIT if it does not fit. As in Spark, an empty field is null."""
    if not text:
        return None
    if isinstance(kind, StringType):
        return text
    if isinstance(kind, BooleanType):
        return {"true": True, "false": False}.get(text.lower(), MISFIT)
    if isinstance(kind, DoubleType):
        return float(text) if _NUMBER.fullmatch(text) else _WORDS.get(text, MISFIT)
    if not _INTEGER.fullmatch(text):
        return MISFIT
    number, limit = int(text), 1 << (BITS[type(kind)] - 1)
    return number if -limit <= number < limit else MISFIT


_PLAIN_INTEGER: Final = "^[+-]?[0-9]{1,18}$"
"""Matches integers that the row-wise parser accepts, with few enough digits for an int64."""
_PLAIN_NUMBER: Final = r"^[+-]?(?:[0-9]{1,100}(?:\.[0-9]{0,100})?|\.[0-9]{1,100})$"
"""Matches numbers that the row-wise parser accepts, with few enough digits for the range of doubles."""
_PARSE: Final = pa_csv.ParseOptions(
    quote_char=False, double_quote=False, escape_char=False, newlines_in_values=False, ignore_empty_lines=False
)
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_SPECIAL: Final = (b'"', b"\r", b"\0")


def text_columns(content: Any, width: int, left_out: int | None) -> list[Any] | None:
    """Return the fields of rows as Arrow string columns, without column `left_out`. None for rows that are not plain.

    `content` is an Arrow binary array of rows with newlines. Plain rows have no quotes or other special characters, and
    `width` fields of UTF-8.
    """
    whole = pa.ListArray.from_arrays(pa.array([0, len(content)], pa.int32()), content)
    data = pc.binary_join(whole, b"")[0].as_py()
    if any(each in data for each in _SPECIAL) or data.startswith(_BYTE_ORDER_MARK) or not is_text(data):
        return None
    if data.count(b"\n") != len(content):
        return None
    names = [str(number) for number in range(width)]
    wanted = [name for number, name in enumerate(names) if number != left_out]
    try:
        table = pa_csv.read_csv(
            pa.BufferReader(data),
            read_options=pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
            parse_options=_PARSE,
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), include_columns=wanted, strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid:  # A row has another number of fields.
        return None
    if table.num_rows != len(content):
        return None
    return [column.combine_chunks() for column in table.columns]


def typed_columns(texts: Sequence[Any], kinds: Sequence[DataType], types: Sequence[Any]) -> tuple[list[Any], Mask]:
    """Convert string columns to Spark's `kinds` as Arrow's `types`. Return them, and the mask of rows left to parse."""
    left: Mask = np.zeros(len(texts[0]), dtype=np.bool_)
    columns = []
    for text, kind, to in zip(texts, kinds, types, strict=True):
        column, plain = _typed(text, kind, to)
        empty = pc.equal(text, "")
        columns.append(pc.if_else(empty, pa.scalar(None, to), column))
        left |= ~np.asarray(pc.or_(empty, plain))
    return columns, left


def _typed(text: Any, kind: DataType, to: Any) -> tuple[Any, Any]:
    if isinstance(kind, StringType):
        return text, pa.array(np.ones(len(text), dtype=np.bool_))
    if isinstance(kind, BooleanType):
        lower = pc.ascii_lower(text)
        yes, no = pc.equal(lower, "true"), pc.equal(lower, "false")
        return yes, pc.or_(yes, no)
    number = isinstance(kind, DoubleType)
    plain = pc.match_substring_regex(text, _PLAIN_NUMBER if number else _PLAIN_INTEGER)
    digits = pc.utf8_ltrim(pc.if_else(plain, text, "0"), "+")
    if number:
        return digits.cast(pa.float64()), plain
    values = digits.cast(pa.int64())
    limit = 1 << (to.bit_width - 1)
    fits = pc.and_(pc.greater_equal(values, -limit), pc.less_equal(values, limit - 1))
    return pc.if_else(fits, values, 0).cast(to), pc.and_(plain, fits)


def _replaced(column: Any, mask: Any, values: Any) -> Any:
    """Return a column with `values`, in order, where `mask` is set."""
    if not pa.types.is_nested(column.type):
        return pc.replace_with_mask(column, mask, values)
    chosen = np.asarray(mask)
    place = np.arange(len(column))
    place[chosen] = len(column) + np.arange(len(values))
    return pa.concat_arrays([column, values]).take(pa.array(place))
