"""Framings of registered types: messages round-trip, and messages that do not fit are refused."""

from __future__ import annotations

from uuid import UUID, uuid1

import pytest

from coranto.errors import InvalidInput
from coranto.messages import FixedFrame, iter_messages
from coranto.types import (
    CheckedJson,
    Compatibility,
    CsvForm,
    FixedForm,
    JsonForm,
    LinesForm,
    MessageType,
    TypeVersion,
    framing_of,
    parse_fields,
)
from coranto.types.protobuf import message_class
from tests.platform.types.protobufs import F, shop

DESCRIPTORS = shop((2, "n", F.TYPE_INT32))


def version(form, fields: str) -> TypeVersion:
    return TypeVersion(1, MessageType("shop.Order", form, parse_fields(fields)), Compatibility.BACKWARD, 0.0)


CASES = {
    "json": (version(JsonForm("/meta"), "id INT NOT NULL"), {"id": 1}),
    "json without UUIDs": (version(JsonForm(None), "id INT NOT NULL"), {"id": 1}),
    "csv": (version(CsvForm(1), "a STRING, b INT"), {"a": "x,\n", "b": "2"}),
    "protobuf": (
        version(FixedForm.of(DESCRIPTORS, "shop.Order"), "n INT"),
        message_class(FixedForm.of(DESCRIPTORS, "shop.Order").descriptors, "shop.Order")(n=7),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_messages_round_trip_with_their_uuids(case):
    of, message = CASES[case]
    framing, uuid = framing_of(of), uuid1()
    [envelope] = iter_messages(framing, "a/b", [framing.marshal(message, uuid)], 0)
    found = envelope.message
    if case == "protobuf":
        assert isinstance(framing, FixedFrame)
        assert (found.n, found.uuid) == (7, uuid.bytes)
    else:
        assert {key: value for key, value in found.items() if key != "meta"} == message
    assert (UUID(envelope.uuid) == uuid) == (case != "json without UUIDs")


def test_json_that_does_not_fit_is_refused_on_write_but_accepted_on_read():
    framing = framing_of(CASES["json"][0])
    with pytest.raises(InvalidInput, match=r"message: does not fit shop\.Order@1: 'x' is not a field"):
        framing.marshal({"id": 1, "x": 2}, uuid1())
    assert framing.unmarshal(b'{"x":2}') == {"x": 2}


def test_messages_without_known_fields_have_no_framing():
    for form, kind in ((LinesForm(), "STRING"), (FixedForm(), "BINARY")):
        with pytest.raises(InvalidInput, match="without known fields"):
            framing_of(version(form, f"value {kind}"))
    with pytest.raises(InvalidInput, match="has the framing csv, and not json"):
        CheckedJson(CASES["csv"][0])
