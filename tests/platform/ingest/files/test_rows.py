"""Rows of files from any position: lines of JSON, CSV and Parquet."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from coranto.errors import InvalidInput, SourceChanged
from coranto.ingest.files import rows as module
from coranto.ingest.files.options import FileOptions
from coranto.ingest.files.rows import rows_of
from coranto.ingest.source import SourceRow

JSON = FileOptions("file:///in/")


def read(options: FileOptions, content: bytes, after: int = 0, max_bytes: int = 10) -> list[Any]:
    """Return the fields of rows, or place and problem of poison rows, followed by the position."""
    rows, found = rows_of(options, "a", io.BytesIO(content), after), list[Any]()
    while True:
        some, at, done = rows.read(max_bytes)
        found += [each.fields if isinstance(each, SourceRow) else (each.place, each.problem) for each in some]
        if done:
            return [*found, at]


def test_lines_of_json() -> None:
    content = b'\xef\xbb\xbf{"a":1}\r\n\n  \n{"a":2}\nnone\n{"a":3}'
    found = read(JSON, content)
    assert found[:2] == [{"a": 1}, {"a": 2}]
    assert found[2][0] == "offset 24"
    assert found[3:] == [{"a": 3}, len(content)]
    assert read(JSON, content, 29) == [{"a": 3}, len(content)]
    assert read(JSON, b"") == [0]


def test_reads_end_at_lines_and_every_position_continues() -> None:
    content = b"".join(b'{"a":%d}\n' % number for number in range(50))
    rows = rows_of(JSON, "a", io.BytesIO(content), 0)
    first, at, done = rows.read(30)
    assert (len(first), done) == (4, False)
    assert read(JSON, content, at)[0] == {"a": 4}
    row = first[1]
    assert isinstance(row, SourceRow)
    assert (row.key, row.meta) == ("a", b'"file":"a","position":8')


def test_a_line_without_an_end_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROW_BYTES", 10)
    found = read(JSON, b'{"a":1}\n{"a":"' + b"x" * 5000 + b'"}\n{"a":2}\n')
    assert found[:3] == [{"a": 1}, ("offset 8", "is longer than 10 bytes"), {"a": 2}]


CSV = FileOptions("file:///in/", format="csv", columns={"n": "integer", "x": "number", "b": "boolean", "j": "json"})


def test_csv() -> None:
    content = '\ufeffname,n,x,b,j\nada,1,1.5,TRUE,"[1,\n2]"\n"a,""b""",,,,\n\nlast,-2,1e3,false,null'.encode()
    expected = [
        {"name": "ada", "n": 1, "x": 1.5, "b": True, "j": [1, 2]},
        {"name": 'a,"b"', "n": None, "x": None, "b": None, "j": None},
        {"name": "last", "n": -2, "x": 1000.0, "b": False, "j": None},
    ]
    assert read(CSV, content) == [*expected, 3]
    assert read(CSV, content, 2) == [expected[2], 3]
    assert read(FileOptions("", format="csv"), b"") == [0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"a,1,1,true", "has 4 columns, and the header 5"),
        (b"a,1.5,1,true,1", "has '1.5' in column n, which is not a valid integer"),
        (b"a,1,inf,true,1", "has 'inf' in column x, which is not a valid number"),
        (b"a,1,1,yes,1", "has 'yes' in column b, which is not a valid boolean"),
        (b"a,1,1,true,{", "has '{' in column j, which is not a valid json"),
        (b"\xff,1,1,true,1", "is not UTF-8, in column name"),
        (b'"a"x,1,1,true,1', "is not CSV: ',' expected after '\"'"),
    ],
)
def test_invalid_csv_rows_are_poison_and_the_next_ones_are_read(line: bytes, problem: str) -> None:
    found = read(CSV, b"name,n,x,b,j\n" + line + b"\nnext,1,1,true,1\n")
    assert found[0] == ("row 0", problem)
    assert found[1]["name"] == "next"


def test_large_fields_are_read() -> None:
    found = read(FileOptions("", format="csv"), b"a,b\n" + b"x" * 300_000 + b",1\n")
    assert len(found[0]["a"]) == 300_000


@pytest.mark.parametrize("header", [b"a,a", b"a,,b"])
def test_headers_with_repeated_or_missing_names_are_refused(header: bytes) -> None:
    with pytest.raises(InvalidInput, match="names a column twice, or has one without a name"):
        read(FileOptions("", format="csv"), header + b"\n1,2,3\n")
    with pytest.raises(InvalidInput, match="a has no column n, whose type is given"):
        read(FileOptions("", format="csv", columns={"n": "integer"}), b"a,b\n1,2\n")


PARQUET = FileOptions("file:///in/", format="parquet")


def test_parquet() -> None:
    table = pa.table({"n": range(5000), "s": [f"s{number}" for number in range(5000)]})
    sink = io.BytesIO()
    parquet.write_table(table, sink, row_group_size=700)
    content = sink.getvalue()
    for after in (0, 1, 699, 700, 701, 4999, 5000):
        found = read(PARQUET, content, after)
        assert [each["n"] for each in found[:-1]] == list(range(after, 5000))
        assert found[-1] == 5000


def test_values_without_a_json_form_are_poison_and_invalid_parquet_is_an_error() -> None:
    sink = io.BytesIO()
    parquet.write_table(pa.table({"d": pa.array([1], pa.duration("s"))}), sink)
    [(place, problem), _] = read(PARQUET, sink.getvalue())
    assert (place, "timedelta" in problem) == ("row 0", True)
    with pytest.raises(InvalidInput, match="a is not a file of Parquet"):
        read(PARQUET, b"no parquet at all")
    damaged = bytearray(sink.getvalue())
    damaged[8:20] = b"\xff" * 12
    with pytest.raises(SourceChanged, match="cannot be read behind row 0"):
        read(PARQUET, bytes(damaged))
