"""Fields as Arrow schemas, and tables that fit them or not."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given

from coranto.errors import InvalidInput
from coranto.types.arrow import arrow_schema, fields_of_arrow, require_table
from coranto.types.kinds import ArrayKind, MapKind, StructKind, TypeField, format_fields
from coranto.types.parsing import parse_fields
from tests.platform.types.strategies import FIELDS


def nullable(kind):
    match kind:
        case StructKind(fields):
            return StructKind(tuple(TypeField(each.name, nullable(each.kind)) for each in fields))
        case ArrayKind(element):
            return ArrayKind(nullable(element))
        case MapKind(key, value):
            return MapKind(key, nullable(value))
    return kind


@given(FIELDS)
def test_fields_round_trip_through_schemas_as_nullable_fields(fields):
    expected = tuple(TypeField(field.name, nullable(field.kind)) for field in fields)
    assert fields_of_arrow(arrow_schema(fields)) == expected


def test_other_types_of_arrow_become_fields_that_hold_their_values():
    schema = pa.schema(
        [
            pa.field("a", pa.large_string(), nullable=False),
            pa.field("b", pa.dictionary(pa.int32(), pa.string())),
            pa.field("c", pa.uint32()),
            pa.field("d", pa.timestamp("ms", "Europe/Paris")),
            pa.field("e", pa.large_list(pa.timestamp("s"))),
        ]
    )
    assert format_fields(fields_of_arrow(schema)) == (
        "a STRING NOT NULL, b STRING, c BIGINT, d TIMESTAMP, e ARRAY<TIMESTAMP_NTZ>"
    )


@pytest.mark.parametrize(
    "kind", [pa.uint64(), pa.timestamp("ns"), pa.time64("us"), pa.duration("s"), pa.decimal256(50, 2)]
)
def test_unsupported_arrow_types_are_refused(kind):
    with pytest.raises(InvalidInput, match=r"schema: a is .*, which fields of message types are not: cast it"):
        fields_of_arrow(pa.schema([("a", kind)]))


FIELD_TEXT = (
    "id BIGINT NOT NULL, lines ARRAY<STRUCT<item: STRING NOT NULL, n: INT>>, m MAP<STRING, STRUCT<x: INT NOT NULL>>"
)


def table(lines=(), m=(), ids=(1,), **more):
    fields = {
        "id": pa.array(ids, pa.int32()),
        "lines": pa.array([lines], pa.list_(pa.struct([("item", pa.string()), ("n", pa.int8())]))),
        "m": pa.array([m], pa.map_(pa.string(), pa.struct([("x", pa.int32())]))),
    }
    return pa.table({**fields, **more})


def test_tables_that_fit_are_accepted():
    fields = parse_fields(FIELD_TEXT)
    require_table(table([{"item": "a", "n": None}, None], [("k", {"x": 1}), ("l", None)]), fields)
    require_table(table(None, None), fields)
    require_table(table().drop_columns(["lines", "m"]), fields)


def dictionary(values):
    """Return a column of one row with the last value of a dictionary."""
    return pa.DictionaryArray.from_arrays(pa.array([len(values) - 1]), pa.array(values, pa.int64()))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda: table(ids=[None]), "id is NOT NULL, and a row has none"),
        (lambda: table().set_column(0, "id", dictionary([1, None])), "id is NOT NULL, and a row has none"),
        (lambda: table([{"item": None}]), r"lines\[\].item is NOT NULL, and a row has none"),
        (lambda: table(m=[("k", {"x": None})]), r"m\{\}.x is NOT NULL, and a row has none"),
        (lambda: table(z=[1]), "z is not a field of the type, which has id, lines, m: omit it"),
        (lambda: table().drop_columns(["id"]), "id is NOT NULL, and there is no such column"),
        (lambda: table().set_column(0, "id", pa.array(["x"])), "id is STRING, and its field BIGINT: cast it"),
    ],
)
def test_tables_that_do_not_fit_are_refused(given, problem):
    with pytest.raises(InvalidInput, match=problem):
        require_table(given(), parse_fields(FIELD_TEXT))
