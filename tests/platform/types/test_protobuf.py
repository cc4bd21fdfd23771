"""Protobuf messages as message types: derived fields, fields that they have, and changes on the wire."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2

from coranto.errors import InvalidInput
from coranto.types.kinds import format_fields, parse_fields
from coranto.types.protobuf import fields_of, message_class, needed_descriptors, require_holds, wire_changes
from tests.platform.types.protobufs import F, shop

BASE = [
    (2, "n", F.TYPE_INT32),
    (3, "big", F.TYPE_UINT64),
    (4, "lines", F.TYPE_MESSAGE, F.LABEL_REPEATED, ".shop.Line"),
    (5, "at", F.TYPE_MESSAGE, ".google.protobuf.Timestamp"),
    (6, "kind", F.TYPE_ENUM, ".shop.Kind"),
    (7, "ratio", F.TYPE_FLOAT),
    (8, "late", F.TYPE_BOOL),
]


def order(*fields):
    return message_class(shop(*fields), "shop.Order")


def test_all_fields_but_the_uuid_are_derived():
    assert format_fields(fields_of(order(*BASE), "uuid")) == (
        "n INT, big BIGINT, lines ARRAY<STRUCT<item: STRING, count: INT>>, at TIMESTAMP, kind STRING, ratio FLOAT, "
        "late BOOLEAN"
    )


def test_required_fields_are_not_null_and_messages_without_end_are_refused():
    required = message_class(shop((2, "n", F.TYPE_INT32, F.LABEL_REQUIRED), syntax="proto2"), "shop.Order")
    assert format_fields(fields_of(required, "uuid")) == "n INT NOT NULL"
    endless = order((2, "inner", F.TYPE_MESSAGE, ".shop.Order"))
    with pytest.raises(InvalidInput, match=r"shop\.Order contains itself"):
        fields_of(endless, "uuid")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("m INT", "shop.Order has no field 'm'; it has uuid, n"),
        ("n STRING", "shop.Order.n is INT or BIGINT, and no STRING"),
        ("lines STRUCT<item: STRING>", "lines is repeated, and no STRUCT"),
        ("lines ARRAY<STRUCT<item: INT>>", "shop.Line.item is STRING, and no INT"),
        ("at DATE", "at is a message google.protobuf.Timestamp, and no DATE"),
    ],
)
def test_fields_that_a_message_does_not_have_are_refused(fields, problem):
    with pytest.raises(InvalidInput, match=problem):
        require_holds(order(*BASE), parse_fields(fields), "uuid")


def test_fields_may_be_fewer_and_wider():
    require_holds(
        order(*BASE), parse_fields("n BIGINT, ratio DOUBLE, kind INT, lines ARRAY<STRUCT<count: BIGINT>>"), None
    )


def test_descriptors_are_the_same_bytes_whatever_else_is_with_them():
    assert needed_descriptors(shop(*BASE, extra=True), "shop.Order") == needed_descriptors(shop(*BASE), "shop.Order")
    assert b"Unused" not in needed_descriptors(shop(*BASE, extra=True), "shop.Order")


CHANGES = [
    ((2, "n", F.TYPE_INT64), []),
    ((2, "m", F.TYPE_INT32), []),
    ((9, "new", F.TYPE_STRING), []),
    ((2, "n", F.TYPE_SINT32), ["n: is a sint32, and a int32 in the messages"]),
    ((2, "n", F.TYPE_STRING), ["n: is a string, and a int32 in the messages"]),
    ((2, "n", F.TYPE_INT32, F.LABEL_REPEATED), ["n: repeats in one of both, and the number 2 does not in the other"]),
    ((9, "n", F.TYPE_INT32), ["n: has the number 9, and 2 in the messages"]),
    ((7, "ratio", F.TYPE_DOUBLE), ["ratio: is a double, and a float in the messages"]),
]


@pytest.mark.parametrize(("changed", "problems"), CHANGES)
def test_changes_that_misread_the_wire_are_told(changed, problems):
    kept = [each for each in BASE if each[0] != changed[0] and each[1] != changed[1]]
    found = wire_changes(order(*kept, changed), order(*BASE))
    assert [f"{place}: {problem}" for place, problem in found] == problems


@pytest.mark.parametrize("value", [-5, 0, 2**31 - 1])
def test_a_wider_integer_reads_the_same_value(value):
    narrow, wide = order((2, "n", F.TYPE_INT32)), order((2, "n", F.TYPE_INT64))
    assert wide.FromString(narrow(n=value).SerializeToString()).n == value


def test_descriptors_that_are_none_are_refused():
    with pytest.raises(InvalidInput, match="not a set of file descriptors"):
        message_class(b"\xff\xff", "shop.Order")
    with pytest.raises(InvalidInput, match=r"no shop\.None among the descriptors; there are .*shop\.Order"):
        message_class(shop(), "shop.None")


def test_a_field_that_readers_require_must_be_required_before():
    """A parser refuses a message without it, whatever the fields of the type say."""
    required = message_class(shop((2, "n", F.TYPE_INT32, F.LABEL_REQUIRED), syntax="proto2"), "shop.Order")
    optional = message_class(shop((2, "n", F.TYPE_INT32), syntax="proto2"), "shop.Order")
    for written in (optional, order()):
        assert list(wire_changes(required, written)) == [("n", "is required, and messages may lack it")]
    assert list(wire_changes(required, required)) == []
    assert list(wire_changes(optional, required)) == []


def nested(depth: int, width: int) -> bytes:
    """Return descriptors of messages that have the next one `width` times."""
    found = descriptor_pb2.FileDescriptorSet()
    file = found.file.add(name="nested.proto", package="nested", syntax="proto3")
    for level in range(depth):
        message = file.message_type.add(name=f"Level{level}")
        message.field.add(name="n", number=1, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL)
        for number in range(width if level + 1 < depth else 0):
            kind = f".nested.Level{level + 1}"
            message.field.add(
                name=f"f{number}", number=number + 2, type=F.TYPE_MESSAGE, label=F.LABEL_OPTIONAL, type_name=kind
            )
    return found.SerializeToString()


def test_a_message_whose_fields_are_too_many_to_list_is_refused_before_they_are_listed():
    """Twenty messages of ten fields each are 10^20 fields."""
    small = message_class(nested(3, 2), "nested.Level0")
    assert format_fields(fields_of(small, None)).count("n") > 3
    with pytest.raises(InvalidInput, match=r"nested\.Level0 has more than 10000 fields"):
        fields_of(message_class(nested(20, 10), "nested.Level0"), None)


def imports(count: int) -> bytes:
    """Return files that each import the next one."""
    found = descriptor_pb2.FileDescriptorSet()
    for number in reversed(range(count)):
        file = found.file.add(name=f"{number}.proto", package="chain", syntax="proto3")
        if number + 1 < count:
            file.dependency.append(f"{number + 1}.proto")
        file.message_type.add(name=f"M{number}").field.add(
            name="n", number=1, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL
        )
    return found.SerializeToString()


def test_files_that_import_each_other_in_a_long_chain_are_taken_or_refused():
    chain = imports(100)
    assert needed_descriptors(chain, "chain.M0") == chain
    with pytest.raises(InvalidInput, match="not a set of file descriptors"):
        needed_descriptors(imports(5000), "chain.M0")


@pytest.mark.parametrize("dependencies", [["a.proto"], ["b.proto"], ["missing.proto"]])
def test_files_that_import_themselves_or_are_missing_are_refused(dependencies):
    found = descriptor_pb2.FileDescriptorSet()
    for name, imported in (("a.proto", dependencies), ("b.proto", ["a.proto"])):
        found.file.add(name=name, package="p", syntax="proto3", dependency=imported).message_type.add(name="A")
    found.file[1].message_type[0].name = "B"
    with pytest.raises(InvalidInput, match="not a set of file descriptors"):
        needed_descriptors(found.SerializeToString(), "p.A")
