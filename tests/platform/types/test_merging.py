"""Fields that hold the messages of two types: the fields of both, with types that are wide enough."""

from __future__ import annotations

import pytest
from hypothesis import given

from coranto.errors import InvalidInput
from coranto.types.compatibility import Compatibility, problems_of
from coranto.types.definitions import JsonForm, MessageType
from coranto.types.kinds import format_fields
from coranto.types.merging import merged_fields
from coranto.types.parsing import parse_fields
from tests.platform.types.strategies import JSON_FIELDS


@pytest.mark.parametrize(
    ("known", "more", "merged"),
    [
        ("id INT NOT NULL, a STRING", "b DATE NOT NULL, id INT NOT NULL", "id INT NOT NULL, a STRING, b DATE"),
        ("id INT NOT NULL", "id INT", "id INT"),
        (
            "a INT, b FLOAT, c BIGINT, d TINYINT",
            "a BIGINT, b DOUBLE, c INT, d INT",
            "a BIGINT, b DOUBLE, c BIGINT, d INT",
        ),
        ("a INT", "a FLOAT", "a DOUBLE"),
        ("a DECIMAL(9, 2)", "a DECIMAL(9, 4)", "a DECIMAL(11, 4)"),
        (
            "s STRUCT<x: INT NOT NULL>, l ARRAY<INT>, m MAP<STRING, STRUCT<y: INT>>",
            "s STRUCT<z: DATE>, l ARRAY<BIGINT>, m MAP<STRING, STRUCT<y: BIGINT>>",
            "s STRUCT<x: INT, z: DATE>, l ARRAY<BIGINT>, m MAP<STRING, STRUCT<y: BIGINT>>",
        ),
    ],
)
def test_merged_fields_have_the_fields_of_both(known: str, more: str, merged: str) -> None:
    assert format_fields(merged_fields(parse_fields(known), parse_fields(more))) == merged


@pytest.mark.parametrize(
    ("known", "more", "problem"),
    [
        ("a INT", "a STRING", "a is INT, and STRING, and no type holds both"),
        ("a BIGINT", "a DOUBLE", "a is BIGINT, and DOUBLE"),
        ("s STRUCT<x: DATE>", "s STRUCT<x: TIMESTAMP>", "s.x is DATE, and TIMESTAMP"),
        ("l ARRAY<INT>", "l INT", "l is ARRAY<INT>, and INT"),
        ("a DECIMAL(38, 0)", "a DECIMAL(38, 38)", "no type holds both"),
    ],
)
def test_types_without_a_common_wider_type_are_refused(known: str, more: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        merged_fields(parse_fields(known), parse_fields(more))


@given(JSON_FIELDS, JSON_FIELDS)
def test_the_merged_type_reads_messages_of_both_in_either_order(one: object, other: object) -> None:
    mine, theirs = (MessageType("a", JsonForm("/_u"), fields) for fields in (one, other))  # type: ignore[arg-type]
    try:
        merged = merged_fields(mine.fields, theirs.fields)
    except InvalidInput:
        with pytest.raises(InvalidInput):
            merged_fields(theirs.fields, mine.fields)
        return
    assert merged_fields(merged, theirs.fields) == merged
    assert merged_fields(merged, mine.fields) == merged
    try:
        new = MessageType("a", JsonForm("/_u"), merged)
    except InvalidInput:
        return  # Names that differ only in case.
    for each in (mine, theirs):
        assert not problems_of(new, each, Compatibility.BACKWARD, 1)
