"""The audit of a table as a check: sound, with a missing row, and with an unavailable store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from sqlalchemy import text

from coranto.testing import SyncCluster
from coranto_consumers.stores.sql import SqlStore
from dagster_coranto import JournalResource, build_table_asset, build_table_check
from tests.consumers.tables.shop import Shop, run, table_file
from tests.orchestration.instances import new_instance

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def shop(cluster: SyncCluster) -> Shop:
    return Shop(cluster)


def evaluate(file: Path, endpoint: str, instance: dg.DagsterInstance | None = None) -> Any:
    asset = build_table_asset(file)
    check = build_table_check(asset)
    resources = {"journals": JournalResource(endpoint=endpoint)}
    defs = dg.Definitions(assets=[asset], asset_checks=[check], resources=resources)
    job = defs.resolve_implicit_global_asset_job_def()
    part = job.get_subset(asset_selection=set(), asset_check_selection=set(check.check_keys))
    with nullcontext(instance) if instance is not None else new_instance() as used:
        [found] = part.execute_in_process(instance=used).get_asset_check_evaluations()
    return found


def test_a_table_must_have_as_many_rows_as_messages(shop: Shop, tmp_path: Path) -> None:
    journal, store = f"{shop.name}/items", f"sqlite:///{tmp_path}/s.db"
    shop.create(journal)
    shop.publish(journal, {"id": 1}, {"id": 2})
    file = tmp_path / "items.yaml"
    file.write_text(table_file(f"{{journal: {journal}}}", store))
    before = evaluate(file, shop.endpoint)
    assert (before.passed, before.description) == (True, "No message is committed yet.")
    run(shop, file.read_text())
    sound = evaluate(file, shop.endpoint)
    assert (sound.passed, sound.description) == (True, "2 rows are sound.")
    assert "SELECT COUNT(*) FROM items == messages" in sound.metadata["dagster-coranto/expected"].value
    with SqlStore(store).engine.begin() as connection:
        connection.execute(text("DELETE FROM items WHERE id = 1"))
    lacks = evaluate(file, shop.endpoint)
    assert (lacks.passed, lacks.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "expectation_failed" in lacks.metadata["dagster-coranto/findings"].value


def test_the_audit_of_keyed_rows_checks_the_checkpoint(shop: Shop, tmp_path: Path) -> None:
    stream = shop.stream()
    shop.write(stream, {"id": 1}, {"id": 1})
    file = tmp_path / "items.yaml"
    file.write_text(table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db", "upsert"))
    run(shop, file.read_text())
    found = evaluate(file, shop.endpoint)
    assert (found.passed, found.description) == (True, "1 rows are sound.")


def test_an_unavailable_store_fails_the_check(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "items.yaml"
    file.write_text(table_file("{stream: shop/items}", "postgresql://shop:secret@127.0.0.1:1/shop"))
    found = evaluate(file, shop.endpoint)
    assert not found.passed
    assert found.description.startswith("The table could not be examined: ")
    assert "secret" not in str(found)


def test_a_missing_store_of_a_written_table_fails_the_check(shop: Shop, tmp_path: Path) -> None:
    stream = shop.stream()
    shop.write(stream, {"id": 1})
    file = tmp_path / "items.yaml"
    file.write_text(table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db"))
    with new_instance() as instance:
        journals = JournalResource(endpoint=shop.endpoint)
        assert dg.materialize([build_table_asset(file)], instance=instance, resources={"journals": journals}).success
        (tmp_path / "s.db").rename(tmp_path / "away.db")
        gone = evaluate(file, shop.endpoint, instance)
    assert (gone.passed, gone.description) == (False, "The table was written, and its store has no position of it.")
