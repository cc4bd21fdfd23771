"""The options of tables in an ingest file."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.ingest import read_spec
from coranto.ingest.postgres.options import PostgresOptions

URL = "postgresql://reader@db/shop"


def read(options: str, more: str = "") -> PostgresOptions:
    found = read_spec(f"name: Orders-1\nstream: shop/orders\nsource:\n  postgres: {{{options}}}\n{more}")
    assert isinstance(found.options, PostgresOptions)
    return found.options


def test_required_options() -> None:
    found = read(f'url: "{URL}", publication: shop')
    assert found == PostgresOptions(URL, "shop")
    assert found.slot_of("Orders-1") == "coranto_orders_1"


def test_all_options() -> None:
    found = read(
        f'url: "{URL}", publication: Shop, slot: mine, operation: op, toast: omit, truncate: event, '
        "transaction: 1048576, larger: divide, look: 1m"
    )
    assert found == PostgresOptions(URL, "Shop", "mine", "op", True, "event", 1 << 20, True, 60.0)
    assert found.slot_of("Orders-1") == "mine"


@pytest.mark.parametrize(
    ("options", "more", "problem"),
    [
        ('url: "host=db", publication: shop', "", "line 4: the url does not begin with postgresql://"),
        (f'url: "{URL}"', "", "line 4: the field 'publication' is missing"),
        (f'url: "{URL}", publication: ""', "", "line 4: '' is not a name of a publication"),
        (f'url: "{URL}", publication: shop, slot: A-b', "", "line 4: 'A-b' is not a name of a slot"),
        (f'url: "{URL}", publication: shop, truncate: never', "", "truncate is 'never'; it may be fail, event, skip"),
        (f'url: "{URL}", publication: shop, transaction: 5', "", "line 4: transaction is 5; it may be"),
        (f'url: "{URL}", publication: shop', "key: id", "line 5: rows of a table have its primary key"),
    ],
)
def test_invalid_options_are_refused(options: str, more: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as error:
        read(options, more)
    assert problem in str(error.value)
    assert "reader@" not in str(error.value)
