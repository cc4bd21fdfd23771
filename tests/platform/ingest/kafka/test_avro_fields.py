"""Fields for Avro schemas: names and namespaces, unions, and unsupported schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.kafka.avro_fields import fields_of_avro, names_of_avro
from coranto.types.kinds import format_fields


def record(*fields: tuple[str, Any], name: str = "shop.Order") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": each, "type": kind} for each, kind in fields]}


def fields_text(schema: Any, **others: Any) -> str:
    return format_fields(fields_of_avro(json.dumps(schema), lambda: others))


def decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def test_types() -> None:
    assert fields_text(record(("a", "bytes"), ("b", "float"), ("c", decimal(9, 2)), ("d", decimal(60, 2)))) == (
        "a STRING NOT NULL, b FLOAT NOT NULL, c DECIMAL(9, 2) NOT NULL, d STRING NOT NULL"
    )
    nanos = {"type": "long", "logicalType": "timestamp-nanos"}
    assert fields_text(record(("a", {"type": "int"}), ("b", {"type": {"type": "long"}}), ("c", nanos))) == (
        "a INT NOT NULL, b BIGINT NOT NULL, c BIGINT NOT NULL"
    )


def test_names_are_found_in_their_namespaces() -> None:
    color = {"type": "enum", "name": "Color", "symbols": ["RED"]}
    inner = record(("c", color), ("d", "Color"), name="Line")
    assert fields_text(record(("lines", {"type": "array", "items": inner}), ("last", ["null", "shop.Line"]))) == (
        "lines ARRAY<STRUCT<c: STRING NOT NULL, d: STRING NOT NULL>> NOT NULL, "
        "last STRUCT<c: STRING NOT NULL, d: STRING NOT NULL>"
    )
    names = names_of_avro(record(("l", ["null", inner]), name="a.B"))
    assert names.keys() == {"a.B", "a.Line", "a.Color"}
    assert fields_text(record(("x", "a.Line"), ("y", "a.Color")), **names) == (
        "x STRUCT<c: STRING NOT NULL, d: STRING NOT NULL> NOT NULL, y STRING NOT NULL"
    )


def test_a_union_becomes_a_type_that_holds_its_branches() -> None:
    cat, dog = record(("n", "int"), ("cat", "int"), name="Cat"), record(("n", "long"), name="Dog")
    assert fields_text(record(("pet", ["null", cat, dog]), ("n", ["int", "float"]))) == (
        "pet STRUCT<n: BIGINT NOT NULL, cat: INT>, n DOUBLE NOT NULL"
    )
    with pytest.raises(InvalidInput, match="pet is INT, and STRING, and no type holds both"):
        fields_text(record(("pet", ["int", "string"])))


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
def test_schemas_without_matching_fields_are_refused(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        fields_text(schema)
