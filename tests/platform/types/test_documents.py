"""Definitions in YAML."""

from __future__ import annotations

import pytest
from hypothesis import given

from coranto.errors import InvalidInput
from coranto.types.definitions import FixedForm, JsonForm, MessageType
from coranto.types.documents import format_type_document, parse_type_document
from coranto.types.parsing import parse_fields
from tests.platform.types.protobufs import F, shop
from tests.platform.types.strategies import JSON_FIELDS

DOCUMENT = """
type: shop.Order
description: Orders.
uuidPointer: /uuid
fields:
  id: BIGINT NOT NULL
  lines: "ARRAY<STRUCT<item: STRING NOT NULL, count: INT>>"
"""


def test_a_document_is_parsed_into_a_definition(tmp_path):
    fields = parse_fields("id BIGINT NOT NULL, lines ARRAY<STRUCT<item: STRING NOT NULL, count: INT>>")
    expected = MessageType("shop.Order", JsonForm("/uuid"), fields, "Orders.")
    assert parse_type_document(DOCUMENT, tmp_path) == expected
    text = "type: shop.Order\nuuidPointer: /uuid\ndescription: Orders.\nfields: >-\n  id BIGINT NOT NULL,\n  lines "
    text += "ARRAY<STRUCT<item: STRING NOT NULL, count: INT>>\n"
    assert parse_type_document(text, tmp_path) == expected


@given(JSON_FIELDS)
def test_definitions_round_trip(fields):
    found = MessageType("a", JsonForm("/\0/place"), fields)
    assert parse_type_document(format_type_document(found), None) == found


def test_descriptors_may_be_in_a_file_next_to_the_document(tmp_path):
    (tmp_path / "shop.pb").write_bytes(shop((2, "n", F.TYPE_INT32)))
    text = "type: shop.Order\nframing: fixed\ndescriptorFile: shop.pb\n"
    found = parse_type_document(text, tmp_path)
    assert found == MessageType(
        "shop.Order", FixedForm.of(shop((2, "n", F.TYPE_INT32)), "shop.Order"), parse_fields("n INT")
    )
    assert parse_type_document(format_type_document(found), tmp_path / "elsewhere") == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the document is empty"),
        ("- a", "line 1: fields are expected here"),
        ("type: a\nschema: b", "line 2: there is no field 'schema' here; known are type, "),
        ("type: a\ntype: b", "line 2: the field 'type' is given twice"),
        ("type: a\nfields:\n  x: INT\n  x: INT", "line 4: the field 'x' is given twice"),
        ("type: a\nfields:\n  - x: INT", "line 3: fields are no list: write each as `name: TYPE`, without a dash"),
        ("type: a\nfields:\n  x: ARRAY<STRUCT<y: INT>>", "line 3: this is not YAML: .* into quotes"),
        ("type: a\nfields:\n  x: [INT]", "line 3: a text is expected here"),
        ("type: a\nfields: {x: INTEGR}", "fields: 'x': "),
        ("type: a\nframing: fixed\ndescriptorFile: none.pb", "line 3: .*none.pb cannot be read: No such file"),
        ("type: a\nframing: fixed\ndescriptorFile: x\ndescriptorSet: AA", "line 3: descriptorSet is given, too"),
        ("type: {a: b}", "line 1: a text is expected here"),
        ("a: &a [*a]", "line 1: "),
    ],
)
def test_problems_of_a_document_are_reported_with_their_line(tmp_path, text, problem):
    with pytest.raises(InvalidInput, match=problem):
        parse_type_document(text, tmp_path)
