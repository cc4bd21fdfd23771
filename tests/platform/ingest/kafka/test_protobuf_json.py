"""Protobuf messages as JSON, and matching fields: each kind of field, defaults, and well-known types."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2, timestamp_pb2
from google.protobuf import wrappers_pb2 as wrappers

from coranto.errors import InvalidInput
from coranto.ingest.kafka.protobuf_json import json_fields, json_of
from coranto.types.kinds import format_fields
from coranto.types.writing import require_message

T = descriptor_pb2.FieldDescriptorProto


def message(build: Any) -> Any:
    """Return the class of a message whose fields `build` adds."""
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", package="a", syntax="proto3")
    pool = descriptor_pool.DescriptorPool()
    for known in (duration_pb2, struct_pb2, timestamp_pb2, wrappers):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        file.dependency.append(known.DESCRIPTOR.name)
    color = file.enum_type.add(name="Color")
    color.value.add(name="NONE", number=0)
    color.value.add(name="RED", number=1)
    build(file.message_type.add(name="M"))
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("a.M"))


def add(owner: Any, name: str, kind: int, type_name: str = "", *, repeated: bool = False) -> None:
    label = T.LABEL_REPEATED if repeated else T.LABEL_OPTIONAL
    owner.field.add(name=name, number=len(owner.field) + 1, type=kind, type_name=type_name or None, label=label)


def wide(owner: Any) -> None:
    for name, kind in {"i": T.TYPE_INT32, "l": T.TYPE_INT64, "u": T.TYPE_UINT64, "f": T.TYPE_FLOAT}.items():
        add(owner, name, kind)
    for name, kind in {"d": T.TYPE_DOUBLE, "b": T.TYPE_BOOL, "s": T.TYPE_STRING, "raw": T.TYPE_BYTES}.items():
        add(owner, name, kind)
    add(owner, "color", T.TYPE_ENUM, ".a.Color")
    add(owner, "colors", T.TYPE_ENUM, ".a.Color", repeated=True)
    add(owner, "at", T.TYPE_MESSAGE, ".google.protobuf.Timestamp")
    add(owner, "took", T.TYPE_MESSAGE, ".google.protobuf.Duration")
    add(owner, "big", T.TYPE_MESSAGE, ".google.protobuf.Int64Value")
    entry = owner.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    add(entry, "key", T.TYPE_BOOL)
    add(entry, "value", T.TYPE_INT64)
    add(owner, "counts", T.TYPE_MESSAGE, ".a.M.CountsEntry", repeated=True)


def test_every_kind_of_field() -> None:
    made = message(wide)
    fields = json_fields(made.DESCRIPTOR)
    assert format_fields(fields) == (
        "i INT NOT NULL, l BIGINT NOT NULL, u DECIMAL(20, 0) NOT NULL, f FLOAT NOT NULL, d DOUBLE NOT NULL, "
        "b BOOLEAN NOT NULL, s STRING NOT NULL, raw STRING NOT NULL, color STRING NOT NULL, "
        "colors ARRAY<STRING> NOT NULL, at TIMESTAMP, took STRING, big BIGINT, counts MAP<STRING, BIGINT> NOT NULL"
    )
    blank = json_of(made())
    assert blank == {
        **{"i": 0, "l": 0, "u": 0, "f": 0.0, "d": 0.0, "b": False, "s": "", "raw": "", "color": "NONE"},
        **{"colors": [], "counts": {}},
    }
    full = made(i=-1, l=2**62, u=2**64 - 1, f=0.5, d=float("inf"), b=True, s="ß", raw=b"\0\xff", color=7, colors=[1, 9])
    full.at.FromNanoseconds(1_700_000_000_123_456_789)
    full.took.FromMilliseconds(1500)
    full.big.value = 2**60
    full.counts[True] = 5
    found = json_of(full)
    assert found == {
        **{"i": -1, "l": 2**62, "u": 2**64 - 1, "f": 0.5, "d": "Infinity", "b": True, "s": "ß", "raw": "AP8="},
        **{"color": "7", "colors": ["RED", "9"], "at": "2023-11-14T22:13:20.123456Z", "took": "1.500s"},
        **{"big": 2**60, "counts": {"true": 5}},
    }
    for each in (blank, found):
        require_message(each, fields)


def test_times_outside_the_calendar_are_refused() -> None:
    made = message(wide)()
    made.at.seconds = 2**50
    with pytest.raises(ValueError, match="not in the years 1 to 9999"):
        json_of(made)


@pytest.mark.parametrize(
    ("type_name", "problem"),
    [
        (".google.protobuf.Struct", "x is a google.protobuf.Struct, which has no fixed form"),
        (".a.M", "x is of a.M, which contains itself"),
    ],
)
def test_messages_without_matching_fields_are_refused(type_name: str, problem: str) -> None:
    made = message(lambda owner: add(owner, "x", T.TYPE_MESSAGE, type_name))
    with pytest.raises(InvalidInput, match=problem):
        json_fields(made.DESCRIPTOR)
    with pytest.raises(InvalidInput, match=r"a\.M has no fields"):
        json_fields(message(lambda _: None).DESCRIPTOR)


def test_a_struct_has_the_form_of_its_json() -> None:
    made = message(lambda owner: add(owner, "x", T.TYPE_MESSAGE, ".google.protobuf.Struct"))()
    made.x.update({"a": [1, None]})
    assert json_of(made) == {"x": {"a": [1.0, None]}}
