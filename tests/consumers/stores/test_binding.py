"""Values of rows, bound by the types of their columns (`test_row_paths.py` writes them to databases)."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from sqlalchemy import JSON, Column, DateTime, Enum, Integer, MetaData, Table, Text, TypeDecorator
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import Null

from coranto.errors import RejectedRow
from coranto_consumers.stores.binding import (
    bound_rows,
    can_bind,
    is_plain,
    replace_row_surrogates,
    replace_surrogates,
    require_times,
    rows_of,
)

POSTGRESQL, SQLITE = postgresql.psycopg.dialect(), sqlite.dialect()


class Sealed(TypeDecorator):
    impl = Text
    cache_ok = True

    def process_bind_param(self, value, dialect):
        return f"sealed:{value}"


TABLE = Table(
    "bound",
    MetaData(),
    Column("sealed", Sealed),
    Column("document", JSON),
    Column("choice", Enum("a", "b", name="letters", validate_strings=True)),
    Column("n", Integer),
    Column("at", DateTime),
    Column("text", Text),
)


def test_only_types_that_change_values_bind_them():
    columns = [TABLE.c.sealed, TABLE.c.n]
    assert list(bound_rows([{"sealed": "x", "n": 1, "more": 2}], columns, POSTGRESQL)) == [("sealed:x", 1)]
    assert [name for name, column in TABLE.c.items() if is_plain(column, POSTGRESQL)] == ["n", "at", "text"]
    with pytest.raises(
        RejectedRow, match=r"table bound: column 'choice' does not take a value: .*LookupError"
    ) as caught:
        list(bound_rows([{"choice": "SECRET"}], [TABLE.c.choice], POSTGRESQL))
    assert caught.value.__suppress_context__


def test_only_equivalent_kinds_are_copied():
    assert can_bind(pa.string(), TABLE.c.sealed, POSTGRESQL)
    assert can_bind(pa.map_(pa.string(), pa.int64()), TABLE.c.document, POSTGRESQL)
    assert not can_bind(pa.float64(), TABLE.c.n, POSTGRESQL), "INSERT rounds"
    assert not can_bind(pa.int64(), TABLE.c.text, POSTGRESQL)


def test_nested_values_become_json_values():
    kind = pa.struct(
        [("m", pa.map_(pa.int64(), pa.decimal128(5, 2))), ("d", pa.date32()), ("b", pa.list_(pa.binary()))]
    )
    values = [{"m": [(1, Decimal("0.10"))], "d": dt.date(2024, 2, 29), "b": [b"\xff", None]}, None]
    [first, second] = rows_of(pa.record_batch([pa.array(values, kind)], names=["document"]), TABLE, SQLITE)
    assert first == {"document": {"m": {"1": "0.10"}, "d": "2024-02-29", "b": ["/w==", None]}}
    assert isinstance(second["document"], Null), "not a JSON null"


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_only_times_that_python_supports_are_accepted(unit):
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    first, last = -62_135_596_800 * per_second, 253_402_300_800 * per_second - 1
    inside = [0] if unit == "ns" else [first, last]

    def batch(*values):
        return pa.record_batch([pa.array(values, pa.int64()).cast(pa.timestamp(unit))], names=["at"])

    require_times(batch(*inside, None), TABLE)
    require_times(batch(None), TABLE)
    for value in () if unit == "ns" else (first - 1, last + 1):
        with pytest.raises(RejectedRow, match="column 'at' has a time outside of the years 1 to 9999"):
            require_times(batch(0, value), TABLE)


def test_unpaired_surrogates_become_question_marks_on_every_level():
    row = {"a": "x", "b": 1}
    assert replace_row_surrogates(row) is row
    assert replace_row_surrogates({"a": "\ud83d", "b": {"\ude00": ["😀", ("\ud83dx",)]}}) == {
        "a": "?",
        "b": {"?": ["😀", ("?x",)]},
    }
    assert replace_surrogates(("a", 1, None)) == ("a", 1, None)
