"""Fields of message types for Avro records, as `AvroValues` decodes them.

An enum, a uuid, a time, bytes and fixed are STRING. A union is the type that holds all of its branches, and nullable if
one of them is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from coranto.errors import InvalidInput
from coranto.types.kinds import MAX_PRECISION, ArrayKind, DecimalKind, Kind, MapKind, PlainKind, StructKind, TypeField
from coranto.types.merging import merged_kind

_PRIMITIVES: Final = {
    "boolean": PlainKind.BOOLEAN,
    "int": PlainKind.INT,
    "long": PlainKind.BIGINT,
    "float": PlainKind.FLOAT,
    "double": PlainKind.DOUBLE,
    "bytes": PlainKind.STRING,
    "string": PlainKind.STRING,
}
_LOGICAL: Final = {
    ("int", "date"): PlainKind.DATE,
    ("int", "time-millis"): PlainKind.STRING,
    ("long", "time-micros"): PlainKind.STRING,
    **{("long", f"timestamp-{unit}"): PlainKind.TIMESTAMP for unit in ("millis", "micros")},
    **{("long", f"local-timestamp-{unit}"): PlainKind.TIMESTAMP_NTZ for unit in ("millis", "micros")},
}


def fields_of_avro(text: str, referenced: Callable[[], Mapping[str, Any]]) -> tuple[TypeField, ...]:
    """Return the fields of a schema in JSON. `referenced` returns the schemas that its references define, by full name.

    Raises InvalidInput for a schema that fields cannot represent.
    """
    try:
        kind, _ = _Schemas(referenced).kind(json.loads(text), "", "")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"the schema cannot be read: {error!r}") from error
    if not isinstance(kind, StructKind):
        raise InvalidInput("the schema is not one of a record, and an event has fields")
    return kind.fields


def names_of_avro(schema: Any, space: str = "") -> dict[str, Any]:
    """Return the named schemas within a schema, each with its namespace, by full name."""
    if isinstance(schema, list):
        return {name: each for one in schema for name, each in names_of_avro(one, space).items()}
    if not isinstance(schema, dict):
        return {}
    found = {}
    if schema.get("type") in ("record", "error", "enum", "fixed"):
        name = _full_name(schema, space)
        space = name.rpartition(".")[0]
        found[name] = {**schema, "name": name}
    for inner in ("type", "items", "values"):
        if not isinstance(schema.get(inner), str):
            found |= names_of_avro(schema.get(inner), space)
    for field in schema.get("fields", ()):
        found |= names_of_avro(field["type"], space)
    return found


def _full_name(schema: Mapping[str, Any], space: str) -> str:
    name, space = str(schema["name"]), str(schema.get("namespace", space))
    return name if "." in name or not space else f"{space}.{name}"


class _Schemas:
    """Converts schemas to types, and keeps named schemas for later references."""

    def __init__(self, referenced: Callable[[], Mapping[str, Any]]) -> None:
        self._referenced = referenced
        self._names: dict[str, Any] = {}
        self._within: set[str] = set()

    def kind(self, schema: Any, space: str, place: str) -> tuple[Kind | None, bool]:
        """Return the type of a schema's values (None if they are always null), and True if they may be null."""
        if isinstance(schema, list):
            return self._union(schema, space, place)
        if isinstance(schema, str):
            if schema == "null":
                return None, True
            return (_PRIMITIVES[schema] if schema in _PRIMITIVES else self._named(schema, space, place)), False
        kind = schema["type"]
        if not isinstance(kind, str):
            return self.kind(kind, space, place)
        logical = schema.get("logicalType")
        if kind in ("record", "error"):
            return self._record(schema, space, place), False
        if kind == "array":
            return ArrayKind(self._inner(schema["items"], space, f"{place}[]")), False
        if kind == "map":
            return MapKind(PlainKind.STRING, self._inner(schema["values"], space, f"{place}{{}}")), False
        if kind in ("enum", "fixed"):
            self._names[_full_name(schema, space)] = schema
        if logical == "decimal" and kind in ("bytes", "fixed"):
            precision, scale = int(schema["precision"]), int(schema.get("scale", 0))
            fits = 0 < precision <= MAX_PRECISION and 0 <= scale <= precision
            return (DecimalKind(precision, scale) if fits else PlainKind.STRING), False
        if kind in ("enum", "fixed"):
            return PlainKind.STRING, False
        known = _LOGICAL.get((kind, logical)) if isinstance(logical, str) else None
        return (known, False) if known is not None else self.kind(kind, space, place)

    def _inner(self, schema: Any, space: str, place: str) -> Kind:
        kind, _ = self.kind(schema, space, place)
        return PlainKind.STRING if kind is None else kind

    def _union(self, branches: list[Any], space: str, place: str) -> tuple[Kind | None, bool]:
        whole: Kind | None = None
        nullable = False
        for branch in branches:
            kind, is_null = self.kind(branch, space, place)
            nullable = nullable or is_null
            if kind is not None:
                whole = kind if whole is None else merged_kind(whole, kind, place or "the record")
        return whole, nullable

    def _named(self, name: str, space: str, place: str) -> Kind:
        full = name if "." in name or not space else f"{space}.{name}"
        if full not in self._names and name not in self._names:
            self._names = {**self._referenced(), **self._names}
        full = full if full in self._names else name
        if full not in self._names:
            raise InvalidInput(f"{place} is of {name}, which the schema and its references do not define")
        kind, _ = self.kind(self._names[full], full.rpartition(".")[0], place)
        assert kind is not None
        return kind

    def _record(self, schema: Mapping[str, Any], space: str, place: str) -> Kind:
        name = _full_name(schema, space)
        if name in self._within:
            raise InvalidInput(f"{place} is of {name}, which contains itself: columns cannot express that")
        self._names[name] = schema
        self._within.add(name)
        fields = []
        for each in schema["fields"]:
            kind, nullable = self.kind(each["type"], name.rpartition(".")[0], _at(place, each["name"]))
            fields.append(TypeField(str(each["name"]), PlainKind.STRING if kind is None else kind, nullable))
        self._within.discard(name)
        if not fields:
            raise InvalidInput(f"{place or name} has no fields")
        return StructKind(tuple(fields))


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
