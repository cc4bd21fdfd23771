"""Rows of the data source: its columns, and Arrow batches with exactly the types that Spark requests."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import tzinfo
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.column_parser import without_heads
from coranto.messages.columnar import Int64s, Mask, UInt64s
from coranto.messages.framing import JsonLines
from coranto_consumers.journals.framings import FixedRecords, ReadFraming
from coranto_consumers.journals.reading import Lines
from coranto_consumers.spark.committed.scanning import SUMMARY_PIECE
from coranto_consumers.spark.decoding.parsers import parser_of
from coranto_consumers.spark.session.versions import arrow_schema

ROWS_PER_BATCH: Final = 32_768
FIELDS: Final[Mapping[str, T.StructField]] = {
    field.name: field
    for field in (
        T.StructField("journal", T.StringType()),
        T.StructField("offset", T.LongType()),
        T.StructField("next_offset", T.LongType()),
        T.StructField("producer", T.BinaryType()),
        T.StructField("clock", T.LongType()),
        T.StructField("flags", T.IntegerType()),
        T.StructField("value", T.StringType()),
        T.StructField("commit_offset", T.LongType()),
    )
}
COMMIT_OFFSET: Final = "commit_offset"
"""The field with the offset that committed a message: its acknowledgement's offset, or its own."""
PIECE: Final = T.StructField("coranto_piece", T.LongType())
"""The column of sequenced reads with a row's range and segment (see `scanning.py`)."""
LINE: Final = T.StructField("coranto_line", T.BinaryType())
"""The column of sequenced reads with the lines that do not fit."""
SUMMARY: Final = T.StructField("coranto_summary", T.StringType())
"""The column of sequenced reads with the summary of a range (see `scanning.py`)."""
PARSED_PREFIX: Final = "_"
"""The prefix of the source's own columns in parsed reads, which separates them from fields of messages."""


class Misfits(enum.StrEnum):
    """The handling of lines that do not fit the columns of a read."""

    PERMISSIVE = "PERMISSIVE"
    """Values that do not fit are null, as in Spark's readers."""
    FAILFAST = "FAILFAST"
    """The first line that does not fit ends the read with an error."""
    KEPT = "KEPT"
    """For consumers: values that do not fit are null, and the column `LINE` has the line."""


_REQUIRED: Final = "coranto.required"
"""The metadata key of columns that messages must have."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns of a schema, and where their values come from."""

    schema: T.StructType
    own: Mapping[str, str]
    """Maps columns to fields of `FIELDS`, or to `PIECE`, `LINE` and `SUMMARY`."""
    message: T.StructType
    text: str | None = None
    """The column with the text of lines that do not fit, if any."""
    misfits: Misfits = Misfits.PERMISSIVE
    framing: ReadFraming = field(default_factory=JsonLines)
    zone: tzinfo | None = None

    @property
    def has_commits(self) -> bool:
        return COMMIT_OFFSET in self.own.values()


def raw_layout(schema: T.StructType) -> RowLayout:
    """Return the layout of an unparsed read. Raises InvalidInput for columns that the source does not have."""
    for column in schema.fields:
        if column.name not in FIELDS:
            raise InvalidInput(f"there is no column {column.name!r}; there are {', '.join(FIELDS)}", field="schema")
        _require_type(column, FIELDS[column.name])
    return RowLayout(schema, {name: name for name in schema.names}, T.StructType([]))


def parsed_layout(
    schema: T.StructType, text: str | None, misfits: Misfits, framing: ReadFraming, zone: tzinfo | None = None
) -> RowLayout:
    """Return the layout of a parsed read. Columns that are not the source's own are message fields.

    Raises InvalidInput.
    """
    known = {PARSED_PREFIX + name: field for name, field in FIELDS.items()}
    if misfits is Misfits.KEPT:
        known |= {PARSED_PREFIX + field.name: field for field in (PIECE, LINE, SUMMARY)}
        text = None
    own: dict[str, str] = {}
    message = []
    for column in schema.fields:
        if column.name in known:
            _require_type(column, known[column.name])
            own[column.name] = known[column.name].name
        elif column.name == text:
            # Frames are not text, so their column is BINARY.
            kind = T.BinaryType() if isinstance(framing, FixedRecords) else T.StringType()
            _require_type(column, T.StructField(column.name, kind))
        else:
            if not column.nullable or column.dataType != nullable(column.dataType):
                raise InvalidInput(  # Spark fails with an unclear error at the first null.
                    f"column {column.name!r}, or a part of it, is NOT NULL, and messages may lack fields: declare it "
                    "nullable, and filter rows with nulls out",
                    field="schema",
                )
            message.append(column)
    parser_of(framing, T.StructType(message), zone)  # Raises InvalidInput.
    return RowLayout(schema, own, T.StructType(message), text if text in schema.names else None, misfits, framing, zone)


def is_raw(schema: T.StructType) -> bool:
    """Return True if a schema has only the source's own columns. Raises InvalidInput if that is ambiguous."""
    own = [name for name in schema.names if name in FIELDS]
    others = [name for name in schema.names if name not in own]
    if own and others:
        raise InvalidInput(
            f"{own[0]!r} is a column of the source, and {others[0]!r} a field of messages. Write "
            f"{PARSED_PREFIX}{own[0]} for the source's, or set the option parse=json if messages have {own[0]!r} too",
            field="schema",
        )
    return not others


def _require_type(column: T.StructField, expected: T.StructField) -> None:
    if column.dataType != expected.dataType and not (expected.name == "value" and column.dataType == T.BinaryType()):
        raise InvalidInput(
            f"column {column.name!r} is {expected.dataType.simpleString()}, not {column.dataType.simpleString()}",
            field="schema",
        )


def nullable(kind: T.DataType) -> T.DataType:
    """Return a type whose parts are all nullable."""
    match kind:
        case T.StructType():
            return T.StructType([T.StructField(each.name, nullable(each.dataType), True) for each in kind.fields])
        case T.ArrayType():
            return T.ArrayType(nullable(kind.elementType), True)
        case T.MapType():
            return T.MapType(kind.keyType, nullable(kind.valueType), True)
    return kind


def required(column: T.StructField) -> T.StructField:
    """Return a nullable column for Spark. If the given column is NOT NULL, messages with nulls in it are misfits."""
    return T.StructField(column.name, column.dataType, True, None if column.nullable else {_REQUIRED: True})


class BatchBuilder:
    """Builds Arrow batches with a layout's schema from messages."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._schema: Any = arrow_schema(layout.schema)
        self._parser = parser_of(layout.framing, layout.message, layout.zone)
        self._head_bytes = 0
        if isinstance(layout.framing, JsonLines) and not set(layout.framing.path[:1]) & set(layout.message.names):
            self._head_bytes = layout.framing.head_bytes
        self.misfits: Mask = np.zeros(0, dtype=np.bool_)
        """The mask of misfits among the lines that were built last, for reads with `Misfits.KEPT`."""

    def build(self, lines: Lines, pieces: Int64s | None = None) -> Iterator[Any]:
        """Yield record batches of lines. With `pieces`, lines are all messages, or all summaries.

        Raises CorruptMessage.
        """
        if not len(lines):
            return
        is_summary = pieces is not None and bool((pieces == SUMMARY_PIECE).any())
        misfits: Mask = np.zeros(len(lines), dtype=np.bool_)
        if is_summary:
            parsed = {name: pa.nulls(len(lines), self._schema.field(name).type) for name in self._layout.message.names}
        else:
            parsed, misfits = self._parsed(lines)
        own: dict[str, Callable[[Any], Any]] = {
            "journal": lambda kind: _journals(lines, kind),
            "offset": lambda kind: pa.array(lines.begins, kind),
            "next_offset": lambda kind: pa.array(lines.ends, kind),
            "producer": lambda kind: producer_ids(lines.producers),
            "clock": lambda kind: pa.array(lines.clocks.view(np.int64), kind),
            "flags": lambda kind: pa.array(lines.flags.astype(np.int32), kind),
            COMMIT_OFFSET: lambda kind: pa.array(lines.commits, kind),
            "value": lambda kind: lines.values if kind == pa.binary() else as_text(lines),
            PIECE.name: lambda kind: pa.array(pieces, kind),
            LINE.name: lambda kind: _where(lines.values, misfits),
            SUMMARY.name: lambda kind: as_text(lines) if is_summary else pa.nulls(len(lines), kind),
        }
        arrays = [
            parsed[field.name] if field.name in parsed else own[self._layout.own[field.name]](field.type)
            for field in self._schema
        ]
        whole = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        for start in range(0, len(lines), ROWS_PER_BATCH):
            yield whole.slice(start, ROWS_PER_BATCH)

    def _parsed(self, lines: Lines) -> tuple[dict[str, Any], Mask]:
        """Return the columns with messages' fields and with the lines of misfits, and the mask of misfits."""
        layout = self._layout
        columns: dict[str, Any] = {}
        misfits: Mask = np.zeros(len(lines), dtype=np.bool_)
        if layout.message.fields or layout.misfits is Misfits.KEPT:
            content = lines.content
            if lines.headed is not None and self._head_bytes:  # Leave out fields that contain only the UUID.
                content = without_heads(content, lines.headed, self._head_bytes)
            table, misfits = self._parser.parse(content)
            columns = {name: table.column(name).combine_chunks() for name in layout.message.names}
        if lines.unreadable is not None:
            columns = {name: _where(column, ~lines.unreadable) for name, column in columns.items()}
            misfits |= lines.unreadable
        for each in layout.message.fields:
            if each.metadata.get(_REQUIRED):
                misfits = misfits | columns[each.name].is_null().to_numpy(zero_copy_only=False)
        if layout.misfits is Misfits.FAILFAST and misfits.any():
            wanted = ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in layout.message.fields)
            row = int(np.argmax(misfits))
            begin = int(lines.begins[row])
            raise CorruptMessage(lines.journal_of(row), begin, f"its value does not fit {wanted}")
        if layout.misfits is Misfits.KEPT:
            self.misfits = misfits
        if layout.text:
            columns[layout.text] = self._texts(lines, layout.text, misfits)
        return columns, misfits

    def _texts(self, lines: Lines, column: str, wanted: Mask) -> Any:
        """Return the text of each message in the mask `wanted`, and null for other messages."""
        kind = self._schema.field(column).type
        if not wanted.any():
            return pa.nulls(len(lines), kind)
        rows = np.flatnonzero(wanted)
        found = [lines.content[row].as_py()[:-1] for row in rows.tolist()]
        texts = pa.array(found if kind == pa.binary() else [each.decode(errors="replace") for each in found], kind)
        place = np.zeros(len(lines), dtype=np.int64)
        place[rows] = np.arange(len(rows))
        return texts.take(pa.array(place, mask=~wanted))


def _journals(lines: Lines, kind: Any) -> Any:
    if lines.journals is None:
        return pa.repeat(pa.scalar(lines.journal, kind), len(lines))
    return lines.journals.cast(kind)


def producer_ids(producers: UInt64s) -> Any:
    """Return producer ids as an Arrow binary array of six bytes each."""
    data = np.ascontiguousarray(producers.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 2:])
    borders = np.arange(0, 6 * len(producers) + 1, 6, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(producers), [None, pa.py_buffer(borders), pa.py_buffer(data)])


def _where(values: Any, mask: Mask) -> Any:
    """Return the values where `mask` is set, and nulls elsewhere."""
    nothing = pa.nulls(len(mask), values.type)
    return pc.if_else(pa.array(mask), values, nothing) if mask.any() else nothing


def as_text(lines: Lines) -> Any:
    """Return lines as an Arrow string array. Raises CorruptMessage for a line that is not UTF-8."""
    try:
        return lines.values.cast(pa.string())
    except pa.ArrowInvalid:
        for row, (begin, value) in enumerate(zip(lines.begins.tolist(), lines.values, strict=True)):
            try:
                value.as_py().decode()
            except UnicodeDecodeError as error:
                raise CorruptMessage(lines.journal_of(row), begin, f"not UTF-8: {error}") from error
        raise
