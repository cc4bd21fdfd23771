"""Files of tables, and errors in them."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.types.kinds import PlainKind, TypeField
from coranto_consumers.tables import read_table
from coranto_consumers.tables.spec import OperationColumn

FILE = """
name: shop-orders
input: {stream: shop/orders}
columns: id BIGINT, customer STRING, op STRING
store: sqlite:////srv/shop.db
table: orders
"""
UPSERT = FILE + "mode: upsert\nkey: id\n"


def test_a_minimal_file_appends() -> None:
    spec = read_table(FILE)
    assert (spec.name, spec.table, spec.mode, spec.runner, spec.evolves) == (
        *("shop-orders", "orders", "append", "shard"),
        False,
    )
    assert spec.input.stream == "shop/orders"
    assert "shop/orders/segment/" in spec.input.selector
    assert spec.columns[0] == TypeField("id", PlainKind.BIGINT)
    assert spec.interval == 0


def test_all_fields() -> None:
    spec = read_table(
        """
name: ${WHO}-orders
input: {prefix: shop/orders/, keyed: true}
registry: types/registry
type: shop.Order@3
store: iceberg://lake
table: shop.orders
mode: changes
key: [id, customer]
operation: {column: op, deletes: [d]}
runner: spark
filter: cents > 5
select: {id: id, customer: lower(customer)}
misfits: nulls
evolve: true
interval: 1m
""",
        {"WHO": "shop"},
    )
    assert spec.store_url == "iceberg://lake/shop.orders"
    assert (spec.name, spec.key, spec.operation) == ("shop-orders", ("id", "customer"), OperationColumn("op", ("d",)))
    assert (spec.filter, spec.select) == ("cents > 5", (("id", "id"), ("customer", "lower(customer)")))
    assert (spec.keeps_misfits, spec.evolves, spec.interval, spec.input.keyed) == (True, True, 60, True)
    assert str(spec.input).startswith("journals name:prefix=")
    assert read_table(
        UPSERT.replace("sqlite:////srv/shop.db", "iceberg://lake").replace("orders\n", "a.b\n", 2)
    ).interval


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty; it needs the fields name, input, store, table"),
        ("name: shop-orders", "line 1: the field 'input' is missing"),
        (FILE + "sums: true\n", "line 7: there is no field 'sums' here"),
        (FILE.replace("shop-orders", "x"), "line 2: "),
        (FILE.replace("{stream: shop/orders}", "{stream: a/b, journal: c/d}"), "give one of stream, journal"),
        (FILE.replace("{stream: shop/orders}", "{prefix: shop/orders}"), "does not end with a slash"),
        (FILE.replace("{stream: shop/orders}", "{stream: shop/orders, keyed: true}"), "leave `keyed` out"),
        (FILE.replace("{stream: shop/orders}", "{selector: '=x'}"), "line 3: "),
        (FILE.replace("sqlite:////srv/shop.db", "redis://x"), "line 5: 'redis' is not supported"),
        (FILE.replace("sqlite:////srv/shop.db", "iceberg://lake/shop.orders"), "not like iceberg://CATALOG; `table`"),
        (FILE.replace("sqlite:////srv/shop.db", "iceberg://lake"), "'orders' is not like namespace.name"),
        (FILE.replace("table: orders", "table: a;drop"), "is not a name of up to 63"),
        (FILE.replace("id BIGINT", "id NUMBER"), "line 4: "),
        (FILE.replace("id BIGINT", "_offset BIGINT"), "line 4: '_offset' is a name that Coranto uses"),
        (FILE + "registry: types/registry\n", "either `columns`, or the `registry`"),
        (FILE + "type: shop.Order\n", "a type is found in a registry"),
        (FILE + "key: id\n", "rows that are appended have no key"),
        (FILE + "mode: upsert\n", "line 7: `mode: upsert` needs a `key`"),
        (FILE + "mode: upsert\nkey: [id, id]\n", "each once"),
        (FILE + "mode: upsert\nkey: number\n", "the key 'number' is not among the table's columns id, customer, op"),
        (UPSERT + "operation: {column: op}\n", "only `mode: changes` has an operation"),
        (FILE + "mode: changes\nkey: id\n", "`mode: changes` needs an `operation`"),
        (FILE + "mode: changes\nkey: id\noperation: {column: op, deletes: []}\n", "so nothing marks deletions"),
        (FILE + "mode: changes\nkey: id\noperation: {column: no}\n", "there is no column 'no' among id, customer, op"),
        (FILE + "mode: changes\nkey: op\noperation: {column: op}\n", "the key 'op' is not among the table's columns"),
        (FILE + "filter: id > 5\n", "line 7: `filter` has Spark SQL, which needs Spark: add `runner: spark`"),
        (FILE + "select: {id: id}\n", "line 7: `select` has Spark SQL"),
        (FILE + "runner: spark\nselect: {_clock: id}\n", "'_clock' is a name that Coranto uses"),
        (FILE + "mode: replace\n", "mode is 'replace'; it may be append, upsert, changes"),
        (FILE.replace("shop.db", "${NOWHERE}"), "the environment has no variable NOWHERE"),
    ],
)
def test_errors_have_line_numbers(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_table(text, {})
    assert problem in str(refused.value)


def test_errors_contain_no_secrets() -> None:
    wrong = FILE.replace("sqlite:////srv/shop.db", "postgres+nothing://u:s3cret@h/d")
    with pytest.raises(InvalidInput) as refused:
        read_table(wrong, {})
    assert "s3cret" not in str(refused.value)
