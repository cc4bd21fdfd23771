"""Column-wise parsing of plain CSV rows.

It handles rows whose fields are all empty or of a plain form. `parsers.py` parses the other rows one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from pyspark.sql.types import BooleanType, DataType, DoubleType, StringType

from coranto.messages.column_parser import is_text
from coranto.messages.columnar import Mask

_PLAIN_INTEGER: Final = "^[+-]?[0-9]{1,18}$"
"""Integers as the row-wise parser accepts them, but with few enough digits to fit an int64."""
_PLAIN_NUMBER: Final = r"^[+-]?(?:[0-9]{1,100}(?:\.[0-9]{0,100})?|\.[0-9]{1,100})$"
"""Numbers as the row-wise parser accepts them, but neither infinite nor smaller than any double."""
_PARSE: Final = pa_csv.ParseOptions(
    quote_char=False, double_quote=False, escape_char=False, newlines_in_values=False, ignore_empty_lines=False
)
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_SPECIAL: Final = (b'"', b"\r", b"\0")


def text_columns(content: Any, width: int, left_out: int | None) -> list[Any] | None:
    """Return the texts of rows as Arrow columns, without column number `left_out`. None for rows that are not plain.

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
    """Return texts as arrays of Spark's `kinds`, in Arrow's `types`, and the mask of rows that are left to parse."""
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
