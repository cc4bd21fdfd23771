"""References to types, and the type that journals' labels name."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, CSV, JSON_LINES, MESSAGE_TYPE, label_set
from coranto.types.definitions import JsonForm, LinesForm, MessageType
from coranto.types.parsing import parse_fields
from coranto.types.references import TypeReference, parse_reference, require_content_type, type_named_by


def test_references_are_names_with_or_without_a_version():
    assert parse_reference("shop.Order") == TypeReference("shop.Order", None)
    assert parse_reference("shop.Order@3") == TypeReference("shop.Order", 3)
    assert str(parse_reference("a/b@12")) == "a/b@12"


@pytest.mark.parametrize("text", ["", "@1", "a@", "a@0", "a@x", "a@1@2", "a b", "a@1 ", "a@٣", "x" * 300, "a\0"])
def test_other_references_are_refused(text):
    with pytest.raises(InvalidInput, match="option messageType"):
        parse_reference(text, field="option messageType")


def labels(message_type: str = "", content_type: str = JSON_LINES):
    return label_set({CONTENT_TYPE: content_type, **({MESSAGE_TYPE: message_type} if message_type else {})})


def test_journals_with_one_type_return_it():
    assert type_named_by({"a/one": labels("x.Y"), "a/two": labels("x.Y")}) == "x.Y"


def test_journals_of_several_types_are_listed_by_type():
    many = {f"a/{n:02}": labels("x.Y") for n in range(12)}
    with pytest.raises(InvalidInput) as error:
        type_named_by({**many, "b/one": labels("x.Z"), "c/one": labels()})
    assert "none: c/one; x.Y: a/00, a/01" in str(error.value)
    assert "a/09 and 2 more; x.Z: b/one): select journals of one type, or name a message type" in str(error.value)


def test_journals_without_a_type_are_reported():
    with pytest.raises(InvalidInput, match=r"no journal has the label app\.gazette\.dev/message-type \(a/one, a/two\)"):
        type_named_by({"a/one": labels(), "a/two": labels()})
    with pytest.raises(InvalidInput, match="there are no journals"):
        type_named_by({})


def test_content_types_must_agree_with_the_framing():
    json = MessageType("x.Y", JsonForm(), parse_fields("a INT"))
    require_content_type("a/one", labels(), json)
    require_content_type("a/one", label_set({}), json)
    require_content_type("a/one", labels(content_type=CSV), MessageType("l", LinesForm(), parse_fields("value STRING")))
    with pytest.raises(InvalidInput, match=r"journal a/one has content-type text/csv, and messages of x\.Y are"):
        require_content_type("a/one", labels(content_type=CSV), json)
