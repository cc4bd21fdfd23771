"""The types of fields: the rules of wider types, and places of nested types."""

from __future__ import annotations

import pytest
from hypothesis import given

from coranto.types.kinds import (
    format_kind,
    kinds_in,
    widens,
)
from coranto.types.parsing import parse_fields, parse_type
from tests.platform.types.strategies import KINDS

WIDER = [
    ("TINYINT", "SMALLINT"),
    ("TINYINT", "BIGINT"),
    ("INT", "BIGINT"),
    ("INT", "DOUBLE"),
    ("FLOAT", "DOUBLE"),
    ("DECIMAL(5, 2)", "DECIMAL(6, 2)"),
    ("DECIMAL(5, 2)", "DECIMAL(8, 5)"),
]
NOT_WIDER = [
    ("INT", "INT"),
    ("BIGINT", "DOUBLE"),
    ("INT", "FLOAT"),
    ("INT", "STRING"),
    ("DATE", "TIMESTAMP"),
    ("DECIMAL(5, 2)", "DECIMAL(5, 3)"),
    ("DECIMAL(5, 2)", "DECIMAL(6, 4)"),
    ("DECIMAL(5, 2)", "DOUBLE"),
    ("ARRAY<INT>", "ARRAY<BIGINT>"),
]


@pytest.mark.parametrize(("narrow", "wide"), WIDER)
def test_a_wider_type_holds_all_values_of_the_narrower_one_only(narrow, wide):
    assert widens(parse_type(narrow)[0], parse_type(wide)[0])
    assert not widens(parse_type(wide)[0], parse_type(narrow)[0])


@pytest.mark.parametrize(("narrow", "wide"), NOT_WIDER)
def test_types_that_do_not_hold_all_values_are_not_wider(narrow, wide):
    assert not widens(parse_type(narrow)[0], parse_type(wide)[0])


@given(KINDS, KINDS, KINDS)
def test_widening_is_an_order(one, two, three):
    assert not widens(one, one)
    if widens(one, two) and widens(two, three):
        assert widens(one, three)


def test_nested_types_are_listed_with_their_places():
    fields = parse_fields("a INT, b ARRAY<STRUCT<c: MAP<STRING, DATE>>>")
    assert [(place, format_kind(kind)[:4]) for place, kind in kinds_in(fields)] == [
        ("a", "INT"),
        ("b", "ARRA"),
        ("b[]", "STRU"),
        ("b[].c", "MAP<"),
        ("b[].c{}", "DATE"),
    ]
