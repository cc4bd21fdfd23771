"""Names of tables."""

from __future__ import annotations

from coranto.ingest.postgres.names import quoted, table_name


def test_names_are_quoted_where_necessary() -> None:
    assert quoted("public", "orders_2") == "public.orders_2"
    assert quoted("public", "Orders") == 'public."Orders"'
    assert quoted('a"b', "2x") == '"a""b"."2x"'


def test_different_tables_have_different_names() -> None:
    assert table_name("public", "My orders") == "public.My orders"
    assert table_name("a.b", "c") == '"a.b".c'
    assert table_name("a", "b.c") == 'a."b.c"'
    assert table_name('"a', "b") == '"""a".b'
