"""The columns of tables: types in databases, keys, and types that a store does not support."""

from __future__ import annotations

import pytest
from sqlalchemy.dialects import mysql, postgresql

from coranto.errors import InvalidInput
from coranto_consumers.tables import read_table
from coranto_consumers.tables.columns import arrow_columns, layout_of, sql_table

FILE = """
name: shop-orders
input: {{stream: shop/orders}}
columns: "{columns}"
store: {store}
table: orders
"""


def layout(columns: str, more: str = "", store: str = "postgresql://h/d") -> object:
    return layout_of(read_table(FILE.format(columns=columns, store=store) + more))


def test_types_of_databases() -> None:
    found = layout_of(
        read_table(
            FILE.format(
                columns="k STRING, a TINYINT, b INT, c BIGINT, d FLOAT, e DECIMAL(30, 4), f BOOLEAN NOT NULL, "
                "g TIMESTAMP, h TIMESTAMP_NTZ, i STRING, j ARRAY<INT>",
                store="postgresql://h/d",
            )
            + "mode: upsert\nkey: k\n"
        )
    )
    table = sql_table(found)
    types = [each.type.compile(postgresql.dialect()) for each in table.c]  # type: ignore[no-untyped-call]
    assert types == [
        *("TEXT", "SMALLINT", "INTEGER", "BIGINT", "DOUBLE PRECISION", "NUMERIC(30, 4)", "BOOLEAN"),
        *("TIMESTAMP WITH TIME ZONE", "TIMESTAMP WITHOUT TIME ZONE", "TEXT", "JSON"),
    ]
    assert table.c.k.type.compile(mysql.dialect()) == "VARCHAR(512)"  # type: ignore[no-untyped-call]
    assert [each.name for each in table.c if not each.nullable] == ["k", "f"]
    assert [each.name for each in table.primary_key] == ["k"]
    schema = arrow_columns(found.messages)
    assert [name for name in schema.names if not schema.field(name).nullable] == ["k", "f"]


def test_the_operation_field_is_not_a_column() -> None:
    found = layout_of(
        read_table(
            FILE.format(columns="id INT, gone BOOLEAN", store="postgresql://h/d")
            + "mode: changes\nkey: id\noperation: {column: gone}\n"
        )
    )
    assert (found.names, [each.name for each in found.messages]) == (["id"], ["id", "gone"])


@pytest.mark.parametrize(
    ("columns", "more", "store", "problem"),
    [
        ("id DOUBLE", "mode: upsert\nkey: id\n", "postgresql://h/d", "'id' is DOUBLE, whose values are not compared"),
        ("id ARRAY<INT>", "mode: upsert\nkey: id\n", "postgresql://h/d", "choose a key of whole numbers"),
        ("n DECIMAL(20, 2)", "", "sqlite:////s.db", "SQLite keeps 15 digits"),
        (
            "id INT, op INT",
            "mode: changes\nkey: id\noperation: {column: op, deletes: [d]}\n",
            "sqlite:////s.db",
            "INT, ",
        ),
        ("id INT, op STRING", "mode: changes\nkey: id\noperation: {column: op}\n", "sqlite:////s.db", "add `deletes`"),
    ],
)
def test_unsupported_types_are_refused(columns: str, more: str, store: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        layout(columns, more, store)
