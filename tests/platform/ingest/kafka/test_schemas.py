"""Values with schemas, by the client of a Schema Registry: Avro and Protobuf, and registries that do not answer."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from coranto.cluster.processes import free_port
from coranto.errors import InvalidInput, Unavailable
from coranto.ingest.kafka.schemas import AvroValues, ProtobufValues

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


class Registry:
    """The part of a Schema Registry's interface that clients use, with schemas in memory."""

    def __init__(self) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.subjects: dict[str, int] = {}
        self.status = 200
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                return None

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = len(registry.schemas) + 1
                registry.schemas[number] = body
                self.answer(200, {"id": number})

            def do_GET(self) -> None:
                parts = self.path.partition("?")[0].strip("/").split("/")
                if registry.status != 200:
                    self.answer(registry.status, {"error_code": registry.status, "message": "not now"})
                elif parts[:2] == ["schemas", "ids"] and int(parts[2]) in registry.schemas:
                    self.answer(200, registry.schemas[int(parts[2])])
                elif parts[0] == "subjects" and parts[1] in registry.subjects:
                    number = registry.subjects[parts[1]]
                    self.answer(200, {"subject": parts[1], "id": number, "version": 1, **registry.schemas[number]})
                else:
                    self.answer(404, {"error_code": 40403, "message": "Schema not found"})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.options = {"url": f"http://127.0.0.1:{self.server.server_address[1]}"}

    def add(self, file: descriptor_pb2.FileDescriptorProto, **references: str) -> int:
        """Register a file of Protobuf; `references` are the subjects of files that it imports, by name."""
        number = len(self.schemas) + 1
        self.schemas[number] = {
            "schema": base64.b64encode(file.SerializeToString()).decode(),
            "schemaType": "PROTOBUF",
            "references": [{"name": name, "subject": subject, "version": 1} for name, subject in references.items()],
        }
        return number


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry()
    thread = threading.Thread(target=registry.server.serve_forever)
    thread.start()
    yield registry
    registry.server.shutdown()
    thread.join()
    registry.server.server_close()


def avro(registry: Registry, value: dict[str, Any]) -> bytes:
    serialize = AvroSerializer(SchemaRegistryClient(registry.options), AVRO)
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


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b'{"n": 1}', b"\1\0\0\0\1abc"])
def test_values_without_the_number_of_a_schema_are_refused(registry: Registry, content: bytes) -> None:
    for values in (AvroValues(registry.options), ProtobufValues(registry.options)):
        with pytest.raises(InvalidInput, match="does not begin with the number of a schema"):
            values(content)


def test_a_schema_that_is_missing_is_poison_and_a_registry_that_is_away_is_not(registry: Registry) -> None:
    missing = b"\0\0\0\0\x63\0\0"
    for kind in (AvroValues, ProtobufValues):
        with pytest.raises(InvalidInput, match="a schema that the Schema Registry does not have"):
            kind(registry.options)(missing)
        with pytest.raises(Unavailable, match="Schema Registry does not answer"):
            kind({"url": f"http://127.0.0.1:{free_port()}"})(missing)
    registry.status = 403
    with pytest.raises(Unavailable, match="Schema Registry refuses"):
        AvroValues(registry.options)(missing)


def test_avro_that_does_not_fit_its_schema_is_poison(registry: Registry) -> None:
    registry.schemas[1] = {"schema": AVRO}
    with pytest.raises(InvalidInput, match="is not Avro of its schema"):
        AvroValues(registry.options)(b"\0\0\0\0\x01\x0e")
    registry.schemas[2] = {"schema": '"long"'}
    with pytest.raises(InvalidInput, match="is Avro, but int and not a record"):
        AvroValues(registry.options)(b"\0\0\0\0\x02\x0e")


def protobuf_files() -> tuple[descriptor_pb2.FileDescriptorProto, descriptor_pb2.FileDescriptorProto]:
    """A file with a type, and one with messages that use it and a well-known type."""
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
    assert fields == {"order_id": 7, "price": {"cents": "5"}, "placed": "1970-01-01T00:00:01Z"}
    assert values(head + b"\x04\x02\x00" + line.SerializeToString())[0] == {"item": "lamp"}
    assert values(head + b"\x00")[0] == {}
    with pytest.raises(InvalidInput, match="which has no message"):
        values(head + b"\x02\x0e")
    with pytest.raises(InvalidInput, match="is not Protobuf of its schema"):
        values(head + b"\x02\x02\xff\xff")
    for broken in (b"\x80", b"\x04\x02", b"\x01", b"\xfe\xff\xff\xff\xff\xff\x01"):
        with pytest.raises(InvalidInput, match="does not say which message"):
            values(head + broken)
