"""Rows to publish as messages, without UUIDs yet: columns, or JSON objects as text. Their types, and their digest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol
from zlib import crc32

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.types import StructField

from coranto.errors import InvalidInput
from coranto.messages.arrow_values import data_of, value_offsets
from coranto.messages.columnar import Bytes, Int64s, UInt64s
from coranto.messages.columnar_json import object_texts, stamped_columns
from coranto.messages.columnar_stamps import stamped_lines
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, ProducerId

_TEXTS: Final = (T.StringType, T.CharType, T.VarcharType)
_ENCODABLE: Final = (
    *(T.BooleanType, T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.DecimalType, T.FloatType, T.DoubleType),
    *(*_TEXTS, T.DateType, T.TimestampType, T.TimestampNTZType, T.BinaryType, T.ArrayType, T.MapType, T.NullType),
)


def require_encodable(kind: T.DataType, place: str) -> None:
    """Raise InvalidInput, with `place`, for a type whose values JSON messages cannot preserve."""
    require_text_keys(kind, place, field="schema")
    for where, part in _parts(kind, place):
        if isinstance(part, T.StructType):
            if repeated := sorted({name for name in part.names if part.names.count(name) > 1}):
                raise InvalidInput(f"{where or 'the row'} has two fields {repeated[0]!r}; rename one", field="schema")
        elif not isinstance(part, _ENCODABLE):
            raise InvalidInput(
                f"{where} is {part.simpleString()}, which JSON cannot express: cast it, or write texts of to_json",
                field="schema",
            )


def require_text_keys(kind: T.DataType, place: str, *, field: str) -> None:
    """Raise InvalidInput for `field`, with `place`, if a map at any level has keys that are not strings."""
    for where, part in _parts(kind, place):
        if isinstance(part, T.MapType) and not isinstance(part.keyType, _TEXTS):
            raise InvalidInput(
                f"{where} is {part.simpleString()}, and names in JSON are texts: cast its keys to STRING, or write "
                "its entries as an array of structs (map_entries)",
                field=field,
            )


def is_encodable(kind: T.DataType) -> bool:
    """Return True if `require_encodable` accepts a type."""
    try:
        require_encodable(kind, "value")
    except InvalidInput:
        return False
    return True


def _parts(kind: T.DataType, place: str) -> Iterator[tuple[str, T.DataType]]:
    """Yield a type and all types nested in it, each with its place."""
    yield place, kind
    match kind:
        case T.StructType():
            for field in kind.fields:
                yield from _parts(field.dataType, f"{place}.{field.name}" if place else field.name)
        case T.ArrayType():
            yield from _parts(kind.elementType, f"{place}[]")
        case T.MapType():
            yield from _parts(kind.valueType, f"{place}{{}}")


class Rows(Protocol):
    """The rows of one batch. Each row is a message."""

    def __len__(self) -> int: ...

    def take(self, rows: Int64s) -> Rows: ...

    def lines(self, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags) -> Any:
        """Return an Arrow binary array with the line of each row (see `stamped_lines`). Raises InvalidInput."""


@dataclass(frozen=True, slots=True)
class ObjectTextRows:
    """Rows that are JSON objects as text, in an Arrow array."""

    texts: Any

    def __post_init__(self) -> None:
        _require_values(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Int64s) -> ObjectTextRows:
        return ObjectTextRows(self.texts.take(pa.array(rows)))

    def lines(self, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags) -> Any:
        return stamped_lines(self.texts, framing, producer, first_clock, flags)


@dataclass(frozen=True, slots=True)
class ColumnRows:
    """Rows that are columns, of types that `require_encodable` accepts."""

    fields: tuple[StructField, ...]
    columns: tuple[Any, ...]
    count: int

    @classmethod
    def of_structs(cls, fields: Sequence[StructField], column: Any) -> ColumnRows:
        """Convert a column of structs to rows. Raises InvalidInput for a null."""
        _require_values(column)
        return cls.of(fields, [column.field(at) for at in range(len(fields))], len(column))

    @classmethod
    def of(cls, fields: Sequence[StructField], columns: Sequence[Any], count: int) -> ColumnRows:
        """Convert columns, which may be chunked, to rows."""
        whole = (each.combine_chunks() if isinstance(each, pa.ChunkedArray) else each for each in columns)
        return cls(tuple(fields), tuple(whole), count)

    def __len__(self) -> int:
        return self.count

    def take(self, rows: Int64s) -> ColumnRows:
        chosen = pa.array(rows)
        return ColumnRows(self.fields, tuple(column.take(chosen) for column in self.columns), len(rows))

    def lines(self, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags) -> Any:
        names = [field.name for field in self.fields]
        if framing.path and framing.path[0] in names:
            # The UUID is inserted into the value of this column.
            texts = object_texts(names, self.columns, self.count).cast(pa.string())
            return stamped_lines(texts, framing, producer, first_clock, flags)
        return stamped_columns(names, self.columns, self.count, framing, producer, first_clock, flags)


def _require_values(column: Any) -> None:
    if column.null_count:
        raise InvalidInput("a row has no value; filter such rows out", field="column value")


_UUID: Final = 36
_NODE: Final = 24
"""The index of the producer in the text of a UUID."""
_ALL: Final = 1 << 64


class RowDigest:
    """A digest of messages that does not depend on their order, nor on their division among tasks and batches.

    It identifies the content of a query's batch, because the batch's number alone does not. It is the sum of mixed
    checksums of the messages without their UUIDs, which differ in each attempt. It detects accidental differences, not
    malicious ones.
    """

    def __init__(self, messages: int = 0, total: int = 0) -> None:
        self.messages = messages
        self.total = total

    def add(self, lines: Any, framing: JsonLines, producer: ProducerId) -> None:
        """Add an Arrow binary array of lines with UUIDs of a producer."""
        if not len(lines):
            return
        ends, characters = value_offsets(lines).astype(np.int64), data_of(lines)
        behind = len(framing.uuid_prefix) + _UUID
        view, places = characters.data, ends.tolist()
        sums = [crc32(view[begin + behind : end]) for begin, end in pairwise(places)]
        for row in _with_inner_uuid(characters, ends[:-1] + behind, producer):
            uuid = re.compile(rb"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}" + producer.hex().encode())
            sums[row] = crc32(uuid.sub(b"", view[places[row] : places[row + 1]], count=1))
        self.messages += len(lines)
        self.total = (self.total + int(_mixed(np.array(sums, dtype=np.uint64)).sum())) % _ALL

    @classmethod
    def of(cls, parts: Iterable[RowDigest]) -> RowDigest:
        listed = list(parts)
        return cls(sum(each.messages for each in listed), sum(each.total for each in listed) % _ALL)

    def __str__(self) -> str:
        return f"{self.messages}-{self.total:016x}"


def _with_inner_uuid(content: Bytes, behind: Int64s, producer: ProducerId) -> list[int]:
    """Return the numbers of lines whose UUID is not at the beginning: their text already had the UUID's field."""
    node = np.frombuffer(producer.hex().encode(), dtype=np.uint8)
    places = (behind - (_UUID - _NODE))[:, None] + np.arange(len(node))
    return np.flatnonzero((content[np.minimum(places, len(content) - 1)] != node).any(axis=1)).tolist()


def _mixed(numbers: UInt64s) -> UInt64s:
    """Mix the bits of numbers (the finalizer of splitmix64), so that sums of different rows differ."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
