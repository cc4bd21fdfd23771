"""The language of fields' types: accepted texts, and errors for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.types.kinds import (
    MAX_DEPTH,
    ArrayKind,
    DecimalKind,
    MapKind,
    PlainKind,
    StructKind,
    TypeField,
    format_fields,
    format_kind,
)
from coranto.types.parsing import parse_fields, parse_type
from tests.platform.types.strategies import FIELDS, KINDS


@given(FIELDS)
def test_fields_round_trip(fields):
    assert parse_fields(format_fields(fields)) == fields


@given(KINDS, st.booleans())
def test_types_round_trip(kind, nullable):
    assert parse_type(format_kind(kind) + ("" if nullable else " NOT NULL")) == (kind, nullable)


@given(st.text(st.sampled_from("aB1`<>(),: NOTULxARYMPSTRUCTINT"), max_size=40))
def test_any_text_is_parsed_or_refused(text):
    try:
        fields = parse_fields(text)
    except InvalidInput:
        return
    assert parse_fields(format_fields(fields)) == fields


def test_spellings_of_spark_are_accepted():
    text = (
        "a integer, b Long not null, c struct<d:string not null, e decimal(5,2)>, `f g` map<string,array<real>>, h dec"
    )
    assert parse_fields(text) == (
        TypeField("a", PlainKind.INT),
        TypeField("b", PlainKind.BIGINT, nullable=False),
        TypeField("c", StructKind((TypeField("d", PlainKind.STRING, False), TypeField("e", DecimalKind(5, 2))))),
        TypeField("f g", MapKind(PlainKind.STRING, ArrayKind(PlainKind.FLOAT))),
        TypeField("h", DecimalKind(10, 0)),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the name of a field is expected where it ends"),
        ("a", "one of BOOLEAN, TINYINT, .*, DECIMAL, ARRAY, MAP, STRUCT is expected where it ends"),
        ("a BIGINT,", "the name of a field is expected where it ends"),
        ("a BIGINT b", "a comma or the end is expected where there is 'b'"),
        ("a VARIANT", "one of .* is expected where there is 'VARIANT'"),
        ("a `INT`", "one of .* is expected where there is '`INT`'"),
        ("a ARRAY<INT", "> is expected where it ends"),
        ("a MAP<STRING>", ", is expected where there is '>'"),
        ("a MAP<ARRAY<INT>, INT>", "keys are values without parts"),
        ("a DECIMAL(39)", "give a precision from 1 to 38"),
        ("a DECIMAL(3, 4)", "and a scale from 0 to that"),
        ("a DECIMAL(1000000, 4)", "a number of digits is expected"),
        ("a INT NOT", "NULL is expected where it ends"),
        ("a INT; b INT", "has '; b INT', which is not part of a type"),
        ("a INT, A STRING", "differ in case at most"),
        ("a STRUCT<b: INT, B: INT>", "'a.B' and 'b' differ in case at most"),
        ("a " + "ARRAY<" * 60 + "INT" + ">" * 60, f"nested more than {MAX_DEPTH} deep"),
        ("a INT" + ", b INT" * 200_000, "it may have 1048576"),
    ],
)
def test_other_texts_are_refused_with_the_position(text, problem):
    with pytest.raises(InvalidInput, match=problem):
        parse_fields(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("VARCHAR(10)", r"'VARCHAR\(10\)' is not a type: one of BOOLEAN, .* is expected where there is 'VARCHAR"),
        ("BIGINT NULL", "'BIGINT NULL' is not a type: NOT NULL or the end is expected where there is 'NULL'"),
        ("BIGINT NOT NULL x", "is not a type: the end is expected where there is 'x'"),
    ],
)
def test_a_text_that_is_not_a_type_is_reported(text, problem):
    with pytest.raises(InvalidInput, match=problem):
        parse_type(text)


def test_the_depth_of_types_is_bounded_when_parsed_alone():
    kind = PlainKind.INT
    for _ in range(MAX_DEPTH + 1):
        kind = ArrayKind(kind)
    with pytest.raises(InvalidInput, match="nested more than"):
        parse_type(format_kind(kind))
