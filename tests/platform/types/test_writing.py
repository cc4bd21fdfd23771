"""Messages and columns that fit a type's fields, and those that do not."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.types.parsing import parse_fields
from coranto.types.writing import require_columns, require_message
from tests.platform.types.strategies import FIELDS, JSON_FIELDS, json_messages


@given(FIELDS)
def test_columns_of_the_same_fields_fit(fields):
    require_columns(fields, fields)


@pytest.mark.parametrize(
    ("columns", "problems"),
    [
        ("id INT, s STRUCT<a: TINYINT>", []),
        ("id BIGINT", []),
        ("id STRING", ["id is STRING, and its field BIGINT: cast it"]),
        ("s STRUCT<a: INT>", ["id is NOT NULL, and there is no such column: add it"]),
        (
            "id BIGINT, s STRUCT<b: INT>, m MAP<STRING, STRING>",
            ["s.b is not a field of the type, which has a: ", "m{} is STRING, and its field INT"],
        ),
    ],
)
def test_each_column_that_does_not_fit_is_reported(columns, problems):
    fields = parse_fields("id BIGINT NOT NULL, s STRUCT<a: INT>, m MAP<STRING, INT>")
    if not problems:
        require_columns(parse_fields(columns), fields)
        return
    with pytest.raises(InvalidInput) as error:
        require_columns(parse_fields(columns), fields)
    assert len(str(error.value).split("; ")) == len(problems)
    for problem in problems:
        assert problem in str(error.value)


def test_a_duplicate_column_is_reported():
    """Arrow and Spark allow such tables."""
    [x] = parse_fields("x INT")
    with pytest.raises(InvalidInput, match=r"^columns: x occurs more than once: remove the duplicates$"):
        require_columns([x, x], [x])


FITTING = [
    ("BOOLEAN", True),
    ("TINYINT", -128),
    ("BIGINT", 2**63 - 1),
    ("FLOAT", 1),
    ("DOUBLE", 1.5),
    ("DOUBLE", "NaN"),
    ("STRING", ""),
    ("DECIMAL(5, 2)", 123.45),
    ("DECIMAL(5, 2)", 999),
    ("DECIMAL(5, 2)", Decimal("-0.10")),
    ("DECIMAL(5, 2)", "123.40"),
    ("DECIMAL(5, 2)", "1E+2"),
    ("DECIMAL(5, 2)", "0E-7"),
    ("DATE", "2024-02-29"),
    ("TIMESTAMP", "2024-02-29T12:00:00Z"),
    ("TIMESTAMP", "2024-02-29 12:00:00.123456+02:00"),
    ("TIMESTAMP_NTZ", "2024-02-29T12:00:00.5"),
    ("ARRAY<INT>", [1, None]),
    ("ARRAY<INT>", ()),
    ("MAP<STRING, INT>", {"a": 1, "b": None}),
    ("STRUCT<a: INT NOT NULL, b: STRING>", {"a": 1}),
    ("INT", None),
]
UNFIT = [
    ("BOOLEAN", 1),
    ("TINYINT", 128),
    ("BIGINT", 2**63),
    ("INT", True),
    ("INT", 1.0),
    ("INT", "1"),
    ("FLOAT", 1e39),
    ("DOUBLE", float("nan")),
    ("DOUBLE", float("inf")),
    ("DOUBLE", 10**400),
    ("DOUBLE", "1.5"),
    ("STRING", 1),
    ("STRING", b"x"),
    ("DECIMAL(5, 2)", 1234),
    ("DECIMAL(5, 2)", 0.001),
    ("DECIMAL(5, 2)", "1234.5"),
    ("DECIMAL(5, 2)", "1E+3"),
    ("DECIMAL(5, 2)", "x"),
    ("DECIMAL(5, 2)", float("inf")),
    ("DATE", "2023-02-29"),
    ("DATE", "2023-2-9"),
    ("DATE", "0000-01-01"),
    ("TIMESTAMP", "2024-02-29T12:00:00"),
    ("TIMESTAMP", "2024-02-30T12:00:00Z"),
    ("TIMESTAMP", 1700000000),
    ("TIMESTAMP_NTZ", "2024-02-29T12:00:00Z"),
    ("ARRAY<INT>", [1, "2"]),
    ("ARRAY<INT>", "12"),
    ("MAP<STRING, INT>", {1: 2}),
    ("MAP<STRING, INT>", {"a": "b"}),
    ("STRUCT<a: INT NOT NULL, b: STRING>", {"b": "x"}),
    ("STRUCT<a: INT NOT NULL, b: STRING>", {"a": None}),
    ("STRUCT<a: INT NOT NULL, b: STRING>", {"a": 1, "c": 1}),
    ("STRUCT<a: INT NOT NULL, b: STRING>", [1]),
]


@given(st.data())
def test_any_message_of_the_fields_fits(data):
    fields = data.draw(JSON_FIELDS)
    require_message(data.draw(json_messages(fields)), fields)


@pytest.mark.parametrize(("kind", "value"), FITTING)
def test_values_that_fit_are_accepted(kind, value):
    require_message({"x": value, "_meta": {"uuid": "u"}}, parse_fields(f"x {kind}"), ("_meta", "uuid"))


@pytest.mark.parametrize(("kind", "value"), UNFIT)
def test_values_that_do_not_fit_are_refused(kind, value):
    with pytest.raises(InvalidInput, match=r"message: '?x"):
        require_message({"x": value}, parse_fields(f"x {kind}"))


def test_messages_must_have_the_fields_of_their_type():
    fields = parse_fields("x INT NOT NULL")
    for message, problem in (
        ({}, "x is NOT NULL, and missing: give it"),
        ({"x": None}, "x is NOT NULL, and null: give it"),
        ({"x": 1, "y": 2}, "'y' is not a field of the type"),
        ({"x": 1, "_meta": {}}, "'_meta' is not a field of the type"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            require_message(message, fields)


def test_an_existing_uuid_of_a_message_is_not_a_field():
    """Messages that were read can be published again unchanged."""
    fields = parse_fields("x INT, _meta STRUCT<a: INT NOT NULL>")
    at = ("_meta", "uuid")
    require_message({"x": 1, "_meta": {"a": 1, "uuid": "u"}}, fields, at)
    for message, problem in (
        ({"_meta": {"a": 1, "uuid": "u"}, "uuid": "u"}, "'uuid' is not a field"),
        ({"_meta": {"a": 1, "id": "u"}}, r"'_meta\.id' is not a field"),
        ({"_meta": {"uuid": "u"}}, r"_meta\.a is NOT NULL, and missing"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            require_message(message, fields, at)
