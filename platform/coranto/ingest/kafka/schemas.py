"""Decoding of values with a schema in a Schema Registry: Avro, by the client's deserializer, and Protobuf.

A value begins with a zero byte and the id of its schema (four bytes). In Protobuf, the indexes of the message within
its file follow. A schema that is not in the registry makes a row poison; a registry that does not answer raises
Unavailable.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import confluent_kafka.schema_registry as registries
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.serialization import SerializationError
from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.message import DecodeError

from coranto.errors import InvalidInput, Unavailable
from coranto.ingest.kafka.avro_fields import fields_of_avro, names_of_avro
from coranto.ingest.kafka.protobuf_json import json_fields, json_of
from coranto.ingest.rows import plain
from coranto.ingest.seen_fields import SeenFields
from coranto.types.kinds import TypeField

_HEAD_BYTES: Final = 5
_NOT_FOUND: Final = 404
_MAX_INDEXES: Final = 64
_NUMBERS: Final = frozenset(
    ("timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms", "cache.capacity", "cache.latest.ttl.sec")
)
"""The options of the client that are numbers."""


class AvroValues:
    """Decodes Avro records to fields, without the names of their types."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._registry = _client(options)
        self._decode = AvroDeserializer(self._registry)
        self._seen: dict[int, None] = {}  # The schemas of values, in order of appearance.
        self._fields = SeenFields()

    def __call__(self, content: bytes) -> tuple[Mapping[str, Any], bytes | None]:
        """Decode a value to fields. Raises InvalidInput if that fails, and Unavailable without the registry."""
        number = _schema_of(content)
        try:
            fields = self._decode(content)
        except SchemaRegistryError as error:
            raise _problem(error) from error
        except (SerializationError, ValueError, TypeError, EOFError, IndexError, KeyError) as error:
            raise InvalidInput(f"is not Avro of its schema: {str(error)[:200]}") from error
        except Exception as error:
            raise Unavailable(f"the Schema Registry does not answer: {str(error)[:200]}") from error
        if not isinstance(fields, dict):
            raise InvalidInput(f"is Avro, but {type(fields).__name__} and not a record")
        self._seen[number] = None
        return {name: plain(value) for name, value in fields.items()}, None

    def fields(self) -> tuple[TypeField, ...]:
        """Return fields for all values so far. Raises InvalidInput if fields cannot represent them, and Unavailable."""
        return self._fields.of(list(self._seen), self._fields_of, "schema {}".format)

    def _fields_of(self, number: int) -> tuple[TypeField, ...]:
        with _registry_errors():
            schema = self._registry.get_schema(number)
            return fields_of_avro(schema.schema_str, lambda: self._referenced(schema))

    def _referenced(self, schema: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with _registry_errors():
            for reference in schema.references or ():
                other = self._registry.get_version(reference.subject, reference.version).schema
                found |= {**self._referenced(other), **names_of_avro(json.loads(other.schema_str))}
        return found


class ProtobufValues:
    """Decodes Protobuf messages to fields with the names in the schema."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._registry = _client(options)
        self._files: dict[int, tuple[Any, Any]] = {}  # The pools and descriptors of schemas.
        self._seen: dict[tuple[int, str], Any] = {}  # The descriptors of values, by their schemas and names.
        self._fields = SeenFields()

    def __call__(self, content: bytes) -> tuple[Mapping[str, Any], bytes | None]:
        """Decode a value to fields. Raises InvalidInput if that fails, and Unavailable without the registry."""
        number = _schema_of(content)
        indexes, at = _indexes(content)
        if number not in self._files:
            self._files[number] = self._file(number)
        pool, file = self._files[number]
        names = list(file.message_type)
        path = [file.package] if file.package else []
        for index in indexes:
            if index >= len(names):
                raise InvalidInput(f"is Protobuf of schema {number}, which has no message {indexes}")
            path.append(names[index].name)
            names = list(names[index].nested_type)
        message = message_factory.GetMessageClass(pool.FindMessageTypeByName(".".join(path)))()
        try:
            message.ParseFromString(content[at:])
            found = json_of(message)
        except (DecodeError, ValueError, TypeError) as error:
            raise InvalidInput(f"is not Protobuf of its schema: {str(error)[:200]}") from error
        self._seen.setdefault((number, message.DESCRIPTOR.full_name), message.DESCRIPTOR)
        return found, None

    def fields(self) -> tuple[TypeField, ...]:
        """Return fields for all values so far. Raises InvalidInput if fields cannot represent them."""
        return self._fields.of(
            list(self._seen), lambda key: json_fields(self._seen[key]), "{0[1]} of schema {0[0]}".format
        )

    def _file(self, number: int) -> tuple[Any, Any]:
        """Return a pool with a schema's file and its references, and the descriptor of the file."""
        pool = descriptor_pool.DescriptorPool()
        for known in _WELL_KNOWN:
            pool.AddSerializedFile(known.serialized_pb)
        with _registry_errors(f"has schema {number}, which cannot be used"):
            schema = self._registry.get_schema(number, fmt="serialized")
            file = self._add(pool, schema, f"schema-{number}.proto", {known.name for known in _WELL_KNOWN})
        return pool, file

    def _add(self, pool: Any, schema: Any, name: str, added: set[str]) -> Any:
        for reference in schema.references or ():
            if reference.name not in added:
                version = self._registry.get_version(reference.subject, reference.version, fmt="serialized")
                self._add(pool, version.schema, reference.name, added)
        file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(schema.schema_str))
        file.name = name
        added.add(name)
        pool.AddSerializedFile(file.SerializeToString())
        return file


_WELL_KNOWN: Final[tuple[Any, ...]] = tuple(
    module.DESCRIPTOR for module in (any_pb2, duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
)


def _client(options: Mapping[str, str]) -> Any:
    """Return a client of a registry. Raises InvalidInput for options that the client refuses."""
    given: dict[str, object] = dict(options)
    try:
        for name in _NUMBERS & options.keys():
            given[name] = float(options[name]) if "." in options[name] else int(options[name])
        return registries.SchemaRegistryClient(given)
    except (ValueError, TypeError, OSError) as error:
        raise InvalidInput(
            f"the client of the Schema Registry refuses its options: {error}", field="source.kafka.registry"
        ) from error


def _schema_of(content: bytes) -> int:
    if len(content) <= _HEAD_BYTES or content[0]:
        raise InvalidInput("does not begin with the number of a schema, as serializers of a Schema Registry write it")
    return int.from_bytes(content[1:_HEAD_BYTES], "big")


def _indexes(content: bytes) -> tuple[list[int], int]:
    """Return the indexes of a message within its file, and the offset after them. A single 0 is the first message."""
    numbers, at = list[int](), _HEAD_BYTES
    count = 1
    while len(numbers) <= count <= _MAX_INDEXES:
        value, shift = 0, 0
        while True:
            if at >= len(content) or shift > 28:
                raise InvalidInput("does not say which message of its schema it is")
            byte, at = content[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        number = (value >> 1) ^ -(value & 1)
        if not numbers and number == 0:
            return [0], at
        if number < 0:
            break
        if not numbers:
            count = number
        numbers.append(number)
        if len(numbers) == count + 1:
            return numbers[1:], at
    raise InvalidInput("does not say which message of its schema it is")


@contextlib.contextmanager
def _registry_errors(problem: str = "has a schema that cannot be used") -> Iterator[None]:
    """Turn errors of the registry's client into InvalidInput if the schema is the cause, otherwise into Unavailable."""
    try:
        yield
    except InvalidInput:
        raise
    except SchemaRegistryError as error:
        raise _problem(error) from error
    except (DecodeError, ValueError, TypeError) as error:
        raise InvalidInput(f"{problem}: {str(error)[:200]}") from error
    except Exception as error:
        raise Unavailable(f"the Schema Registry does not answer: {str(error)[:200]}") from error


def _problem(error: Any) -> Exception:
    if error.http_status_code == _NOT_FOUND:
        return InvalidInput(f"has a schema that the Schema Registry does not have: {str(error)[:200]}")
    return Unavailable(f"the Schema Registry refuses: {str(error)[:200]}")
