"""The asset of compacted journals: each run adds files of old content, and reports its progress."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pytest

from coranto.client.loop import run_blocking
from coranto.errors import JournalNotFound
from coranto.testing.fake_broker import FakeBroker
from dagster_coranto import JournalGroup, JournalResource, build_compaction_asset

ORDERS = JournalGroup("shop/orders")
JOURNALS = ("shop/orders/a", "shop/orders/b")

compacted = build_compaction_asset(
    ORDERS, {"n": "int64"}, older_than=timedelta(), file_bytes=1, group_name="shop", kinds={"lake"}
)


def materialize(journals: JournalResource) -> dict[str, Any]:
    result = dg.materialize([compacted], resources={"journals": journals})
    (event,) = result.asset_materializations_for_node("shop__orders__compacted")
    return {key: value.value for key, value in event.metadata.items()}


def test_the_asset_depends_on_the_one_of_the_group() -> None:
    spec = compacted.get_asset_spec()
    assert spec.key == dg.AssetKey(["shop", "orders", "compacted"])
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey(["shop", "orders"])]
    assert (spec.group_name, spec.kinds) == ("shop", {"lake", "parquet"})


def test_each_run_adds_the_stored_content(broker: FakeBroker, journals: JournalResource, tmp_path: Path) -> None:
    for name in (*JOURNALS, "shop/other/a"):
        broker.create(name)
    for n in range(3):
        for name in (*JOURNALS, "shop/other/a"):
            run_blocking(broker.write(name, f'{{"n": {n}}}\n'.encode()))
            broker.journals[name].roll(tmp_path)
        metadata = materialize(journals)
        assert (metadata["coranto/files_added"], metadata["coranto/rows_added"]) == (2, 2)
        assert metadata["coranto/compacted_through"] == dict.fromkeys(JOURNALS, 9 * (n + 1))
    assert (materialize(journals)["coranto/files_added"], metadata["coranto/files"]) == (0, 6)
    with duckdb.connect() as connection:
        query = "SELECT _journal, n FROM read_parquet(?) ORDER BY ALL"
        files = [str(path) for path in tmp_path.rglob(".coranto-tables/shop/orders/*/*.parquet")]
        found = connection.execute(query, [files]).fetchall()
    assert found == [(name, n) for name in JOURNALS for n in range(3)]


def test_a_group_without_journals_fails_the_run(broker: FakeBroker, journals: JournalResource) -> None:
    with pytest.raises(JournalNotFound, match="no journal shop/orders/… exists"):
        materialize(journals)
