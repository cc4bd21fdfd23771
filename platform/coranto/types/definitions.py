"""Definitions of message types: the framing of their messages, the place of the UUID, and their fields.

A definition has a plain form, of texts and mappings, for files and the registry's records. `of_plain` accepts any value
and rejects everything except definitions. Every definition is valid: its framing can hold all of its fields.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from coranto import labels
from coranto.errors import InvalidInput
from coranto.messages.framing import DEFAULT_UUID_POINTER, JsonLines
from coranto.names import shown, validate_token
from coranto.types import protobuf
from coranto.types.kinds import (
    MapKind,
    PlainKind,
    StructKind,
    TypeField,
    format_fields,
    format_kind,
    format_type,
    kinds_in,
    require_sound,
)
from coranto.types.parsing import parse_fields, parse_type

MAX_NAME_BYTES: Final = 256
MAX_FIELDS: Final = 10_000
VALUE: Final = "value"
"""The only field of messages without known fields: lines, and frames without a protobuf message."""
NONE: Final = "none"
"""The plain form of a UUID's place if messages have no UUID."""
_CSV_KINDS: Final = (
    PlainKind.STRING,
    PlainKind.BOOLEAN,
    PlainKind.TINYINT,
    PlainKind.SMALLINT,
    PlainKind.INT,
    PlainKind.BIGINT,
    PlainKind.DOUBLE,
)


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Lines of JSON objects. `uuid_pointer` is the JSON pointer to the UUID; None: no UUIDs."""

    name: ClassVar[str] = "json"
    content_type: ClassVar[str] = labels.JSON_LINES

    uuid_pointer: str | None = DEFAULT_UUID_POINTER

    def to_plain(self) -> dict[str, object]:
        return {"uuidPointer": self.uuid_pointer or NONE}

    def require_holds(self, fields: Sequence[TypeField]) -> None:
        """Raise InvalidInput for a field that the messages cannot have."""
        try:
            path = JsonLines(self.uuid_pointer).path
        except InvalidInput as error:
            raise InvalidInput(error.message, field="uuidPointer") from error
        for place, kind in kinds_in(fields):
            if kind is PlainKind.BINARY:
                raise InvalidInput(f"{place} is BINARY, which JSON cannot express: make it a STRING, as base64")
            if isinstance(kind, MapKind) and kind.key is not PlainKind.STRING:
                raise InvalidInput(f"{place} has keys of {format_kind(kind.key)}, and names in JSON are STRING")
        if (taken := _field_at(fields, path)) is not None:
            raise InvalidInput(f"{taken} is the place of the UUID: leave it out of the fields, or move uuidPointer")


@dataclass(frozen=True, slots=True)
class CsvForm:
    """Rows of CSV, with a column for each field, in order. `uuid_column` is an index of all columns; None: no UUIDs."""

    name: ClassVar[str] = "csv"
    content_type: ClassVar[str] = labels.CSV

    uuid_column: int | None = 0

    def to_plain(self) -> dict[str, object]:
        return {"csvUuidColumn": NONE if self.uuid_column is None else self.uuid_column}

    def require_holds(self, fields: Sequence[TypeField]) -> None:
        """Raise InvalidInput for a field that the messages cannot have."""
        for each in fields:
            if each.kind not in _CSV_KINDS:
                raise InvalidInput(
                    f"{each.name} is {format_kind(each.kind)}, and columns of CSV are "
                    f"{', '.join(kind.value for kind in _CSV_KINDS)}"
                )
        if self.uuid_column is not None and not 0 <= self.uuid_column <= len(fields):
            raise InvalidInput(
                f"is {self.uuid_column}, and with the UUID there are columns 0 to {len(fields)}", field="csvUuidColumn"
            )


@dataclass(frozen=True, slots=True)
class FixedForm:
    """Fixed frames of protobuf messages. Without `message` the payloads are opaque.

    `descriptors` is a `FileDescriptorSet`. `uuid_field` is the field of the UUID, or a path such as `meta.uuid`; None:
    no UUIDs.
    """

    name: ClassVar[str] = "fixed"
    content_type: ClassVar[str] = labels.FIXED_FRAMES

    descriptors: bytes = field(default=b"", repr=False)
    message: str = ""
    uuid_field: str | None = None

    @classmethod
    def of(cls, descriptors: bytes, message: str, uuid_field: str | None = "uuid") -> FixedForm:
        """Return the framing of messages of a type in descriptors, reduced to the descriptors that the type needs.

        Raises InvalidInput.
        """
        return cls(protobuf.needed_descriptors(descriptors, message), message, uuid_field)

    def to_plain(self) -> dict[str, object]:
        if not self.message:
            return {}
        return {
            "descriptorSet": base64.b64encode(self.descriptors).decode(),
            "messageType": self.message,
            "uuidField": self.uuid_field or NONE,
        }

    def require_holds(self, fields: Sequence[TypeField]) -> None:
        """Raise InvalidInput for a field that the messages cannot have."""
        if not self.message:
            if self.uuid_field is not None or self.descriptors:
                raise InvalidInput("is needed to find the messages' UUIDs", field="messageType")
            _require_whole(fields, PlainKind.BINARY)
            return
        protobuf.require_holds(protobuf.message_class(self.descriptors, self.message), fields, self.uuid_field)


@dataclass(frozen=True, slots=True)
class LinesForm:
    """Lines of any text, without UUIDs."""

    name: ClassVar[str] = "lines"
    content_type: ClassVar[str] = ""

    def to_plain(self) -> dict[str, object]:
        return {}

    def require_holds(self, fields: Sequence[TypeField]) -> None:
        """Raise InvalidInput for a field that the messages cannot have."""
        _require_whole(fields, PlainKind.STRING, PlainKind.BINARY)


FramingForm: TypeAlias = JsonForm | CsvForm | FixedForm | LinesForm
_KEYS: Final = {
    "json": ("uuidPointer",),
    "csv": ("csvUuidColumn",),
    "fixed": ("descriptorSet", "messageType", "uuidField"),
    "lines": (),
}
KEYS: Final = ("type", "description", "framing", "fields", *(key for keys in _KEYS.values() for key in keys))
"""The keys of a definition's plain form."""


@dataclass(frozen=True, slots=True)
class MessageType:
    """The definition of a message type. Raises InvalidInput if it is not valid."""

    name: str
    form: FramingForm
    fields: tuple[TypeField, ...]
    description: str = ""

    def __post_init__(self) -> None:
        validate_type_name(self.name)
        if not self.fields:
            raise InvalidInput("has no fields; name the messages' fields", field="fields")
        require_sound(self.fields)
        nested = (len(kind.fields) for _, kind in kinds_in(self.fields) if isinstance(kind, StructKind))
        if (count := len(self.fields) + sum(nested)) > MAX_FIELDS:
            raise InvalidInput(f"are {count} with those within others; there may be {MAX_FIELDS}", field="fields")
        try:
            self.form.require_holds(self.fields)
        except InvalidInput as error:
            raise InvalidInput(error.message, field=error.field or "fields") from error

    @property
    def content_type(self) -> str:
        """The `content-type` of journals of this type; empty for any."""
        return self.form.content_type

    def to_plain(self) -> dict[str, object]:
        """Return the plain form, which `of_plain` converts to an equal definition."""
        return {
            "type": self.name,
            **({"description": self.description} if self.description else {}),
            "framing": self.form.name,
            **self.form.to_plain(),
            "fields": {each.name: format_type(each) for each in self.fields},
        }

    @classmethod
    def of_plain(cls, plain: object) -> MessageType:
        """Return the definition in a plain form. Raises InvalidInput.

        `fields` is a mapping of names to types, or a text such as `id BIGINT NOT NULL, name STRING`. It may be omitted
        for a protobuf message: by default, a type has all fields of the message.
        """
        if not isinstance(plain, Mapping):
            raise InvalidInput("a definition is a mapping with the keys type, framing and fields")
        for key in plain:
            if key not in KEYS:
                raise InvalidInput(f"is not a key of a definition; there are {', '.join(KEYS)}", field=shown(str(key)))
        name, framing = _text(plain, "type"), _text(plain, "framing", "json").lower()
        if framing not in _KEYS:
            raise InvalidInput(f"{shown(framing)} is not one of {', '.join(_KEYS)}", field="framing")
        for other, keys in _KEYS.items():
            for key in keys:
                if other != framing and key in plain:
                    raise InvalidInput(f"is for framing {other}, not for {framing}: leave it out", field=key)
        form = _form(framing, plain, name)
        return cls(name, form, _fields(plain, form), _text(plain, "description", ""))

    def __str__(self) -> str:
        return f"{self.name} ({self.form.name}: {format_fields(self.fields)})"


def validate_type_name(name: str) -> str:
    """Return `name` if it can name a type, such as `shop.Order`, and fits a label's value. Raises InvalidInput."""
    return validate_token("type", name, 1, MAX_NAME_BYTES)


def _form(framing: str, plain: Mapping[Any, Any], name: str) -> FramingForm:
    if framing == "json":
        pointer = _text(plain, "uuidPointer", DEFAULT_UUID_POINTER)
        return JsonForm(None if pointer == NONE else pointer)
    if framing == "csv":
        column = plain.get("csvUuidColumn", 0)
        if isinstance(column, str) and column.isascii() and column.isdigit() and len(column) < 10:
            column = int(column)
        if column != NONE and type(column) is not int:
            raise InvalidInput(f"{shown(str(column))} is neither none nor a column, from 0 on", field="csvUuidColumn")
        return CsvForm(None if column == NONE else column)
    if framing == "lines":
        return LinesForm()
    if "descriptorSet" not in plain:
        if other := [key for key in ("messageType", "uuidField") if key in plain]:
            raise InvalidInput("goes together with descriptors of the message", field=other[0])
        return FixedForm()
    try:
        descriptors = base64.b64decode(_text(plain, "descriptorSet"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"is not base64: {error}", field="descriptorSet") from error
    uuid_field = _text(plain, "uuidField", "uuid")
    return FixedForm.of(descriptors, _text(plain, "messageType", name), None if uuid_field == NONE else uuid_field)


def _fields(plain: Mapping[Any, Any], form: FramingForm) -> tuple[TypeField, ...]:
    given = plain.get("fields")
    if given is None:
        if isinstance(form, FixedForm) and form.message:
            return protobuf.fields_of(protobuf.message_class(form.descriptors, form.message), form.uuid_field)
        if isinstance(form, FixedForm):
            return (TypeField(VALUE, PlainKind.BINARY),)
        if isinstance(form, LinesForm):
            return (TypeField(VALUE, PlainKind.STRING),)
        raise InvalidInput("are missing: name the fields of the messages", field="fields")
    if isinstance(given, str):
        return parse_fields(given)
    if not isinstance(given, Mapping):
        raise InvalidInput(
            "are no mapping of names to types, and no text such as `id BIGINT, name STRING`", field="fields"
        )
    found = []
    for name, text in given.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidInput(f"{shown(str(name))} has no text as its type, such as BIGINT NOT NULL", field="fields")
        try:
            found.append(TypeField(name, *parse_type(text)))
        except InvalidInput as error:
            raise InvalidInput(f"{shown(name)}: {error.message}", field="fields") from error
    return tuple(found)


def _field_at(fields: Sequence[TypeField], path: Sequence[str]) -> str | None:
    """Return the place of the field at a path of JSON, or of a field on that path which is not an object; or None."""
    for at, name in enumerate(path, 1):
        found = next((each for each in fields if each.name == name), None)
        if found is None:
            return None
        if at == len(path) or not isinstance(found.kind, StructKind):
            return ".".join(path[:at])
        fields = found.kind.fields
    return None


def _require_whole(fields: Sequence[TypeField], *kinds: PlainKind) -> None:
    if len(fields) != 1 or fields[0].name != VALUE or fields[0].kind not in kinds:
        wanted = " or ".join(kind.value for kind in kinds)
        raise InvalidInput(f"are {format_fields(fields)}: such messages have one field, {VALUE} {wanted}")


def _text(plain: Mapping[Any, Any], key: str, default: str | None = None) -> str:
    value = plain.get(key, default)
    if value is None:
        raise InvalidInput("is missing", field=key)
    if not isinstance(value, str):
        raise InvalidInput(f"{shown(str(value))} is not a text", field=key)
    return value
