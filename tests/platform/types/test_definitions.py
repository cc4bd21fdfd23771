"""Definitions of message types: their plain form, and invalid definitions."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.types.definitions import CsvForm, FixedForm, JsonForm, LinesForm, MessageType
from coranto.types.parsing import parse_fields
from tests.platform.types.protobufs import F, shop
from tests.platform.types.strategies import JSON_FIELDS

ORDER = shop((2, "n", F.TYPE_INT32), (3, "text", F.TYPE_STRING))
TYPES = {
    "json": MessageType("shop.Order", JsonForm(), parse_fields("id BIGINT NOT NULL, at TIMESTAMP"), "Orders."),
    "json without UUIDs": MessageType("shop.Order", JsonForm(None), parse_fields("id BIGINT")),
    "json elsewhere": MessageType("shop/Order", JsonForm("/uuid"), parse_fields("id BIGINT")),
    "csv": MessageType("a", CsvForm(1), parse_fields("a STRING, b DOUBLE")),
    "csv without UUIDs": MessageType("a", CsvForm(None), parse_fields("a STRING")),
    "protobuf": MessageType("shop.Order", FixedForm.of(ORDER, "shop.Order"), parse_fields("n BIGINT")),
    "frames": MessageType("x", FixedForm(), parse_fields("value BINARY")),
    "lines": MessageType("x", LinesForm(), parse_fields("value STRING")),
}


@pytest.mark.parametrize("kind", TYPES)
def test_a_definition_round_trips_through_its_plain_form(kind):
    plain = json.loads(json.dumps(TYPES[kind].to_plain()))
    assert MessageType.of_plain(plain) == TYPES[kind]


@given(JSON_FIELDS)
def test_any_fields_of_json_round_trip(fields):
    found = MessageType("a", JsonForm("/\0/place"), fields)
    assert MessageType.of_plain(json.loads(json.dumps(found.to_plain()))) == found


def plain(**changes):
    given = {"type": "shop.Order", "framing": "json", "fields": {"id": "BIGINT"}, **changes}
    return {key: value for key, value in given.items() if value is not None}


PROTOBUF = {"framing": "fixed", "descriptorSet": base64.b64encode(ORDER).decode()}


def test_omitted_parts_of_a_plain_form_have_defaults():
    assert MessageType.of_plain(plain(framing=None, fields="id BIGINT")) == MessageType(
        "shop.Order", JsonForm(), parse_fields("id BIGINT")
    )
    found = MessageType.of_plain(plain(**PROTOBUF, fields=None))
    assert found.fields == parse_fields("n INT, text STRING")
    assert found.form == FixedForm.of(ORDER, "shop.Order", "uuid")
    assert MessageType.of_plain(plain(framing="lines", fields=None)).fields == parse_fields("value STRING")
    assert MessageType.of_plain(plain(framing="fixed", fields=None)).fields == parse_fields("value BINARY")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "a definition is a mapping"),
        (plain(type=None), "type: is missing"),
        (plain(type=7), "type: '7' is not a text"),
        (plain(type="a b"), "type: .*has the character ' '"),
        (plain(type="a@1"), "type: .*has the character '@'"),
        (plain(framing="avro"), "framing: 'avro' is not one of json, csv, fixed, lines"),
        (plain(schema="x"), "schema'?: is not a key of a definition; there are type, "),
        (plain(csvUuidColumn=0), "csvUuidColumn: is for framing csv, not for json"),
        (plain(fields=None), "fields: are missing"),
        (plain(fields={}), "fields: has no fields"),
        (plain(fields=[1]), "fields: are no mapping of names to types"),
        (plain(fields={"id": 3}), "fields: 'id' has no text as its type"),
        (plain(fields={"id": "BIG"}), "fields: 'id': .*is not a type: one of BOOLEAN, "),
        (plain(fields={"id": "BINARY"}), "fields: id is BINARY, which JSON cannot express"),
        (plain(fields={"id": "MAP<INT, INT>"}), "names in JSON are STRING"),
        (plain(fields={"": "INT"}), "cannot name a field"),
        (plain(fields={"a\x1b[2J": "INT"}), "cannot name a field"),
        (plain(uuidPointer="/id"), "fields: id is the place of the UUID"),
        (plain(uuidPointer="id"), "uuidPointer: "),
        (plain(framing="csv", fields={"a": "DATE"}), "fields: a is DATE, and columns of CSV are STRING"),
        (plain(framing="csv", csvUuidColumn=2), "csvUuidColumn: is 2, and with the UUID there are columns 0 to 1"),
        (plain(framing="csv", csvUuidColumn=True), "csvUuidColumn: 'True' is neither none nor a column"),
        (plain(framing="csv", csvUuidColumn="x"), "csvUuidColumn: 'x' is neither none nor a column"),
        (plain(framing="lines"), "fields: are id BIGINT: such messages have one field, value STRING or BINARY"),
        (plain(framing="fixed", messageType="a.B"), "messageType: goes together with descriptors"),
        (plain(framing="fixed", descriptorSet="%"), "descriptorSet: is not base64"),
        (plain(framing="fixed", descriptorSet="AAAA"), "descriptorSet: not a set of file descriptors"),
        (plain(**PROTOBUF, messageType="a.B"), "messageType: there is no a.B among the descriptors"),
        (plain(**PROTOBUF), "fields: shop.Order has no field 'id'"),
        (plain(**PROTOBUF, fields={"n": "INT"}, uuidField="n"), "has no field n of bytes or a string"),
        (
            plain(fields={f"f{n}": "INT" for n in range(10_001)}),
            "fields: are 10001 with those within others; there may be 10000",
        ),
        (
            plain(fields={"s": "ARRAY<STRUCT<" + ", ".join(f"f{n}: INT" for n in range(10_000)) + ">>"}),
            "fields: are 10001 with those within others; there may be 10000",
        ),
    ],
)
def test_invalid_definitions_are_refused(given, problem):
    with pytest.raises(InvalidInput, match=problem):
        MessageType.of_plain(given)


@pytest.mark.parametrize(
    ("pointer", "fields", "place"),
    [
        ("/uuid", "uuid STRING", "uuid"),
        ("/_meta/uuid", "_meta STRUCT<a: INT, uuid: STRING>", r"_meta\.uuid"),
        ("/_meta/uuid", "_meta STRING", "_meta"),
        ("/_meta/uuid", "_meta MAP<STRING, STRING>", "_meta"),
    ],
)
def test_fields_must_not_overlap_the_path_of_the_uuid(pointer, fields, place):
    """No message could have both, or its UUID would be a column that publishers refuse."""
    with pytest.raises(InvalidInput, match=f"fields: {place} is the place of the UUID: leave it out of the fields"):
        MessageType("a", JsonForm(pointer), parse_fields(fields))


def test_fields_next_to_the_uuid_are_accepted():
    fields = parse_fields("uuid STRING, _meta STRUCT<a: INT, b: STRUCT<uuid: STRING>>")
    assert MessageType("a", JsonForm("/_meta/uuid"), fields).fields == fields


JSON_VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["json", "csv"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["type", "framing", "fields", "uuidPointer", "descriptorSet", "x"]), JSON_VALUES)
)
def test_anything_is_a_definition_or_refused(given):
    try:
        found = MessageType.of_plain(given)
    except InvalidInput:
        return
    assert MessageType.of_plain(found.to_plain()) == found
