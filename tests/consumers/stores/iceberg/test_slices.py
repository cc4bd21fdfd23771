"""Merges in slices: each key's rows are in one slice, and the result equals a merge of all rows."""

import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Transaction

from coranto.errors import InvalidInput
from coranto_consumers.stores.iceberg import changes
from coranto_consumers.stores.iceberg.changes import merge_rows
from coranto_consumers.stores.iceberg.slices import slices
from coranto_consumers.stores.iceberg.tables import plan_for
from coranto_consumers.stores.iceberg.writing import FileWriter
from coranto_consumers.stores.merge import Add

SCHEMA = pa.schema([pa.field("few", pa.int64()), pa.field("key", pa.string()), pa.field("n", pa.int64())])


def test_a_merge_in_slices_equals_a_merge_of_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    chance, expected, many = random.Random(1), dict[tuple[int, str], int](), list[int]()
    table = catalog.create_table("shop.sums", SCHEMA)
    plan = plan_for(table, None, SCHEMA.names, ["few", "key"], {"n": Add()}, "")
    monkeypatch.setattr(changes, "MAX_BYTES", 4000)  # Some files are kept in memory, others read again.
    monkeypatch.setattr(changes, "slices", lambda plan, parts: counted(slices(plan, parts, 2000)))

    def counted(made):
        made = list(made)
        many.append(len(made))
        keys = [{(row["few"], row["key"]) for row in each.to_pylist()} for each in made]
        assert sum(map(len, keys)) == len(set().union(*keys))
        return made

    for number in range(4):
        parts = []
        for _ in range(5):
            rows = [(chance.randrange(3), f"é{chance.randrange(200)}", chance.randrange(9)) for _ in range(60)]
            for few, key, n in rows:
                expected[few, key] = expected.get((few, key), 0) + n
            parts.append(pa.table(list(map(list, zip(*rows, strict=True))), schema=SCHEMA))
        transaction = Transaction(table)
        merge_rows(transaction, {}, plan, lambda parts=parts: parts, FileWriter.of(table, f"folder/{number}/"))
        transaction.commit_transaction()
    assert min(many) > 3
    assert {(row["few"], row["key"]): row["n"] for row in table.scan().to_arrow().to_pylist()} == expected
    catalog.engine.dispose()


def test_null_keys_are_refused_and_unordered_keys_make_one_slice(tmp_path: Path) -> None:
    catalog = SqlCatalog("lake", uri="sqlite://", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    schema = pa.schema([pa.field("key", pa.string()), pa.field("real", pa.float64()), pa.field("n", pa.int64())])
    table = catalog.create_table("shop.kinds", schema)
    by_key = plan_for(table, None, ["key", "n"], ["key"], {"n": Add()}, "")
    by_real = plan_for(table, None, ["real", "n"], ["real"], {"n": Add()}, "")
    lacking = pa.table([["z", "a", None], [1.0, 2.0, float("nan")], [1, 2, 3]], schema=schema)
    with pytest.raises(InvalidInput, match="key 'key' is null in a row"):
        list(slices(by_key, lambda: [lacking, lacking], 10))
    (every,) = slices(by_real, lambda: [lacking, lacking], 10)
    assert every.num_rows == 6
    catalog.engine.dispose()


def test_slices_are_even_for_skewed_keys(tmp_path: Path) -> None:
    catalog = SqlCatalog("lake", uri="sqlite://", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    schema = pa.schema([pa.field("key", pa.int64()), pa.field("n", pa.int64())])
    plan = plan_for(catalog.create_table("shop.sums", schema), None, schema.names, ["key"], {"n": Add()}, "")
    chance = random.Random(2)

    def part(count: int, keys: int) -> pa.Table:
        return pa.table([[chance.randrange(keys) for _ in range(count)], [1] * count], schema=schema)

    # Nine in ten rows have one in a hundred keys, and one part has most of them.
    parts = [part(18_000, 100), part(300, 10_000), part(700, 10_000), part(1000, 10_000)]
    sizes = [each.nbytes for each in slices(plan, lambda: parts, 32_000)]
    assert sum(sizes) == sum(each.nbytes for each in parts)
    assert len(sizes) == 10
    assert max(sizes) < 2 * 32_000, sizes

    # A key with half of the rows has its own slice.
    heavy = pa.table([[7] * 10_000, [1] * 10_000], schema=schema)
    sizes = sorted(each.nbytes for each in slices(plan, lambda: [heavy, part(10_000, 10_000)], 32_000))
    assert 160_000 <= sizes[-1] < 160_000 + 2 * 32_000
    assert max(sizes[:-1]) < 2 * 32_000
    (one,) = slices(plan, lambda: [heavy, heavy], 32_000)
    assert one.num_rows == 20_000
    catalog.engine.dispose()
