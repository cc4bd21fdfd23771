"""Tables in Iceberg: differences, and the changes that Iceberg supports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from coranto.errors import InvalidInput
from coranto_consumers.stores.iceberg.tables import columns_of
from coranto_consumers.tables import read_table
from coranto_consumers.tables.columns import TableLayout, layout_of
from coranto_consumers.tables.evolving import prepare
from coranto_consumers.tables.iceberg_target import IcebergTarget
from tests.consumers.stores.iceberg.named_catalog import named_catalog

FILE = """
name: shop-items
input: {{journal: shop/items}}
columns: "{columns}"
store: iceberg://lake
table: shop.items
mode: upsert
key: id
"""


def layout(columns: str, *, evolves: bool = True) -> TableLayout:
    found = layout_of(read_table(FILE.format(columns=columns)))
    return replace(found, spec=replace(found.spec, evolves=evolves))


def test_a_table_is_created_and_evolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = named_catalog(tmp_path, monkeypatch)
    first = layout("id INT, n SMALLINT, d FLOAT, p DECIMAL(8, 2), s STRUCT<a: INT>")
    assert prepare(first, IcebergTarget(first)) == ()
    assert prepare(first, IcebergTarget(first)) == ()
    later = layout("id BIGINT, n BIGINT, d DOUBLE, p DECIMAL(12, 2), s STRUCT<a: INT>, t ARRAY<STRING>")
    with pytest.raises(
        InvalidInput, match=r"has 'id' as INT \(make it BIGINT\); .*no column 't'.*: add `evolve: true`"
    ):
        prepare(replace(later, spec=replace(later.spec, evolves=False)), IcebergTarget(later))
    assert len(prepare(later, IcebergTarget(later))) == 5
    found = columns_of(catalog.load_table("shop.items"))
    assert [found.field(name).type for name in ("id", "n", "d", "p")] == [
        *(pa.int64(), pa.int64(), pa.float64(), pa.decimal128(12, 2))
    ]
    assert [name for name in found.names if not found.field(name).nullable] == ["id"]
    assert prepare(later, IcebergTarget(later)) == ()
    assert prepare(first, IcebergTarget(first)) == ()


@pytest.mark.parametrize("columns", ["id INT, n DOUBLE", "id INT, n STRING", "id INT, n DECIMAL(12, 2)"])
def test_changes_that_iceberg_does_not_support_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    named_catalog(tmp_path, monkeypatch)
    first = layout("id INT, n INT")
    prepare(first, IcebergTarget(first))
    wrong = layout(columns)
    with pytest.raises(InvalidInput, match=r"has 'n' as INT, which Iceberg cannot make .*: use a new table"):
        prepare(wrong, IcebergTarget(wrong))


def test_a_required_column_for_an_optional_field_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = named_catalog(tmp_path, monkeypatch)
    schema = pa.schema([pa.field("id", pa.int32(), False), pa.field("n", pa.int32(), False)])
    catalog.create_table("shop.items", schema)
    wrong = layout("id INT, n INT")
    with pytest.raises(InvalidInput, match="'n' is required, and messages may lack it"):
        prepare(wrong, IcebergTarget(wrong))
