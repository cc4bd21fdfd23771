"""Values with schemas, read by a Schema Registry client: Avro and Protobuf, and registries that do not answer."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import uuid
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from coranto.cluster.processes import free_port
from coranto.errors import InvalidInput, Unavailable
from coranto.ingest.kafka.schemas import AvroValues, ProtobufValues
from coranto.types.kinds import format_fields
from coranto.types.writing import require_message
from tests.platform.ingest.kafka.registry import Registry

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "note", "type": ["null", "string"]},
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
            {"name": "placed", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "lines", "type": {"type": "array", "items": {"type": "map", "values": "int"}}},
            {"name": "raw", "type": "bytes"},
        ],
    }
)


def avro(registry: Registry, value: dict[str, Any], schema: str = AVRO) -> bytes:
    serialize = AvroSerializer(SchemaRegistryClient(registry.options), schema)
    content = serialize(value, SerializationContext("orders", MessageField.VALUE))
    assert isinstance(content, bytes)
    return content


def test_avro_with_logical_types(registry: Registry) -> None:
    value = {
        "id": 7,
        "note": None,
        "price": decimal.Decimal("1.10"),
        "placed": dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC),
        "lines": [{"a": 1}],
        "raw": b"\x00\xff",
    }
    fields, text = AvroValues(registry.options)(avro(registry, value))
    assert text is None
    assert fields == {
        "id": 7,
        "note": None,
        "price": "1.10",
        "placed": "2026-03-01T12:00:00Z",
        "lines": [{"a": 1}],
        "raw": "AP8=",
    }


WIDE = {
    "type": "record",
    "name": "shop.Wide",
    "fields": [
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "hour", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "color", "type": {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}},
        {"name": "again", "type": "Color"},
        {"name": "mark", "type": {"type": "fixed", "name": "Mark", "size": 2}},
        {"name": "size", "type": ["null", "int", "long"]},
        {"name": "ratio", "type": ["float", "double"]},
        {"name": "place", "type": {"type": "record", "name": "Place", "fields": [{"name": "town", "type": "string"}]}},
        {"name": "others", "type": ["null", {"type": "array", "items": ["null", "Place"]}]},
        {"name": "ok", "type": {"type": "map", "values": "boolean"}},
        {"name": "none", "type": "null"},
    ],
}
WIDE_FIELDS = (
    "id STRING NOT NULL, day DATE NOT NULL, hour STRING NOT NULL, local TIMESTAMP_NTZ NOT NULL, color STRING NOT NULL, "
    "again STRING NOT NULL, mark STRING NOT NULL, size BIGINT, ratio DOUBLE NOT NULL, "
    "place STRUCT<town: STRING NOT NULL> NOT NULL, others ARRAY<STRUCT<town: STRING NOT NULL>>, "
    "ok MAP<STRING, BOOLEAN> NOT NULL, none STRING"
)


def test_avro_values_fit_their_fields(registry: Registry) -> None:
    value = {
        "id": uuid.UUID(int=7),
        "day": dt.date(2026, 3, 1),
        "hour": dt.time(12, 0, 1),
        "local": dt.datetime(2026, 3, 1, 12, 0, 0, 5),
        "color": "RED",
        "again": "BLUE",
        "mark": b"\0\xff",
        "size": 2**40,
        "ratio": float("nan"),
        "place": {"town": "Bonn"},
        "others": [None, {"town": "Ulm"}],
        "ok": {"a": True},
        "none": None,
    }
    values = AvroValues(registry.options)
    found, _ = values(avro(registry, value, json.dumps(WIDE)))
    assert (found["id"], found["hour"], found["ratio"]) == ("00000000-0000-0000-0000-000000000007", "12:00:01", "NaN")
    assert format_fields(values.fields()) == WIDE_FIELDS
    require_message(found, values.fields())
    first = values.fields()
    values(avro(registry, {"town": "Bonn"}, json.dumps(WIDE["fields"][9]["type"])))  # type: ignore[index]
    assert values.fields() is not first
    assert values.fields()[-1].name == "town"
    assert values.fields() is values.fields()


def test_avro_schemas_with_references(registry: Registry) -> None:
    place = {"type": "record", "name": "shop.Place", "fields": [{"name": "town", "type": "string"}]}
    order = {"type": "record", "name": "shop.Order", "fields": [{"name": "to", "type": "Place"}]}
    registry.schemas = {
        1: {"schema": json.dumps(place)},
        2: {
            "schema": json.dumps(order),
            "references": [{"name": "shop.Place", "subject": "place", "version": 1}],
        },
    }
    registry.subjects["place"] = 1
    values = AvroValues(registry.options)
    assert values(b"\0\0\0\0\2\x08Bonn")[0] == {"to": {"town": "Bonn"}}
    assert format_fields(values.fields()) == "to STRUCT<town: STRING NOT NULL> NOT NULL"


def test_schemas_without_a_common_type_are_named(registry: Registry) -> None:
    values = AvroValues(registry.options)
    for number, (kind, content) in enumerate((("int", b"\x0e"), ("string", b"\x02a")), 1):
        fields = [{"name": "a", "type": kind}]
        registry.schemas[number] = {"schema": json.dumps({"type": "record", "name": "R", "fields": fields})}
        values(b"\0\0\0\0" + bytes([number]) + content)
    with pytest.raises(
        InvalidInput, match=r"schema 2 cannot be registered: a is INT, and STRING.*leave `register` out"
    ):
        values.fields()


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b'{"n": 1}', b"\1\0\0\0\1abc"])
def test_values_without_a_schema_number_are_refused(registry: Registry, content: bytes) -> None:
    for values in (AvroValues(registry.options), ProtobufValues(registry.options)):
        with pytest.raises(InvalidInput, match="does not begin with the number of a schema"):
            values(content)


def test_a_missing_schema_is_poison_but_an_unavailable_registry_is_not(registry: Registry) -> None:
    missing = b"\0\0\0\0\x63\0\0"
    for kind in (AvroValues, ProtobufValues):
        with pytest.raises(InvalidInput, match="a schema that the Schema Registry does not have"):
            kind(registry.options)(missing)
        with pytest.raises(Unavailable, match="Schema Registry does not answer"):
            kind({"url": f"http://127.0.0.1:{free_port()}"})(missing)
    registry.status = 403
    with pytest.raises(Unavailable, match="Schema Registry refuses"):
        AvroValues(registry.options)(missing)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"basic.auth.user.inf": "a:geheim"}, r"Unrecognized properties: basic\.auth\.user\.inf"),
        ({"url": "ftp://r"}, "Invalid url ftp://r"),
        ({"basic.auth.user.info": "geheim"}, "must be in the form of"),
        ({"timeout": "soon"}, "refuses its options"),
        ({"ssl.ca.location": "/nowhere"}, "No such file"),
    ],
)
def test_options_refused_by_the_client_are_errors(changes: dict[str, str], problem: str) -> None:
    for kind in (AvroValues, ProtobufValues):
        with pytest.raises(InvalidInput, match=problem) as raised:
            kind({"url": "http://r"} | changes)
        assert "geheim" not in str(raised.value)


def test_numeric_options(registry: Registry) -> None:
    values = AvroValues(registry.options | {"timeout": "2.5", "max.retries": "1"})
    assert values(avro(registry, {"town": "Bonn"}, json.dumps(WIDE["fields"][9]["type"])))[0] == {"town": "Bonn"}  # type: ignore[index]


def test_avro_that_does_not_fit_its_schema_is_poison(registry: Registry) -> None:
    registry.schemas[1] = {"schema": AVRO}
    with pytest.raises(InvalidInput, match="is not Avro of its schema"):
        AvroValues(registry.options)(b"\0\0\0\0\x01\x0e")
    registry.schemas[2] = {"schema": '"long"'}
    with pytest.raises(InvalidInput, match="is Avro, but int and not a record"):
        AvroValues(registry.options)(b"\0\0\0\0\x02\x0e")


def protobuf_files() -> tuple[descriptor_pb2.FileDescriptorProto, descriptor_pb2.FileDescriptorProto]:
    """Return a file with a type, and a file with messages that use it and a well-known type."""
    base = descriptor_pb2.FileDescriptorProto(name="base.proto", package="shop", syntax="proto3")
    base.message_type.add(name="Money").field.add(name="cents", number=1, type=3, label=1)
    main = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    main.dependency.extend(["base.proto", "google/protobuf/timestamp.proto"])
    main.message_type.add(name="Other")
    order = main.message_type.add(name="Order")
    order.field.add(name="order_id", number=1, type=5, label=1)
    order.field.add(name="price", number=2, type=11, label=1, type_name=".shop.Money")
    order.field.add(name="placed", number=3, type=11, label=1, type_name=".google.protobuf.Timestamp")
    order.nested_type.add(name="Line").field.add(name="item", number=1, type=9, label=1)
    return base, main


def test_protobuf_with_references_and_nested_messages(registry: Registry) -> None:
    base, main = protobuf_files()
    registry.subjects["base"] = registry.add(base)
    number = registry.add(main, **{"base.proto": "base"})
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    for each in (base, main):
        pool.AddSerializedFile(each.SerializeToString())
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))(order_id=7)
    order.price.cents = 5
    order.placed.seconds = 1
    line = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order.Line"))(item="lamp")
    head = b"\0" + number.to_bytes(4, "big")
    values = ProtobufValues(registry.options)
    # The numbers are zigzag: one index, 1; then two indexes, 1 and 0; then the short form of the first message.
    fields, _ = values(head + b"\x02\x02" + order.SerializeToString())
    assert fields == {"order_id": 7, "price": {"cents": 5}, "placed": "1970-01-01T00:00:01Z"}
    assert format_fields(values.fields()) == (
        "order_id INT NOT NULL, price STRUCT<cents: BIGINT NOT NULL>, placed TIMESTAMP"
    )
    assert values(head + b"\x04\x02\x00" + line.SerializeToString())[0] == {"item": "lamp"}
    assert values(head + b"\x00")[0] == {}
    with pytest.raises(InvalidInput, match="which has no message"):
        values(head + b"\x02\x0e")
    with pytest.raises(InvalidInput, match="is not Protobuf of its schema"):
        values(head + b"\x02\x02\xff\xff")
    for broken in (b"\x80", b"\x04\x02", b"\x01", b"\xfe\xff\xff\xff\xff\xff\x01"):
        with pytest.raises(InvalidInput, match="does not say which message"):
            values(head + broken)
