"""Protobuf messages as message types: derived fields, required fields, and changes on the wire."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2

from coranto.errors import InvalidInput
from coranto.types.kinds import format_fields
from coranto.types.parsing import parse_fields
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


def test_all_fields_except_the_uuid_are_derived():
    assert format_fields(fields_of(order(*BASE), "uuid")) == (
        "n INT, big BIGINT, lines ARRAY<STRUCT<item: STRING, count: INT>>, at TIMESTAMP, kind STRING, ratio FLOAT, "
        "late BOOLEAN"
    )


def test_required_fields_are_not_null_and_recursive_messages_are_refused():
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


def test_declared_fields_may_be_fewer_and_wider():
    require_holds(
        order(*BASE), parse_fields("n BIGINT, ratio DOUBLE, kind INT, lines ARRAY<STRUCT<count: BIGINT>>"), None
    )


def test_descriptors_are_the_same_bytes_without_unused_ones():
    assert needed_descriptors(shop(*BASE, extra=True), "shop.Order") == needed_descriptors(shop(*BASE), "shop.Order")
    assert b"Unused" not in needed_descriptors(shop(*BASE, extra=True), "shop.Order")


CHANGES = [
    ((2, "n", F.TYPE_INT64), []),
    ((2, "m", F.TYPE_INT32), ["m: has the number 2, which is n in the messages"]),
    ((9, "new", F.TYPE_STRING), []),
    ((2, "n", F.TYPE_SINT32), ["n: has the type sint32, and int32 in the messages"]),
    ((2, "n", F.TYPE_STRING), ["n: has the type string, and int32 in the messages"]),
    ((2, "n", F.TYPE_INT32, F.LABEL_REPEATED), ["n: is repeated on one side only (number 2)"]),
    ((9, "n", F.TYPE_INT32), ["n: has the number 9, and 2 in the messages"]),
    ((7, "ratio", F.TYPE_DOUBLE), ["ratio: has the type double, and float in the messages"]),
]


@pytest.mark.parametrize(("changed", "problems"), CHANGES)
def test_changes_that_misread_the_wire_are_reported(changed, problems):
    kept = [each for each in BASE if each[0] != changed[0] and each[1] != changed[1]]
    found = wire_changes(order(*kept, changed), order(*BASE))
    assert [f"{place}: {problem}" for place, problem in found] == problems


def changes(reader: bytes, written: bytes) -> list[str]:
    classes = [message_class(each, "shop.Order") for each in (reader, written)]
    return [f"{place}: {problem}" for place, problem in wire_changes(*classes)]


def edited(edit, *fields, syntax: str = "proto3") -> bytes:
    """Return descriptors of `shop.Order` after an edit of the file."""
    found = descriptor_pb2.FileDescriptorSet.FromString(shop(*fields, syntax=syntax))
    edit(found.file[1])
    return found.SerializeToString()


def kinds(*values: tuple[str, int], syntax: str = "proto3") -> bytes:
    """Return descriptors of an order whose enum has more values."""

    def edit(file) -> None:
        file.enum_type[0].options.allow_alias = len({number for _, number in values}) < len(values)
        for name, number in values:
            file.enum_type[0].value.add(name=name, number=number)

    return edited(edit, (6, "kind", F.TYPE_ENUM, ".shop.Kind"), syntax=syntax)


def test_numbers_of_an_enum_keep_their_values():
    """A column has the names of values, and another name for a number would change the meaning of old messages."""
    paid = kinds(("PAID", 1))
    assert changes(kinds(("PAID", 1), ("LOST", 2)), paid) == []
    assert changes(paid, kinds(("PAID", 1), ("LOST", 2))) == []  # Its column has the number.
    assert changes(kinds(("PAID", 1), ("SETTLED", 1)), paid) == []
    assert changes(kinds(("LOST", 1)), paid) == [
        "kind: has the value LOST with the number 1, which is PAID in the messages"
    ]
    assert changes(kinds(("PAID", 2)), paid) == ["kind: has the value PAID with the number 2, and 1 in the messages"]


def test_a_closed_enum_has_all_values_of_the_messages():
    """The parser discards unknown values, and the field is not set."""
    old, new = kinds(("PAID", 1), syntax="proto2"), kinds(("PAID", 1), ("LOST", 2), syntax="proto2")
    assert changes(new, old) == []
    assert changes(old, new) == ["kind: lacks the value LOST of the messages, and a closed enum reads it as not set"]
    sent = message_class(new, "shop.Order")(kind=2).SerializeToString()
    assert not message_class(old, "shop.Order").FromString(sent).HasField("kind")


def of_oneofs(**members: str) -> bytes:
    """Return descriptors of an order with fields in oneofs; "" is for a field without a oneof."""
    fields = [(number, name, F.TYPE_INT32) for number, name in enumerate(members, 2)]

    def edit(file) -> None:
        order = file.message_type[1]
        names = sorted({*members.values()} - {""})
        for name in names:
            order.oneof_decl.add(name=name)
        for field in order.field:
            if members.get(field.name):
                field.oneof_index = names.index(members[field.name])

    return edited(edit, *fields)


def test_fields_that_messages_have_together_must_not_move_into_one_oneof():
    apart, together = of_oneofs(a="", b=""), of_oneofs(a="way", b="way")
    problem = "way: is a oneof, and messages may have several of its fields together (a, b)"
    assert changes(together, apart) == [problem]
    assert changes(together, of_oneofs(a="way", b="other")) == [problem]
    assert changes(together, of_oneofs(a="way", b="")) == [problem]
    assert changes(apart, together) == changes(together, together) == []
    assert changes(together, of_oneofs(a="")) == []
    both = message_class(apart, "shop.Order")(a=1, b=2).SerializeToString()
    assert not message_class(together, "shop.Order").FromString(both).HasField("a")


@pytest.mark.parametrize(
    ("reader", "written", "problems"),
    [
        (F.TYPE_SINT64, F.TYPE_SINT32, []),
        (F.TYPE_INT32, F.TYPE_ENUM, []),
        (F.TYPE_INT64, F.TYPE_ENUM, []),
        (F.TYPE_ENUM, F.TYPE_INT32, []),
        (F.TYPE_ENUM, F.TYPE_INT64, ["kind: has the type enum, and int64 in the messages"]),
        (F.TYPE_UINT32, F.TYPE_ENUM, ["kind: has the type uint32, and enum in the messages"]),
    ],
)
def test_types_with_the_same_wire_encoding_may_change(reader, written, problems):
    both = [shop((6, "kind", each, *([".shop.Kind"] if each == F.TYPE_ENUM else []))) for each in (reader, written)]
    assert changes(*both) == problems


def chained(depth: int, last: int) -> bytes:
    """Return messages that each contain the next one, and a field of a type at the end."""
    found = descriptor_pb2.FileDescriptorSet()
    file = found.file.add(name="chained.proto", package="shop", syntax="proto3")
    for level in range(depth):
        message = file.message_type.add(name="Order" if not level else f"Level{level}")
        if level + 1 < depth:
            message.field.add(name="next", number=1, type=F.TYPE_MESSAGE, label=F.LABEL_OPTIONAL)
            message.field[0].type_name = f".shop.Level{level + 1}"
        else:
            message.field.add(name="n", number=1, type=last, label=F.LABEL_OPTIONAL)
    return found.SerializeToString()


def test_changes_are_found_at_any_depth():
    [found] = changes(chained(200, F.TYPE_STRING), chained(200, F.TYPE_INT32))
    assert found.endswith(".n: has the type string, and int32 in the messages")


def test_a_map_is_not_a_list_of_its_entries():
    def edit(file) -> None:
        entry = file.message_type[1].nested_type.add(name="NsEntry")
        for number, name in enumerate(("key", "value"), 1):
            entry.field.add(name=name, number=number, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
        entry.options.map_entry = True

    fields = (2, "ns", F.TYPE_MESSAGE, F.LABEL_REPEATED)
    mapped = edited(edit, (*fields, ".shop.Order.NsEntry"))
    assert changes(mapped, mapped) == []
    assert "ns: is a map on one side only (number 2)" in changes(mapped, shop((*fields, ".shop.Line")))


@pytest.mark.parametrize("value", [-5, 0, 2**31 - 1])
def test_a_wider_integer_reads_the_same_value(value):
    narrow, wide = order((2, "n", F.TYPE_INT32)), order((2, "n", F.TYPE_INT64))
    assert wide.FromString(narrow(n=value).SerializeToString()).n == value


def test_invalid_descriptors_are_refused():
    with pytest.raises(InvalidInput, match="not a set of file descriptors"):
        message_class(b"\xff\xff", "shop.Order")
    with pytest.raises(InvalidInput, match=r"no shop\.None among the descriptors; there are .*shop\.Order"):
        message_class(shop(), "shop.None")


def test_nested_messages_are_found():
    def edit(file) -> None:
        file.message_type[1].nested_type.add(name="Paid").field.add(
            name="n", number=1, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL
        )

    descriptors = needed_descriptors(edited(edit), "shop.Order.Paid")
    assert format_fields(fields_of(message_class(descriptors, "shop.Order.Paid"), None)) == "n INT"
    for name in ("shop.Order.None", "shop.Kind", "", "shop", "\0"):
        with pytest.raises(InvalidInput, match=r"there are .*, and those within them"):
            message_class(descriptors, name)


def test_a_field_must_not_become_required():
    """A parser refuses a message without it, independent of the type's fields."""
    required = message_class(shop((2, "n", F.TYPE_INT32, F.LABEL_REQUIRED), syntax="proto2"), "shop.Order")
    optional = message_class(shop((2, "n", F.TYPE_INT32), syntax="proto2"), "shop.Order")
    for written in (optional, order()):
        assert list(wire_changes(required, written)) == [("n", "is required, and messages may lack it")]
    assert list(wire_changes(required, required)) == []
    assert list(wire_changes(optional, required)) == []


def nested(depth: int, width: int) -> bytes:
    """Return descriptors of messages that contain the next one `width` times."""
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


def test_a_message_with_too_many_fields_is_refused_without_listing_them():
    """Twenty nested messages with ten fields each have 10^20 fields."""
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


def test_long_chains_of_imports_are_accepted_or_refused():
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
