"""Hints of dlt become fields, and load files become rows. These tests do not need dlt."""

from __future__ import annotations

import datetime as dt
import gzip
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coranto.destinations.columns import fields_of, rows_of
from coranto.errors import InvalidInput
from coranto.types.kinds import format_fields

COLUMNS = {
    "id": {"data_type": "bigint", "nullable": False},
    "name": {"data_type": "text"},
    "price": {"data_type": "decimal"},
    "tax": {"data_type": "decimal", "precision": 10, "scale": 2},
    "whole": {"data_type": "decimal", "precision": 12, "scale": 0},
    "at": {"data_type": "timestamp"},
    "local": {"data_type": "timestamp", "timezone": False},
    "day": {"data_type": "date"},
    "hour": {"data_type": "time"},
    "raw": {"data_type": "binary"},
    "tags": {"data_type": "json"},
    "large": {"data_type": "wei"},
    "ratio": {"data_type": "double"},
    "ok": {"data_type": "bool"},
    "unknown_yet": {},
}


def test_each_type_of_dlt_has_a_type_of_coranto() -> None:
    assert format_fields(fields_of(COLUMNS, "_dlt_load_id")) == (
        "id BIGINT NOT NULL, name STRING, price DECIMAL(38, 9), tax DECIMAL(10, 2), whole DECIMAL(12, 0), "
        "at TIMESTAMP, local TIMESTAMP_NTZ, day DATE, hour STRING, raw STRING, tags STRING, large STRING, "
        "ratio DOUBLE, ok BOOLEAN, _dlt_load_id STRING NOT NULL"
    )


def test_the_load_column_is_added_only_once_and_only_if_requested() -> None:
    mine = {"_dlt_load_id": {"data_type": "text"}}
    assert len(fields_of(mine, "_dlt_load_id")) == 1
    assert [field.name for field in fields_of({"n": {"data_type": "bigint"}}, "")] == ["n"]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"_meta": {"data_type": "text"}}, "_meta is the place of the messages' UUIDs: rename it"),
        ({"x": {"data_type": "geography"}}, "column x is geography, which Coranto does not know: give it the hint"),
        ({"x": {"data_type": "decimal", "precision": 76, "scale": 3}}, "give a precision from 1 to 38"),
    ],
)
def test_columns_without_a_field_type_are_refused(columns: dict[str, dict[str, object]], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        fields_of(columns, "")


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_read_from_json_lines(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("t.1.0.jsonl" + ".gz" * packed)
    lines = [{"id": 1, "tags": {"a": [1, "é"]}}, {"id": 2, "tags": None}, {"id": 3, "tags": "text"}, {"id": 4}]
    content = "".join(json.dumps(each) + "\n" for each in lines).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    assert list(rows_of(path, COLUMNS)) == [
        {"id": 1, "tags": '{"a":[1,"é"]}'},
        {"id": 2, "tags": None},
        {"id": 3, "tags": '"text"'},
        {"id": 4},
    ]


def test_a_broken_line_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "t.1.0.jsonl"
    path.write_text('{"id": 1}\n[2]\n')
    with pytest.raises(InvalidInput, match=r"line 2 of t\.1\.0\.jsonl is not a JSON object"):
        list(rows_of(path, {}))


def test_rows_are_read_from_parquet(tmp_path: Path) -> None:
    path = tmp_path / "t.1.0.parquet"
    table = pa.table(
        {
            "price": [Decimal("1.50"), None],
            "at": [dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC), None],
            "day": [dt.date(2026, 1, 2), None],
            "hour": pa.array([dt.time(12, 30), None], pa.time64("us")),
            "raw": [b"ab", None],
            "nested": [[{"n": 1}], None],
            "tags": ['{"a":1}', None],
        }
    )
    pq.write_table(table, path)
    assert list(rows_of(path, {"tags": {"data_type": "json"}})) == [
        {
            "price": "1.50",
            "at": "2026-01-01T12:00:00Z",
            "day": "2026-01-02",
            "hour": "12:30:00",
            "raw": "YWI=",
            "nested": '[{"n":1}]',
            "tags": '{"a":1}',
        },
        dict.fromkeys(table.column_names),
    ]
