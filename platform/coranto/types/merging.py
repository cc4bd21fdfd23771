"""The union of two lists of fields: all fields of both, each with a type that holds the values of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from coranto.errors import InvalidInput
from coranto.types.kinds import (
    INTEGERS,
    MAX_PRECISION,
    ArrayKind,
    DecimalKind,
    Kind,
    MapKind,
    PlainKind,
    StructKind,
    TypeField,
    format_kind,
    widens,
)

_NUMBERS: Final = (*INTEGERS, PlainKind.FLOAT, PlainKind.DOUBLE)


def merged_fields(known: Sequence[TypeField], more: Sequence[TypeField], place: str = "") -> tuple[TypeField, ...]:
    """Return the fields of `known`, then the fields that only `more` has. A field that one of them lacks is nullable.

    Raises InvalidInput for a field if no type holds the values of both of its types.
    """
    others = {field.name: field for field in more}
    found = []
    for field in known:
        other = others.pop(field.name, None)
        if other is None:
            found.append(TypeField(field.name, field.kind))
            continue
        kind = merged_kind(field.kind, other.kind, f"{place}.{field.name}" if place else field.name)
        found.append(TypeField(field.name, kind, field.nullable or other.nullable))
    return (*found, *(TypeField(field.name, field.kind) for field in others.values()))


def merged_kind(one: Kind, other: Kind, place: str) -> Kind:
    """Return the narrowest type that holds the values of two types. Raises InvalidInput if there is none."""
    match one, other:
        case _ if one == other or widens(other, one):
            return one
        case _ if widens(one, other):
            return other
        case StructKind(mine), StructKind(theirs):
            return StructKind(merged_fields(mine, theirs, place))
        case ArrayKind(mine), ArrayKind(theirs):
            return ArrayKind(merged_kind(mine, theirs, f"{place}[]"))
        case MapKind(key, mine), MapKind(other_key, theirs) if key == other_key:
            return MapKind(key, merged_kind(mine, theirs, f"{place}{{}}"))
        case DecimalKind(), DecimalKind():
            scale = max(one.scale, other.scale)
            precision = scale + max(one.precision - one.scale, other.precision - other.scale)
            if precision <= MAX_PRECISION:
                return DecimalKind(precision, scale)
        case PlainKind(), PlainKind():
            for each in _NUMBERS:
                if widens(one, each) and widens(other, each):
                    return each
    raise InvalidInput(f"{place} is {format_kind(one)}, and {format_kind(other)}, and no type holds both")
