"""Fields for CSV and Parquet files, which the rows of `rows.py` fit."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import uuid

import pyarrow as pa
import pytest
from pyarrow import parquet

from coranto.errors import InvalidInput
from coranto.ingest.files.options import FileOptions
from coranto.ingest.files.rows import rows_of
from coranto.ingest.source import SourceRow
from coranto.types.kinds import format_fields
from coranto.types.writing import require_message

WIDE = pa.table(
    {
        "n": pa.array([None, 7], pa.uint64()),
        "u": pa.array([uuid.UUID(int=7).bytes] * 2, pa.uuid()),
        "raw": pa.array([b"\xff"] * 2),
        "at": pa.array([dt.datetime(2026, 3, 1, tzinfo=dt.UTC)] * 2, pa.timestamp("us", "UTC")),
        "nanos": pa.array([1, 2], pa.timestamp("ns")),
        "hour": pa.array([dt.time(12)] * 2, pa.time64("us")),
        "price": pa.array([decimal.Decimal("1.10")] * 2, pa.decimal128(9, 2)),
        "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32())),
        "inner": pa.array([{"raw": b"x", "list": [1.5]}] * 2),
        "word": pa.array(["a", "b"]).dictionary_encode(),
    },
    schema=None,
)


def test_parquet() -> None:
    file = io.BytesIO()
    parquet.write_table(WIDE, file)
    rows = rows_of(FileOptions("file:///", format="parquet"), "a", io.BytesIO(file.getvalue()), 0)
    assert format_fields(rows.fields()) == (
        "n DECIMAL(20, 0), u STRING, raw STRING, at TIMESTAMP, nanos STRING, hour STRING, price DECIMAL(9, 2), "
        "map MAP<STRING, INT>, inner STRUCT<raw: STRING, list: ARRAY<DOUBLE>>, word STRING"
    )
    found, _, _ = rows.read(1 << 20)
    for row in found:
        assert isinstance(row, SourceRow)
        require_message(row.fields, rows.fields())
    assert isinstance(found[0], SourceRow)
    assert (found[0].fields["map"], found[0].fields["u"]) == ({"a": 1}, str(uuid.UUID(int=7)))


def test_csv() -> None:
    types = {"n": "integer", "x": "number", "ok": "boolean"}
    rows = rows_of(FileOptions("file:///", format="csv", columns=types), "a", io.BytesIO(b"t,n,x,ok\na,1,,true\n"), 0)
    assert format_fields(rows.fields()) == "t STRING, n BIGINT, x DOUBLE, ok BOOLEAN"
    [row], _, _ = rows.read(100)
    assert isinstance(row, SourceRow)
    require_message(row.fields, rows.fields())


def test_rows_without_a_fixed_form_have_no_fields() -> None:
    options = FileOptions("file:///", format="csv", columns={"t": "json"})
    with pytest.raises(InvalidInput, match="column t is json, which has no fixed form"):
        rows_of(options, "a", io.BytesIO(b"t\n1\n"), 0).fields()
    with pytest.raises(InvalidInput, match="its rows have no schema"):
        rows_of(FileOptions("file:///"), "a", io.BytesIO(b"{}\n"), 0).fields()
