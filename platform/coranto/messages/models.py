"""Messages that are pydantic models, dataclasses or typed dicts, as JSON lines or as rows of CSV.

`TypedLines` is `JsonLines` for any type that a `JsonType` converts to and from JSON objects. `Models` is the `JsonType`
of types that pydantic understands; `ProtobufJson` (payloads.py) is the `JsonType` of protobuf messages.

The UUID is at the framing's JSON pointer. If a type declares the field at that pointer, each message that is read has
its UUID there. Otherwise the UUID is only in `Envelope.uuid`, which is always set. Publishing never changes the
caller's object.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines, JsonLinesDecoder, JsonObject

M = TypeVar("M")


class JsonType(Protocol[M]):
    """Converts messages to JSON objects and back."""

    def to_json(self, message: M) -> JsonObject:
        """Return the JSON object of a message. Its value at the UUID's place is replaced later. Raises InvalidInput."""
        ...

    def from_json(self, line: bytes, lines: JsonLines) -> M:
        """Return the message of a line, which `lines` can parse. Raises InvalidInput."""
        ...


class TypedLines(Generic[M]):
    """The `Framing` of JSON lines with messages of one type. `kind` is a class or any `JsonType`.

    Otherwise it is like `JsonLines`, which reads the same lines as dicts. With `pointer=None` lines have no UUIDs, and
    messages are delivered at least once.
    """

    def __init__(
        self, kind: type[M] | JsonType[M], pointer: str | None = "/_meta/uuid", *, require_uuid: bool = False
    ) -> None:
        self.kind: JsonType[M] = Models(kind) if isinstance(kind, type) else kind
        self.lines = JsonLines(pointer, require_uuid=require_uuid)
        self.content_type = self.lines.content_type

    def marshal(self, message: M, uuid: str | UUID) -> bytes:
        return self.lines.marshal(self.kind.to_json(message), uuid)

    def acknowledgement(self, uuid: str | UUID) -> bytes:
        return self.lines.acknowledgement(uuid)

    def unmarshal(self, content: bytes) -> M:
        return self.kind.from_json(content, self.lines)

    def decoder(self, journal: str, offset: int) -> JsonLinesDecoder[M]:
        return JsonLinesDecoder(self, self.lines, journal, offset)


class Models(Generic[M]):
    """The `JsonType` of a pydantic model, a dataclass or a typed dict."""

    def __init__(self, kind: type[M]) -> None:
        self._kind = kind
        self._adapter = _adapter_of(kind)
        self._keys = {key for field in _fields_of(kind) for key in (field.name, field.key)}
        self._forbids_others = _forbids_other_keys(kind)

    def to_json(self, message: M) -> JsonObject:
        if not isinstance(message, Mapping) and not isinstance(message, self._kind):
            raise InvalidInput(f"a message must be of {self._kind.__name__}, not {type(message).__name__}")
        try:
            written = self._adapter.dump_python(message, mode="json", by_alias=True)
        except ValueError as error:
            raise InvalidInput(f"message cannot be written as JSON: {error}") from error
        if not isinstance(written, dict):
            raise InvalidInput(f"a message must be a JSON object, which {self._kind.__name__} is not")
        return written

    def from_json(self, line: bytes, lines: JsonLines) -> M:
        if self._forbids_others and lines.pointer is not None:
            place = lines.pointer.split("/")[1].replace("~1", "/").replace("~0", "~")
            if place not in self._keys:
                # The type has no place for the UUID and would reject its key.
                line = json.dumps({key: value for key, value in lines.unmarshal(line).items() if key != place}).encode()
        try:
            return self._adapter.validate_json(line)
        except ValidationError as error:
            raise InvalidInput(f"not a {self._kind.__name__}: {_problems(error)}") from error


class ModelRows(Generic[M]):
    """The `RowType` (csv_rows.py) of a pydantic model, a dataclass or a typed dict: a column for each of its fields.

    Fields are texts, numbers, booleans, times and similar scalars. None is written as an empty field. An empty field is
    read as None if None is the field's default.
    """

    def __init__(self, kind: type[M]) -> None:
        self._kind = kind
        self._adapter = _adapter_of(kind)
        fields = _fields_of(kind)
        self.names = tuple(field.key for field in fields)
        self.width = len(self.names)
        self._nullable = {field.key for field in fields if field.defaults_to_none}

    def to_row(self, message: M) -> Sequence[str]:
        try:
            written = self._adapter.dump_python(message, mode="json", by_alias=True)
        except ValueError as error:
            raise InvalidInput(f"message cannot be written as CSV: {error}") from error
        return [_text_of(name, written.get(name)) for name in self.names]

    def from_row(self, row: Sequence[str]) -> M:
        given = {
            name: text for name, text in zip(self.names, row, strict=True) if text != "" or name not in self._nullable
        }
        try:
            return self._adapter.validate_strings(given)
        except ValidationError as error:
            raise InvalidInput(f"not a {self._kind.__name__}: {_problems(error)}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    key: str
    """The field's name in JSON."""
    defaults_to_none: bool


def _adapter_of(kind: type[M]) -> TypeAdapter[M]:
    try:
        return TypeAdapter(kind)
    except PydanticUserError as error:
        raise InvalidInput(
            f"{kind.__name__} is not a type that pydantic understands: {error.message.splitlines()[0]} Use a model, a "
            "dataclass or a typed dict, or write a JsonType for it."
        ) from error


def _fields_of(kind: type[Any]) -> list[_Field]:
    if issubclass(kind, BaseModel):
        return [
            _Field(name, field.serialization_alias or field.alias or name, field.default is None)
            for name, field in kind.model_fields.items()
        ]
    if dataclasses.is_dataclass(kind):
        return [_Field(field.name, field.name, field.default is None) for field in dataclasses.fields(kind)]
    return [_Field(name, name, False) for name in getattr(kind, "__annotations__", {})]


def _forbids_other_keys(kind: type[Any]) -> bool:
    config = getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None) or {}
    return bool(config.get("extra") == "forbid")


def _text_of(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise InvalidInput(
        f"the field {name} is not a text or a number but {type(value).__name__}, which no column can hold"
    )


def _problems(error: ValidationError) -> str:
    found = [f"{'.'.join(map(str, one['loc'])) or 'value'}: {one['msg']}" for one in error.errors(include_url=False)]
    return "; ".join(found[:3]) + ("; and more" if len(found) > 3 else "")
