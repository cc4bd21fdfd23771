"""Values of PostgreSQL in the form of message types."""

from __future__ import annotations

from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.ingest.engine import Ingest
from coranto.ingest.postgres.source import PostgresSource
from coranto.ingest.postgres.values import ColumnType, ColumnTypes, parse_array
from coranto.types.kinds import format_kind
from coranto.types.registry import TypeRegistry
from tests.platform.ingest.lists import events
from tests.platform.ingest.postgres.database import Database

VALUES = {
    "a": ("boolean", "true", True, "BOOLEAN"),
    "b": ("smallint", "-5", -5, "SMALLINT"),
    "c": ("integer", "5", 5, "INT"),
    "d": ("bigint", "9223372036854775807", 9223372036854775807, "BIGINT"),
    "e": ("real", "1.1", 1.1, "FLOAT"),
    "f": ("double precision", "'NaN'", "NaN", "DOUBLE"),
    "g": ("numeric(10, 2)", "12.5", "12.50", "DECIMAL(10, 2)"),
    "h": ("numeric", "1e30", "1" + "0" * 30, "STRING"),
    "i": ("text", "'a''b\\c'", "a'b\\c", "STRING"),
    "j": ("varchar(5)", "'äöü'", "äöü", "STRING"),
    "k": ("bytea", r"'\x00ff'", "AP8=", "STRING"),
    "l": ("date", "'2024-02-29'", "2024-02-29", "DATE"),
    "m": ("timestamp", "'2024-02-29 10:00:00.5'", "2024-02-29T10:00:00.5", "TIMESTAMP_NTZ"),
    "n": ("timestamptz", "'2024-02-29 10:00:00.25+02'", "2024-02-29T08:00:00.25Z", "TIMESTAMP"),
    "o": ("interval", "'1 day 2 hours'", "P1DT2H", "STRING"),
    "p": ("uuid", "'00000000-0000-0000-0000-00000000000a'", "00000000-0000-0000-0000-00000000000a", "STRING"),
    "q": ("jsonb", """'{"a": [1, 2.50]}'""", '{"a": [1, 2.50]}', "STRING"),
    "r": ("int[]", "'{1,NULL,3}'", [1, None, 3], "ARRAY<INT>"),
    "s": ("text[]", """ARRAY['a,b', '"{}\\', 'NULL', NULL]""", ["a,b", '"{}\\', "NULL", None], "ARRAY<STRING>"),
    "t": ("mood", "'glad'", "glad", "STRING"),
    "u": ("cents", "7", 7, "BIGINT"),
    "v": ("cents[]", "'{7,8}'", [7, 8], "ARRAY<BIGINT>"),
    "w": ("int4range", "'[1,5)'", "[1,5)", "STRING"),
    "x": ("price", "5", "5.000", "DECIMAL(8, 3)"),
    "y": ("timestamptz[]", "'{2024-02-29 10:00+00}'", ["2024-02-29T10:00:00Z"], "ARRAY<TIMESTAMP>"),
    "z": ("timestamptz", "'infinity'", "infinity", "TIMESTAMP"),
}


@pytest.mark.integration
async def test_rows_and_changes_have_the_same_values(client: JournalClient, database: Database) -> None:
    columns = ", ".join(f"{name} {each[0]}" for name, each in VALUES.items())
    values = ", ".join(each[1] for each in VALUES.values())
    database.execute("CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE DOMAIN cents AS bigint CHECK (VALUE > 0)")
    database.execute(f"CREATE DOMAIN price AS numeric(8, 3); CREATE TABLE orders (id int PRIMARY KEY, {columns})")
    database.execute("ALTER TABLE orders REPLICA IDENTITY FULL; CREATE PUBLICATION shop FOR TABLE orders")
    database.execute(
        f"INSERT INTO orders VALUES (1, {values}); INSERT INTO orders VALUES (2); UPDATE orders SET z = NULL"
    )
    # The type of `z` has no infinity.
    given = {"type": "shop.Order", "registry": "types/registry", "registers": True, "keeps_poison": True}

    async def run() -> None:
        spec = database.spec(given=given)
        await Ingest(client, spec, PostgresSource(spec.options, "loads")).run()

    await run()
    database.execute(f"INSERT INTO orders VALUES (3, {values}); UPDATE orders SET z = NULL WHERE id = 3")
    await run()
    expected: dict[str, Any] = {name: each[2] for name, each in VALUES.items()} | {"z": None}
    found = {(each["_meta"]["op"], each["id"]): each for each in await events(client)}
    for number in (("read", 1), ("update", 3)):
        assert {name: found[number][name] for name in VALUES} == expected
    assert found["update", 3]["_meta"]["before"] == {"id": 3, **expected, "z": "infinity"}
    assert {found["read", 2][name] for name in VALUES} == {None}
    version = await TypeRegistry(client, "types/registry").find("shop.Order")
    kinds = {each.name: format_kind(each.kind) for each in version.definition.fields}
    assert kinds == {"id": "INT", **{name: each[3] for name, each in VALUES.items()}}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", []),
        ("{{1,2},{3,4}}", [["1", "2"], ["3", "4"]]),
        ("[0:1]={1,2}", ["1", "2"]),
        (r'{"a\"b","\\",NULL,"NULL"}', ['a"b', "\\", None, "NULL"]),
    ],
)
def test_arrays(text: str, found: list[Any]) -> None:
    assert parse_array(text, bytes.decode) == found


def test_the_database_is_queried_once_for_each_type() -> None:
    types = ColumnTypes()
    assert types.unknown([23, 99_999, 25]) == [25, 99_999]
    types.add(25, ColumnType(25))
    types.add(99_999, ColumnType(23))
    assert types.unknown([23, 99_999, 25]) == []
    assert types.converter(99_999)(b"7") == 7


def test_bc_times_and_infinite_values() -> None:
    types = ColumnTypes()
    assert types.converter(1184)(b"0044-03-15 00:00:00+00 BC") == "0044-03-15T00:00:00Z BC"
    assert types.converter(1114)(b"-infinity") == "-infinity"
    assert types.converter(701)(b"-Infinity") == "-Infinity"
