"""Rows encoded and stamped in one pass equal texts that are stamped afterwards."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField

from coranto.errors import InvalidInput
from coranto.messages.columnar_json import object_texts
from coranto.messages.columnar_stamps import stamped_lines
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, new_producer_id
from coranto_consumers.spark.sink.message_rows import ColumnRows, ObjectTextRows, Rows

FRAMING = JsonLines()
PRODUCER = new_producer_id(lambda count: b"\x05" * count)
CLOCK = 0x1EE_0000_0000_0010
INNER = pa.struct([("p", pa.int32()), ("q", pa.string())])
SCHEMA = pa.schema(
    [
        ("whole", pa.float64()),
        ("single", pa.float32()),
        ("long", pa.int64()),
        ("te\"xt'é", pa.string()),
        ("amount", pa.decimal128(38, 3)),
        ("list", pa.list_(pa.float64())),
        ("inner", INNER),
    ]
)
EDGES = st.sampled_from([0.0, -0.0, 1e10 - 1, 1e10, -(1e10 - 1), -1e10, 1e16, 2.0**24, 2.0**24 + 2, math.nan, math.inf])
WHOLE = st.integers(-(10**10), 10**10).map(float)
DOUBLES = st.lists(st.none() | WHOLE, max_size=6) | st.lists(st.none() | WHOLE | EDGES | st.floats(), max_size=6)
SINGLES = st.none() | st.integers(-(2**25), 2**25).map(float) | st.floats(width=32)
ROW = st.fixed_dictionaries(
    {
        "single": SINGLES,
        "long": st.none() | st.integers(-(2**63), 2**63 - 1),
        "te\"xt'é": st.none() | st.text(st.characters(codec="utf-8"), max_size=5),
        "amount": st.none() | st.integers(-(10**30), 10**30).map(lambda number: Decimal(number).scaleb(-3)),
        "list": st.none() | st.lists(st.none() | WHOLE | EDGES, max_size=3),
        "inner": st.none()
        | st.fixed_dictionaries({"p": st.none() | st.integers(-5, 5), "q": st.none() | st.just("q")}),
    }
)


def fields_of(schema: pa.Schema) -> list[StructField]:
    return [StructField(field.name, from_arrow_type(field.type)) for field in schema]


def lines(rows: Rows, framing: JsonLines = FRAMING) -> list[bytes]:
    found: list[bytes] = rows.lines(framing, PRODUCER, CLOCK, Flags.CONTINUE_TXN).to_pylist()
    return found


@given(DOUBLES, st.data())
@example([0.0, -0.0], None)
@example([1e10 - 1, None], None)
@example([1e10, 3.0], None)
def test_columns_become_the_lines_of_their_texts(doubles: list[float | None], data: st.DataObject | None) -> None:
    rows: list[dict[str, Any]] = [{} if data is None else data.draw(ROW) for _ in doubles]
    table = pa.RecordBatch.from_pylist(
        [each | {"whole": double} for each, double in zip(rows, doubles, strict=True)], SCHEMA
    )
    fields = fields_of(SCHEMA)
    columns = ColumnRows.of(fields, table.columns, len(doubles))
    texts = object_texts(SCHEMA.names, table.columns, len(doubles)).cast(pa.string())
    slow = stamped_lines(texts, FRAMING, PRODUCER, CLOCK, Flags.CONTINUE_TXN)
    assert len(columns) == len(ObjectTextRows(texts)) == len(doubles)
    assert lines(columns) == slow.to_pylist() == lines(ObjectTextRows(texts))
    for line, double in zip(lines(columns), doubles, strict=True):
        value = json.loads(line).get("whole")
        if double is None or (math.isfinite(double)):
            assert value == double
            assert double is None or (isinstance(value, float) and math.copysign(1, value) == math.copysign(1, double))


def test_rows_selected_by_index_are_complete() -> None:
    table = pa.RecordBatch.from_pylist([{"whole": float(number), "long": number} for number in range(10)], SCHEMA)
    fields = fields_of(SCHEMA)
    order = np.array([7, 0, 3], dtype=np.int64)
    structs = pa.StructArray.from_arrays(table.columns, fields=list(SCHEMA))
    for rows in (
        ColumnRows.of(fields, [pa.chunked_array([each.slice(0, 4), each.slice(4)]) for each in table.columns], 10),
        ColumnRows.of_structs(fields, structs),
        ObjectTextRows(object_texts(SCHEMA.names, table.columns, 10).cast(pa.string())),
    ):
        taken = rows.take(order)
        assert len(taken) == 3
        assert [json.loads(line)["long"] for line in lines(taken)] == [7, 0, 3]


def test_the_uuid_goes_into_the_column_of_its_name() -> None:
    schema = pa.schema([("_meta", pa.struct([("source", pa.string())])), ("n", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"_meta": {"source": "x"}, "n": 1}], schema)
    (line,) = lines(ColumnRows.of(fields_of(schema), batch.columns, 1))
    found = json.loads(line)
    assert (found["_meta"]["source"], found["n"]) == ("x", 1)
    assert found["_meta"]["uuid"]


def test_rows_without_a_value_are_refused() -> None:
    with pytest.raises(InvalidInput, match="a row has no value"):
        ObjectTextRows(pa.array(["{}", None]))
    with pytest.raises(InvalidInput, match="a row has no value"):
        ColumnRows.of_structs(fields_of(pa.schema(list(INNER))), pa.array([{"p": 1}, None], INNER))
