"""Versions of message types: the changes that each rule allows, and the reported problems of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.types.compatibility import Compatibility, changes_between, problems_of
from coranto.types.definitions import CsvForm, FixedForm, JsonForm, LinesForm, MessageType
from coranto.types.parsing import parse_fields
from tests.platform.types.protobufs import F, shop
from tests.platform.types.strategies import JSON_FIELDS, later_fields

OLD = "id BIGINT NOT NULL, n INT, lines ARRAY<STRUCT<item: STRING NOT NULL, count: INT>>"


def problem_texts(new: str, old: str = OLD, promise: Compatibility = Compatibility.BACKWARD) -> list[str]:
    types = [MessageType("a", JsonForm("/_u"), parse_fields(fields)) for fields in (new, old)]
    return [str(each) for each in problems_of(*types, promise, 3)]


BACKWARD = {
    "the same": (OLD, []),
    "a nullable field more": (OLD + ", x DATE", []),
    "a field less": ("n INT", []),
    "wider types": (
        "id BIGINT NOT NULL, n BIGINT, lines ARRAY<STRUCT<item: STRING NOT NULL, count: DOUBLE>>",
        [],
    ),
    "another order": ("n INT, id BIGINT", []),
    "a field that must be there": (
        OLD + ", x DATE NOT NULL",
        ["x is NOT NULL in the new version, and messages of version 3 lack it: make it nullable"],
    ),
    "a field that must be there now": (
        OLD.replace("n INT", "n INT NOT NULL"),
        ["n is NOT NULL in the new version, and nullable in version 3: leave it nullable"],
    ),
    "a narrower type": (
        OLD.replace("id BIGINT", "id INT"),
        [
            "id is INT in the new version, which does not hold BIGINT of version 3: keep BIGINT, or add a field of "
            "another name"
        ],
    ),
    "a field within, and another type": (
        "lines ARRAY<STRUCT<item: INT, at: DATE NOT NULL>>, n STRING",
        [
            "lines[].item is INT in the new version, which does not hold STRING of version 3: keep STRING, or add a "
            "field of another name",
            "lines[].at is NOT NULL in the new version, and messages of version 3 lack it: make it nullable",
            "n is STRING in the new version, which does not hold INT of version 3: keep INT, or add a field of another "
            "name",
        ],
    ),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_new_versions_read_messages_of_earlier_ones(case):
    new, problems = BACKWARD[case]
    assert problem_texts(new) == problems
    assert problem_texts(new, promise=Compatibility.NONE) == []


def test_earlier_versions_read_messages_of_new_ones():
    forward = Compatibility.FORWARD
    assert problem_texts(OLD + ", x DATE NOT NULL", promise=forward) == []
    assert problem_texts(OLD.replace("n INT,", ""), promise=forward) == []
    assert problem_texts(OLD.replace("n INT", "n SMALLINT NOT NULL"), promise=forward) == []
    assert problem_texts(OLD.replace("id BIGINT NOT NULL, ", ""), promise=forward) == [
        "id is NOT NULL in version 3, and messages of the new version lack it: keep it"
    ]
    assert problem_texts(OLD.replace("id BIGINT NOT NULL", "id BIGINT"), promise=forward) == [
        "id is NOT NULL in version 3, and nullable in the new version: leave it NOT NULL"
    ]
    assert problem_texts(OLD.replace("n INT", "n BIGINT"), promise=forward) == [
        "n is INT in version 3, which does not hold BIGINT of the new version: keep INT, or add a field of another name"
    ]


@given(JSON_FIELDS, JSON_FIELDS)
def test_full_combines_both_and_a_version_is_compatible_with_itself(new, old):
    fresh, before = (MessageType("a", JsonForm("/\0"), fields) for fields in (new, old))
    backward = problems_of(fresh, before, Compatibility.BACKWARD, 1)
    forward = problems_of(fresh, before, Compatibility.FORWARD, 1)
    assert problems_of(fresh, before, Compatibility.FULL, 1) == backward + forward
    assert problems_of(fresh, fresh, Compatibility.FULL, 1) == ()
    assert len(problems_of(before, fresh, Compatibility.FORWARD, 1)) == len(backward)


@given(st.data())
def test_dropped_added_wider_and_nullable_fields_are_backward_compatible(data):
    old = data.draw(JSON_FIELDS)
    new = data.draw(later_fields(old))
    fresh, before = (MessageType("a", JsonForm("/\0/place"), fields) for fields in (new, old))
    assert problems_of(fresh, before, Compatibility.BACKWARD, 1) == ()


ORDER = [(2, "n", F.TYPE_INT32), (3, "text", F.TYPE_STRING)]
FORMS = {
    "json pointer": (JsonForm("/a"), JsonForm("/b"), "framing is json uuidPointer=/a in the new version, and json"),
    "json without UUIDs": (JsonForm(None), JsonForm(), "uuidPointer=none in the new version"),
    "csv column": (CsvForm(1), CsvForm(0), "csvUuidColumn=1 in the new version, and csv csvUuidColumn=0"),
    "another framing": (CsvForm(0), JsonForm(), "framing is csv csvUuidColumn=0 in the new version, and json"),
}


@pytest.mark.parametrize("case", FORMS)
def test_framing_and_place_of_the_uuid_must_not_change(case):
    new, old, problem = FORMS[case]
    fields = parse_fields("x STRING")
    [found] = problems_of(MessageType("a", new, fields), MessageType("a", old, fields), Compatibility.BACKWARD, 1)
    assert problem in str(found)
    assert found.advice == "keep it, or give these messages a type of another name"


def test_columns_of_csv_keep_number_and_order_and_may_become_wider():
    def problems(new: str) -> list[str]:
        types = [MessageType("a", CsvForm(), parse_fields(fields)) for fields in (new, "a INT, b STRING")]
        return [str(each) for each in problems_of(*types, Compatibility.BACKWARD, 1)]

    assert problems("a BIGINT, b STRING") == []
    for other in ("b STRING, a INT", "a INT", "a INT, b STRING, c STRING", "a INT, c STRING"):
        [found] = problems(other)
        assert "rows of CSV do not name them" in found
    assert "a is STRING" in problems("a STRING, b STRING")[0]


def test_protobuf_messages_keep_their_wire_format():
    def problems(*fields, text="n BIGINT") -> list[str]:
        old = MessageType("o", FixedForm.of(shop(*ORDER), "shop.Order"), parse_fields("n INT"))
        new = MessageType("o", FixedForm.of(shop(*fields), "shop.Order"), parse_fields(text))
        return [str(each) for each in problems_of(new, old, Compatibility.BACKWARD, 1)]

    assert problems(*ORDER) == []
    assert problems((2, "n", F.TYPE_INT64)) == []
    assert (
        "m of the protobuf message in the new version has the number 2, which is n in the messages (version 1)"
        in (problems((2, "m", F.TYPE_INT32), text="m INT")[0])
    )
    assert problems(*ORDER, (4, "more", F.TYPE_BOOL), text="n INT, more BOOLEAN") == []
    assert problems((4, "n", F.TYPE_INT32)) == [
        "n of the protobuf message in the new version has the number 4, and 2 in the messages (version 1): keep "
        "numbers, names, types and oneofs of fields, and give new fields a number that was never used"
    ]
    assert "has the type string, and int32 in" in problems((2, "n", F.TYPE_STRING), text="n STRING")[0]


def test_the_type_of_lines_must_not_change():
    new, old = (MessageType("a", LinesForm(), parse_fields(f"value {kind}")) for kind in ("BINARY", "STRING"))
    assert "value is BINARY in the new version" in str(problems_of(new, old, Compatibility.BACKWARD, 1)[0])


def test_changes_are_described_for_people():
    def changes(new: str, description: str = "") -> tuple[str, ...]:
        before = MessageType("a", JsonForm(), parse_fields("id INT, x STRING"))
        return changes_between(before, MessageType("a", JsonForm(), parse_fields(new), description))

    assert changes("id BIGINT, y DATE") == ("dropped x STRING", "id INT became id BIGINT", "added y DATE")
    assert changes("x STRING, id INT") == ("another order of fields",)
    assert changes("id INT, x STRING", "Text.") == ("another description",)
