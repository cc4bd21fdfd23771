"""Fields for schemas of Avro: names and namespaces, unions, and schemas that no fields hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.kafka.avro_fields import fields_of_avro, names_of_avro
from coranto.types.kinds import format_fields


def record(*fields: tuple[str, Any], name: str = "shop.Order") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": each, "type": kind} for each, kind in fields]}


def told(schema: Any, **others: Any) -> str:
    return format_fields(fields_of_avro(json.dumps(schema), lambda: others))


def decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def test_types() -> None:
    assert told(record(("a", "bytes"), ("b", "float"), ("c", decimal(9, 2)), ("d", decimal(60, 2)))) == (
        "a STRING NOT NULL, b FLOAT NOT NULL, c DECIMAL(9, 2) NOT NULL, d STRING NOT NULL"
    )
    nanos = {"type": "long", "logicalType": "timestamp-nanos"}
    assert told(record(("a", {"type": "int"}), ("b", {"type": {"type": "long"}}), ("c", nanos))) == (
        "a INT NOT NULL, b BIGINT NOT NULL, c BIGINT NOT NULL"
    )


def test_names_are_found_in_their_namespaces() -> None:
    color = {"type": "enum", "name": "Color", "symbols": ["RED"]}
    inner = record(("c", color), ("d", "Color"), name="Line")
    assert told(record(("lines", {"type": "array", "items": inner}), ("last", ["null", "shop.Line"]))) == (
        "lines ARRAY<STRUCT<c: STRING NOT NULL, d: STRING NOT NULL>> NOT NULL, "
        "last STRUCT<c: STRING NOT NULL, d: STRING NOT NULL>"
    )
    names = names_of_avro(record(("l", ["null", inner]), name="a.B"))
    assert names.keys() == {"a.B", "a.Line", "a.Color"}
    assert told(record(("x", "a.Line"), ("y", "a.Color")), **names) == (
        "x STRUCT<c: STRING NOT NULL, d: STRING NOT NULL> NOT NULL, y STRING NOT NULL"
    )


def test_a_union_is_what_holds_its_branches() -> None:
    cat, dog = record(("n", "int"), ("cat", "int"), name="Cat"), record(("n", "long"), name="Dog")
    assert told(record(("pet", ["null", cat, dog]), ("n", ["int", "float"]))) == (
        "pet STRUCT<n: BIGINT NOT NULL, cat: INT>, n DOUBLE NOT NULL"
    )
    with pytest.raises(InvalidInput, match="pet is INT, and STRING, and no type holds both"):
        told(record(("pet", ["int", "string"])))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("long", "not one of a record"),
        (record(), "shop.Order has no fields"),
        (record(("a", "Nowhere")), "a is of Nowhere, which the schema and its references do not define"),
        (record(("next", ["null", "Order"])), r"next is of shop.Order, which contains itself"),
        ({"type": "record", "fields": []}, "cannot be read"),
    ],
)
def test_schemas_that_no_fields_hold(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        told(schema)
