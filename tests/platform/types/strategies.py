"""Random types of fields for tests."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

from hypothesis import strategies as st

from coranto.types.kinds import ArrayKind, DecimalKind, Kind, MapKind, PlainKind, StructKind, TypeField, widens

NAMES = st.one_of(
    st.sampled_from(["id", "Name", "a.b", "x y", "`", "a`b", "ä", "not", "null", "ARRAY", "1st", "_meta", "<", ","]),
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=5),
)
DECIMALS = st.integers(1, 38).flatmap(
    lambda precision: st.builds(DecimalKind, st.just(precision), st.integers(0, precision))
)


def fields_of(kinds: st.SearchStrategy[Kind], most: int = 4) -> st.SearchStrategy[tuple[TypeField, ...]]:
    fields = st.lists(
        st.builds(TypeField, NAMES, kinds, st.booleans()),
        min_size=1,
        max_size=most,
        unique_by=lambda field: field.name.casefold(),
    )
    return fields.map(tuple)


def kinds_of(plain: st.SearchStrategy[Kind], keys: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.builds(ArrayKind, inner), st.builds(MapKind, keys, inner), st.builds(StructKind, fields_of(inner))
        ),
        max_leaves=6,
    )


PLAIN: st.SearchStrategy[Kind] = st.one_of(st.sampled_from(list(PlainKind)), DECIMALS)
KINDS = kinds_of(PLAIN, PLAIN)
JSON_KINDS = kinds_of(
    st.one_of(st.sampled_from([kind for kind in PlainKind if kind is not PlainKind.BINARY]), DECIMALS),
    st.just(PlainKind.STRING),
)
"""The types that fields of JSON may have."""
FIELDS = fields_of(KINDS)
JSON_FIELDS = fields_of(JSON_KINDS)


# -- Messages and versions ---------------------------------------------------------------------------------------------

_MOMENTS = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2100, 1, 1))
_PLAIN_VALUES: dict[PlainKind, st.SearchStrategy[object]] = {
    PlainKind.BOOLEAN: st.booleans(),
    PlainKind.TINYINT: st.integers(-(2**7), 2**7 - 1),
    PlainKind.SMALLINT: st.integers(-(2**15), 2**15 - 1),
    PlainKind.INT: st.integers(-(2**31), 2**31 - 1),
    PlainKind.BIGINT: st.integers(-(2**63), 2**63 - 1),
    PlainKind.FLOAT: st.floats(width=32, allow_nan=False, allow_infinity=False),
    PlainKind.DOUBLE: st.floats(allow_nan=False, allow_infinity=False),
    PlainKind.STRING: st.text(max_size=6),
    PlainKind.DATE: st.dates(dt.date(1, 1, 1)).map(dt.date.isoformat),
    PlainKind.TIMESTAMP: st.tuples(_MOMENTS, st.sampled_from(["Z", "+02:00", "-09:30"])).map(
        lambda found: found[0].isoformat() + found[1]
    ),
    PlainKind.TIMESTAMP_NTZ: _MOMENTS.map(dt.datetime.isoformat),
}


def json_values(kind: Kind) -> st.SearchStrategy[Any]:
    """Return the values of a type that fields of JSON may have."""
    match kind:
        case DecimalKind(precision, scale):
            whole = st.integers(-(10**precision) + 1, 10**precision - 1)
            return whole.map(lambda number: str(decimal.Decimal(number).scaleb(-scale, decimal.Context(prec=50))))
        case ArrayKind(element):
            return st.lists(st.none() | json_values(element), max_size=3)
        case MapKind(_, value):
            return st.dictionaries(st.text(max_size=4), st.none() | json_values(value), max_size=3)
        case StructKind(fields):
            return json_messages(fields)
    return _PLAIN_VALUES[kind]


def json_messages(fields: tuple[TypeField, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """Return messages that have the fields; nullable ones may be null or missing."""
    given_ = {field.name: json_values(field.kind) for field in fields if not field.nullable}
    optional = {field.name: st.none() | json_values(field.kind) for field in fields if field.nullable}
    return st.fixed_dictionaries(given_, optional=optional)


def later_fields(fields: tuple[TypeField, ...]) -> st.SearchStrategy[tuple[TypeField, ...]]:
    """Return backward compatible versions of fields: with dropped, added, wider and nullable ones."""
    kept = st.tuples(*(_later_field(field) for field in fields))
    present = {field.name.casefold() for field in fields}
    added = st.lists(
        st.builds(TypeField, NAMES.filter(lambda name: name.casefold() not in present), JSON_KINDS),
        max_size=2,
        unique_by=lambda field: field.name.casefold(),
    )
    return st.builds(
        lambda old, new, order: tuple(order.sample([*filter(None, old), *new], len([*filter(None, old), *new]))),
        kept,
        added,
        st.randoms(use_true_random=False),
    ).filter(bool)


def _later_field(field: TypeField) -> st.SearchStrategy[TypeField | None]:
    nullable = st.booleans() if not field.nullable else st.just(True)
    return st.none() | st.builds(TypeField, st.just(field.name), _later_kind(field.kind), nullable)


def _later_kind(kind: Kind) -> st.SearchStrategy[Kind]:
    match kind:
        case ArrayKind(element):
            return st.builds(ArrayKind, _later_kind(element))
        case MapKind(key, value):
            return st.builds(MapKind, st.just(key), _later_kind(value))
        case StructKind(fields):
            return st.builds(StructKind, later_fields(fields))
        case DecimalKind(precision, scale):
            more = st.integers(0, 38 - precision)
            return more.flatmap(
                lambda by: st.integers(0, by).map(lambda behind: DecimalKind(precision + by, scale + behind))
            )
    wider = [each for each in PlainKind if widens(kind, each)]
    return st.sampled_from([kind, *wider])
