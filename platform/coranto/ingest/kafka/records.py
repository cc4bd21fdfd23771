"""Conversion of Kafka records to rows."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from coranto.errors import InvalidInput
from coranto.ingest.kafka.options import KafkaOptions
from coranto.ingest.rows import UnparsedRows, parse_object
from coranto.ingest.source import Poison, SourceRow
from coranto.types.kinds import TypeField

DELETE: Final = "delete"
"""The value of a tombstone's field `operation`, as for a deleted row of PostgreSQL."""


class Values(NamedTuple):
    """A decoder of the values of records, and their fields."""

    decode: Callable[[bytes], tuple[Mapping[str, Any], bytes | None]]
    """Raises InvalidInput, and Unavailable if the schema of a value cannot be read."""
    fields: Callable[[], tuple[TypeField, ...]] | None = None
    """The fields that hold all values so far; None if they have no schema."""


class RecordRows:
    """Converts records to rows."""

    def __init__(self, options: KafkaOptions, values: Values) -> None:
        self._options = options
        self._decode = values.decode
        self._with_offset = "offset" in options.meta
        self._with_time = "timestamp" in options.meta
        self._with_key = "key" in options.meta
        self._with_headers = "headers" in options.meta

    def rows(self, topic: str, partition: int, records: Sequence[Any]) -> Iterable[SourceRow | Poison]:
        """Return the rows of a partition's records. Iteration raises Unavailable if a schema cannot be read."""
        parts = [("topic", topic), ("partition", partition)]
        head = b"".join(_member(*each) for each in parts if each[0] in self._options.meta)
        # Records without a key keep the order of their partition.
        unkeyed = f"{topic}/{partition}"
        texts = [record.value() for record in records]
        if self._decode is not parse_object or self._options.operation or None in texts:
            return self._decoded(head, unkeyed, records)
        keys = [record.key() for record in records]
        return UnparsedRows(
            [_name(key, unkeyed) for key in keys],
            texts,
            self._metas(head, records, keys),
            lambda number, problem: _poison(records[number], problem),
        )

    def _decoded(self, head: bytes, unkeyed: str, records: Sequence[Any]) -> Iterator[SourceRow | Poison]:
        decode, operation = self._decode, self._options.operation
        text: bytes | None
        for record in records:
            key, value = record.key(), record.value()
            if value is not None:
                try:
                    fields, text = decode(value)
                except InvalidInput as error:
                    yield _poison(record, error.message)
                    continue
            elif not self._options.tombstones:
                continue
            else:
                fields, text = _key_fields(key), None
            is_deletion = value is None
            if operation:
                if operation in fields:
                    problem = f"has a field {operation!r}, which `operation` names: choose another name"
                    yield _poison(record, problem)
                    continue
                if is_deletion:
                    fields = {operation: DELETE, **fields}
            meta = self._meta(head, record, key, is_deletion=is_deletion)
            yield SourceRow(_name(key, unkeyed), fields, text, meta, is_deletion)

    def _metas(self, head: bytes, records: Sequence[Any], keys: Sequence[bytes | None]) -> list[bytes]:
        if self._with_offset and self._with_time and not self._with_key and not self._with_headers:  # The default.
            times = [record.timestamp() for record in records]
            if all(kind for kind, _ in times):
                both = zip(records, times, strict=True)
                return [b'%b"offset":%d,"timestamp":%d' % (head, record.offset(), at) for record, (_, at) in both]
        return [self._meta(head, *each, is_deletion=False) for each in zip(records, keys, strict=True)]

    def _meta(self, head: bytes, record: Any, key: bytes | None, *, is_deletion: bool) -> bytes:
        kind, time = record.timestamp()
        head += b'"offset":%d,' % record.offset() if self._with_offset else b""
        if self._with_time:
            head += b'"timestamp":%d,' % time if kind else b'"timestamp":null,'
        if self._with_key or is_deletion:
            head += _member("key", _text(key))
        if is_deletion:
            head += b'"deleted":true,'
        if self._with_headers:
            head += _member("headers", [[name, _text(each)] for name, each in record.headers() or ()])
        return head[:-1]


def _poison(record: Any, problem: str) -> Poison:
    return Poison(f"offset {record.offset()}", problem, record.key(), record.value())


def _name(key: bytes | None, unkeyed: str) -> str:
    """Return the routing key of a record."""
    return unkeyed if key is None else key.decode("utf-8", "surrogateescape")


def _member(name: str, value: object) -> bytes:
    return b'"%b":%b,' % (name.encode(), json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode())


def _text(content: bytes | None) -> object:
    """Return bytes as a text if they are UTF-8, otherwise in base64."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _key_fields(key: bytes | None) -> Mapping[str, Any]:
    """Return the fields of a key that is a JSON object. They identify the rows that a tombstone deletes."""
    if key is None or key[:1] != b"{":
        return {}
    try:
        return parse_object(key)[0]
    except InvalidInput:
        return {}


def values_of(options: KafkaOptions) -> Values:
    """Return the decoder of values. Raises MissingExtra if a library is missing."""
    if options.value == "json":
        return Values(parse_object)
    if options.value == "text":
        return Values(_text_value)
    from coranto.ingest.kafka.schemas import AvroValues, ProtobufValues

    found = AvroValues(options.registry) if options.value == "avro" else ProtobufValues(options.registry)
    return Values(found, found.fields)


def _text_value(content: bytes) -> tuple[Mapping[str, Any], bytes | None]:
    try:
        return {"value": content.decode()}, None
    except UnicodeDecodeError:
        raise InvalidInput("is not UTF-8") from None
