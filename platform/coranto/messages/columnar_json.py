"""Rows of Arrow tables as JSON messages with UUIDs, by whole columns.

Null fields are omitted, and null elements of lists and maps are kept. Binary values are base64, times with a zone are
in UTC, and NaN and infinities are strings. Types without a JSON form are rejected before anything is written. Needs
pyarrow (the `consumers` extra).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coranto.errors import InvalidInput
from coranto.messages.arrow_values import data_of, joined, value_offsets
from coranto.messages.columnar import UInt64s
from coranto.messages.columnar_stamps import uuid_texts
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId

BATCH_ROWS: Final = 1 << 15
"""The number of rows that are encoded together: their texts fit into the CPU cache."""
BATCH_BYTES: Final = 1 << 25
"""The approximate maximum of Arrow bytes encoded together, unless one row has more: an array holds 2 GiB of lines."""
_WHOLE_DOUBLE: Final = 10**10 - 1
_WHOLE_FLOAT: Final = 1 << 24
"""Up to these limits, whole floats are formatted with the digits of the integer, without an exponent."""
_SPECIAL: Final = r'["\\\x00-\x1f]'


def table_of(data: Any) -> pa.Table:
    """Return the Arrow table of a table, a record batch, a DataFrame of pandas or Polars, or another Arrow stream.

    The index of a pandas DataFrame is dropped. Raises InvalidInput for other types, and for columns without a JSON
    form.
    """
    if type(data).__module__.partition(".")[0] == "pandas":
        table = pa.Table.from_pandas(data, preserve_index=False)
    elif isinstance(data, pa.Table):
        table = data
    elif hasattr(data, "__arrow_c_stream__"):
        table = pa.table(data)
    elif isinstance(data, pa.RecordBatch):
        table = pa.Table.from_batches([data])
    else:
        raise InvalidInput(f"a table must be an Arrow table or a DataFrame, not {type(data).__name__}", field="table")
    names = table.schema.names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInput(f"the table has two columns {repeated[0]!r}; rename one", field="table")
    for each in table.schema:
        _require_encodable(each.type, each.name)
    return table


def parts_of(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in parts to be stamped one after the other."""
    for batch in table.combine_chunks().to_batches(max_chunksize=BATCH_ROWS):
        rows = max(batch.num_rows * BATCH_BYTES // max(batch.nbytes, BATCH_BYTES), 1)
        for begin in range(0, batch.num_rows, rows):
            yield batch.slice(begin, rows)


def stamped_rows(
    batch: pa.RecordBatch, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags
) -> Any:
    """Return an Arrow binary array with the line of each row.

    Their clocks are `first_clock` and the following ones, CLOCK_TICK apart. The columns come from `table_of`.
    Raises InvalidInput if lines have no place for UUIDs, a column has that name, or all lines together are larger than
    an Arrow array may be (2 GiB).
    """
    return stamped_columns(batch.schema.names, batch.columns, batch.num_rows, framing, producer, first_clock, flags)


def stamped_columns(
    names: Sequence[str],
    columns: Sequence[Any],
    rows: int,
    framing: JsonLines,
    producer: ProducerId,
    first_clock: int,
    flags: Flags,
) -> Any:
    """Return the lines of rows that are given as columns, like `stamped_rows`."""
    if not framing.path:
        raise InvalidInput("lines without a place for UUIDs cannot be stamped; give the framing a pointer")
    if framing.path[0] in names:
        raise InvalidInput(
            f"column {framing.path[0]!r} is the place of UUIDs ({framing.pointer}); rename it, or give the framing "
            "another pointer",
            field="table",
        )
    clocks: UInt64s = np.uint64(first_clock) + np.arange(rows, dtype=np.uint64) * np.uint64(CLOCK_TICK)
    close = framing.acknowledgement("")[len(framing.uuid_prefix) : -2]  # Without the object's end and the newline.
    pieces: list[Any] = [uuid_texts(producer, clocks, flags, before=framing.uuid_prefix, after=close)]
    try:
        for name, column in zip(names, columns, strict=True):
            pieces += _named(f",{json.dumps(name, ensure_ascii=False)}:".encode(), column)
        return _joined([*pieces, b"}\n"])
    except pa.ArrowException as error:
        raise InvalidInput(
            f"{rows} rows cannot be written as JSON: {error}; give smaller rows", field="table"
        ) from error


def line_pieces(lines: Any, max_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of an Arrow binary array of lines, in pieces of whole lines with at most `max_bytes`.

    A longer line is a piece of its own.
    """
    ends, data = value_offsets(lines), data_of(lines)
    row = 0
    while row < len(lines):
        begin = int(ends[row])
        row = max(int(np.searchsorted(ends, begin + max_bytes, side="right")) - 1, row + 1)
        yield data[begin : ends[row]].tobytes()


def _named(name: bytes, column: Any) -> list[Any]:
    """Return the pieces of a field: constants, and columns without nulls."""
    if column.null_count:
        return [pc.fill_null(_joined([name, *_value(column)]), b"")]
    return [name, *_value(column)]


def _value(column: Any) -> list[Any]:
    """Return the pieces of values; null for null values."""
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return _value(column.cast(kind.value_type))
    if types.is_null(kind):
        return [pa.nulls(len(column), pa.binary())]
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return _quoted(column.cast(pa.string()))
    if types.is_floating(kind):
        return _fractions(column.cast(pa.float64()) if types.is_float16(kind) else column)
    if types.is_timestamp(kind) or types.is_date(kind):
        if types.is_timestamp(kind) and kind.tz is not None:
            column = column.cast(pa.timestamp(kind.unit, "UTC"))
        texts = pc.replace_substring(column.cast(pa.string()), " ", "T", max_replacements=1)
        return [b'"', texts.cast(pa.binary()), b'"']
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        found = [None if value is None else base64.b64encode(value) for value in column.to_pylist()]
        return [b'"', pa.array(found, pa.binary()), b'"']
    if types.is_struct(kind):
        return [_objects(column)]
    if types.is_map(kind):
        keys = _within(column, column.keys).cast(pa.string())
        fields = _joined([*_quoted(keys), b":", *_elements(_within(column, column.items))])
        return [_in_brackets(b"{", column, fields, b"}")]
    if types.is_list(kind):
        return [_in_brackets(b"[", column, _joined(_elements(_within(column, column.values))), b"]")]
    return [column.cast(pa.string()).cast(pa.binary())]


def _elements(values: Any) -> list[Any]:
    return [pc.fill_null(_joined(_value(values)), b"null")]


def object_texts(names: Sequence[str], columns: Sequence[Any], rows: int) -> Any:
    """Return an Arrow binary array with a JSON object for each row of columns. Their types come from `table_of`."""
    pieces: list[Any] = []
    for name, column in zip(names, columns, strict=True):
        pieces += _named(f",{json.dumps(name, ensure_ascii=False)}:".encode(), column)
    if not pieces:
        return pa.repeat(pa.scalar(b"{}"), rows)
    inner = pc.binary_replace_slice(_joined(pieces), 0, 1, b"")  # The first name has no comma before it.
    return _joined([b"{", inner, b"}"])


def _objects(column: Any) -> Any:
    """Return the texts of structs."""
    texts = object_texts([each.name for each in column.type], column.flatten(), len(column))
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.binary()))


def _in_brackets(opening: bytes, column: Any, elements: Any, closing: bytes) -> Any:
    """Return the texts of lists (or maps), from their elements' texts in one array."""
    offsets = value_offsets(column)
    lists = pa.ListArray.from_arrays(pa.array(offsets - offsets[0]), elements)
    texts = _joined([opening, pc.binary_join(lists, b","), closing])
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.binary()))


def _within(column: Any, values: Any) -> Any:
    """Return the values in lists (or maps) of a column, without Arrow's values outside the selected rows."""
    offsets = value_offsets(column)
    return values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def _fractions(column: Any) -> list[Any]:
    """Return the pieces of floats: always with a fraction; NaN and infinities as strings."""
    if (numbers := _whole(column)) is not None:
        return [numbers.cast(pa.string()).cast(pa.binary()), b".0"]
    texts = column.cast(pa.string())
    whole = pc.fill_null(pc.equal(column, pc.trunc(column)), False)
    if pc.any(whole).as_py():
        ended = pc.replace_substring_regex(texts.filter(whole), r"^(-?\d+)$", r"\1.0")
        texts = pc.replace_with_mask(texts, whole, ended)
    finite = pc.is_finite(column)
    if pc.all(finite).as_py() is False:
        words = pc.case_when(
            pc.make_struct(pc.is_nan(column), pc.greater(column, 0)), '"NaN"', '"Infinity"', '"-Infinity"'
        )
        texts = pc.if_else(finite, texts, words)
    return [texts.cast(pa.binary())]


def _whole(column: Any) -> Any:
    """Return floats as integers if all are whole and formatted with the integers' digits; otherwise None."""
    most = _WHOLE_DOUBLE if pa.types.is_float64(column.type) else _WHOLE_FLOAT
    try:
        numbers = column.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    least, greatest = pc.min_max(numbers).as_py().values()
    if least is None or least < -most or greatest > most:
        return None
    if least <= 0 <= greatest and pc.any(pc.equal(pc.divide(1.0, column), -math.inf)).as_py():
        return None  # Integers have no -0.
    return numbers


def _quoted(column: Any) -> list[Any]:
    """Return the pieces of texts in quotes."""
    if not _has_special(column):
        return [b'"', column.cast(pa.binary()), b'"']
    special = pc.fill_null(pc.match_substring_regex(column, _SPECIAL), False)
    texts = _joined([b'"', column.cast(pa.binary()), b'"'])
    escaped = [json.dumps(text, ensure_ascii=False).encode() for text in column.filter(special).to_pylist()]
    return [pc.replace_with_mask(texts, special, pa.array(escaped, pa.binary()))]


def _has_special(column: Any) -> bool:
    """Return True if a text may have a character that JSON escapes."""
    characters = joined(column)
    return bool(((characters < 0x20) | (characters == ord('"')) | (characters == ord("\\"))).any())


def _joined(pieces: Sequence[Any]) -> Any:
    """Concatenate pieces row by row; null where a piece is null. At least one piece must be a column."""
    merged: list[Any] = []
    for piece in pieces:
        if isinstance(piece, bytes) and merged and isinstance(merged[-1], bytes):
            merged[-1] += piece
        else:
            merged.append(piece)
    values = [pa.scalar(piece, pa.binary()) if isinstance(piece, bytes) else piece for piece in merged]
    return pc.binary_join_element_wise(*values, pa.scalar(b"", pa.binary()))


def _require_encodable(kind: Any, place: str) -> None:
    """Raise InvalidInput, naming `place`, for a type that JSON cannot express."""
    types = pa.types
    if types.is_dictionary(kind):
        _require_encodable(kind.value_type, place)
    elif types.is_struct(kind):
        for each in kind:
            _require_encodable(each.type, f"{place}.{each.name}")
    elif types.is_map(kind):
        if not types.is_string(kind.key_type):
            raise InvalidInput(f"{place} is {kind}, and names in JSON are texts: cast its keys", field="table")
        _require_encodable(kind.item_type, f"{place}{{}}")
    elif types.is_list(kind):
        _require_encodable(kind.value_type, f"{place}[]")
    elif not any(
        check(kind)
        for check in (
            *(types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal128),
            *(types.is_string, types.is_large_string, types.is_string_view, types.is_date, types.is_timestamp),
            *(types.is_binary, types.is_large_binary, types.is_fixed_size_binary),
        )
    ):
        raise InvalidInput(f"{place} is {kind}, which JSON cannot express: cast it", field="table")
