"""Parsers of messages into typed columns, one for each framing.

Lines of JSON are parsed column-wise, and doubtful ones again, one by one. Plain rows of CSV are parsed column-wise, and
messages of other framings one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import tzinfo
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, BooleanType, DataType, DoubleType, StringType, StructType

from coranto.errors import InvalidInput
from coranto.messages.column_parser import is_text
from coranto.messages.columnar import Mask
from coranto.messages.framing import JsonLines
from coranto_consumers.spark.decoding.csv_columns import text_columns, typed_columns
from coranto_consumers.spark.decoding.json_columns import TYPES, ColumnParser
from coranto_consumers.spark.decoding.json_values import BITS, MISFIT, LineValues
from coranto_consumers.spark.journals.framings import AnyLines, CsvRecords, FixedRecords, ReadFraming
from coranto_consumers.spark.session.versions import arrow_schema

Values: TypeAlias = tuple[Sequence[object], bool]
"""The values of a message for columns, null for those that do not fit, and True if all fit."""

# Possessive, so that the time is linear in the length of a field.
_INTEGER: Final = re.compile(r"[+-]?\d{1,40}+", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d{1,9}+)?", re.ASCII)
_WORDS: Final = {"NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}


class MessageParser(Protocol):
    """Parses messages into the columns of a schema."""

    decides: bool
    """False if doubtful messages have to be parsed again with `values_of`."""

    def parse(self, content: Any) -> tuple[Any, Mask]:
        """Parse an Arrow binary array of messages with newlines.

        Returns a table with a row for each, and the mask of messages that do not fit or are doubtful.
        """
        ...

    def values_of(self, message: bytes) -> Values:
        """Return the values of one message, without the newline."""
        ...


def parser_of(framing: ReadFraming, schema: StructType, zone: tzinfo | None = None) -> MessageParser:
    """Return the parser of a framing's messages. Raises InvalidInput for columns that the messages do not have."""
    match framing:
        case AnyLines():
            return _Whole(schema, "lines have", BinaryType(), StringType())
        case JsonLines():
            return _Json(schema, zone)
        case CsvRecords():
            _require_parsed(schema)
            return _Csv(framing, schema)
        case FixedRecords(message_type=None):
            return _Whole(schema, "frames without a messageType have", BinaryType())
        case FixedRecords():
            from coranto_consumers.spark.decoding.protobuf_values import reader_of  # Imports protobuf.

            return _OneByOne(schema, reader_of(framing.kind(), schema))


class _Json(ColumnParser):
    """The parser of lines of JSON."""

    decides = False

    def __init__(self, schema: StructType, zone: tzinfo | None) -> None:
        self._values = LineValues(schema, zone)
        super().__init__(schema, zone)

    def values_of(self, message: bytes) -> Values:
        return self._values(message)


class _OneByOne:
    """A parser that calls a function for the values of each message."""

    decides = True

    def __init__(self, schema: StructType, values: Callable[[bytes], Values]) -> None:
        self._schema = arrow_schema(schema)
        self.values_of = values

    def parse(self, content: Any) -> tuple[Any, Mask]:
        found = [self.values_of(message[:-1]) for message in content.to_pylist()]
        misfits: Mask = np.fromiter((not fits for _, fits in found), np.bool_, len(found))
        columns = zip(*(values for values, _ in found), strict=True) if found else [()] * len(self._schema)
        arrays = [pa.array(column, each.type) for column, each in zip(columns, self._schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=self._schema), misfits


class _Whole(_OneByOne):
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


class _Csv(_OneByOne):
    """The parser of CSV rows. The schema has their columns, in order and without the UUID's column."""

    def __init__(self, framing: CsvRecords, schema: StructType) -> None:
        rows = framing.framing()
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
        if not left.any():
            return pa.Table.from_arrays(columns, schema=self._schema), left
        slow, misfits = super().parse(content.filter(pa.array(left)))
        columns = [
            pc.replace_with_mask(column, pa.array(left), value.combine_chunks())
            for column, value in zip(columns, slow.columns, strict=True)
        ]
        left[left] = misfits
        return pa.Table.from_arrays(columns, schema=self._schema), left


def _value(kind: DataType, text: str) -> object:
    """Convert a CSV field to a column's type, or MISFIT. An empty field is null, as in Spark's reader."""
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


def _require_parsed(schema: StructType) -> None:
    for field in schema.fields:
        if field.dataType not in TYPES:
            types = ", ".join(kind.simpleString().upper() for kind in TYPES)
            raise InvalidInput(
                f"column {field.name!r} is {field.dataType.simpleString()}, and rows of CSV are parsed into "
                f"{types}. Declare one of these and cast it",
                field="schema",
            )
