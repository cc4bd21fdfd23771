"""Names of tables."""

from __future__ import annotations

from coranto.ingest.postgres.names import quoted, table_name


def test_names_are_quoted_where_they_need_to_be() -> None:
    assert quoted("public", "orders_2") == "public.orders_2"
    assert quoted("public", "Orders") == 'public."Orders"'
    assert quoted('a"b', "2x") == '"a""b"."2x"'


def test_two_tables_never_have_one_name() -> None:
    assert table_name("public", "My orders") == "public.My orders"
    assert table_name("a.b", "c") == '"a.b".c'
    assert table_name("a", "b.c") == 'a."b.c"'
    assert table_name('"a', "b") == '"""a".b'
