"""Tables without code as assets: on both runners, after an ingest and a collection, and with errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from coranto.errors import InvalidInput
from coranto.streams import default_template
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.tables import read_table
from dagster_coranto import JournalResource, build_ingest_asset, build_table_asset
from dagster_coranto.consumers.tables import TABLES
from dagster_coranto.instance.underway import CONSUMER_TAG
from dagster_coranto.translation.metadata import ConsumerMetadataSet
from dagster_coranto.translation.metadata_set import TableMetadata
from tests.consumers.stores.iceberg.named_catalog import named_catalog
from tests.consumers.tables.shop import Shop, rows_in, table_file
from tests.orchestration.instances import new_instance
from tests.servers.sql import PostgresServer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def shop(cluster: SyncCluster) -> Shop:
    return Shop(cluster)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with new_instance() as instance:
        yield instance


class Made:
    """The file of a table, and its asset."""

    def __init__(self, shop: Shop, folder: Path, text: str, prefix: str = "") -> None:
        self.text = text
        self.file = folder / "items.yaml"
        self.file.write_text(text)
        self.asset = build_table_asset(self.file)
        self.resources = {"journals": JournalResource(endpoint=shop.endpoint, prefix=prefix)}

    def run(self, instance: dg.DagsterInstance, **config: Any) -> Any:
        ops = {self.asset.op.name: {"config": config}} if config else {}
        return dg.materialize(
            [self.asset],
            instance=instance,
            resources=self.resources,
            run_config={"ops": ops},
            raise_on_error=False,
        )

    def metadata(self, instance: dg.DagsterInstance) -> tuple[ConsumerMetadataSet, TableMetadata, Any]:
        event = instance.get_latest_materialization_event(self.asset.key)
        assert event is not None
        made = event.asset_materialization
        assert made is not None
        return (
            ConsumerMetadataSet.extract(made.metadata),
            TableMetadata.extract(made.metadata),
            (made.tags or {})["dagster/data_version"],
        )

    def error(self, done: Any) -> str:
        assert not done.success
        [failure] = done.get_step_failure_events()
        return str(failure.event_specific_data.error)


def test_a_run_writes_the_current_messages(shop: Shop, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    stream = shop.stream(2)
    made = Made(shop, tmp_path, table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db", "upsert"))
    shop.write(stream, {"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 1, "name": "c"})
    assert made.run(instance).success
    spec = read_table(made.text)
    assert sorted((row["id"], row["name"]) for row in rows_in(spec)) == [(1, "c"), (2, "b")]
    found, table, first = made.metadata(instance)
    assert (found.messages, found.lag_bytes, found.lag_messages, table.row_count) == (3, 0, 0, 2)
    assert (table.table_name, found.last_commit is not None) == ("items", True)
    assert table.column_schema is not None
    assert "id" in [column.name for column in table.column_schema.columns]
    assert found.journals is not None
    assert len(found.journals.records) == 2
    shop.write(stream, {"id": 3})
    assert made.run(instance).success
    found, table, last = made.metadata(instance)
    assert (found.messages, table.row_count) == (1, 3)
    assert last != first


@pytest.mark.usefixtures("spark")
def test_both_runners_write_one_table_in_postgresql(shop: Shop, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    stream = shop.stream()
    with PostgresServer() as server:
        text = table_file(f"{{stream: {stream}}}", server.new_database(), "upsert", name="both")
        shop.write(stream, {"id": 1, "name": "a"})
        assert Made(shop, tmp_path, text).run(instance).success
        shop.write(stream, {"id": 1, "name": "b"}, {"id": 2})
        made = Made(shop, tmp_path, text + "runner: spark\n")
        assert made.asset.specs_by_key[made.asset.key].kinds == {"table", "postgresql"}
        assert made.run(instance).success
        found, table, _ = made.metadata(instance)
        assert (found.messages, table.row_count, found.lag_bytes) == (2, 2, 0)
        assert [(row["id"], row["name"]) for row in rows_in(read_table(text))] == [(1, "b"), (2, None)]


def test_a_table_in_iceberg(
    shop: Shop, tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_catalog(tmp_path, monkeypatch)
    journal = f"{shop.name}/items/one"
    shop.create(journal)
    shop.publish(journal, {"id": 1}, {"id": 2})
    made = Made(shop, tmp_path, table_file(f"{{journal: {journal}}}", "iceberg://lake", table="shop.items"))
    assert made.asset.key == dg.AssetKey(["shop", "items"])
    assert made.run(instance).success
    found, table, _ = made.metadata(instance)
    assert (found.messages, table.row_count, table.table_name) == (2, 2, "shop.items")
    assert table.column_schema is not None


def test_an_ingest_and_its_table(shop: Shop, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """Run two files as two assets in one job."""
    stream = f"{shop.name}/orders"
    rows = tmp_path / "in"
    rows.mkdir()
    (rows / "a.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    ingest = tmp_path / "ingest.yaml"
    source = {"files": {"url": f"file://{rows}/", "pattern": "*.jsonl"}}
    create = {"stores": [STORE_URL]}
    ingest.write_text(json.dumps({"name": "orders", "stream": stream, "source": source, "create": create, "key": "id"}))
    made = Made(shop, tmp_path, table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db", "upsert"))
    first = build_ingest_asset(ingest)
    [spec] = made.asset.specs
    assert [each.asset_key for each in spec.deps] == [first.key]
    done = dg.materialize([made.asset, first], instance=instance, resources=made.resources)
    assert done.success
    assert made.metadata(instance)[1].row_count == 2


def test_the_asset_describes_the_table(shop: Shop, tmp_path: Path) -> None:
    fields = {"name": "shop-items", "input": {"prefix": "shop/items/"}, "columns": "id BIGINT", "table": "items"}
    asset = build_table_asset(
        {**fields, "store": "${NOT_SET}"},
        key="db/items",
        change=lambda spec: spec.replace_attributes(owners=["team:shop"]),
        group_name="shop",
        tags={"tier": "1"},
    )
    [spec] = asset.specs
    assert (spec.key, spec.group_name, spec.owners) == (dg.AssetKey(["db", "items"]), "shop", ["team:shop"])
    assert (spec.kinds, spec.tags[CONSUMER_TAG], spec.tags["tier"]) == ({"table"}, "shop-items", "1")
    assert [each.asset_key for each in spec.deps] == [dg.AssetKey(["shop", "items"])]
    [one] = build_table_asset({**fields, "store": "mysql+x://h/d", "input": {"journal": "shop/items/eu"}}).specs
    assert (one.kinds, [each.asset_key.path for each in one.deps]) == ({"table", "mysql"}, [["shop", "items"]])
    [any_] = build_table_asset({**fields, "store": "x", "input": {"selector": "app=shop"}}).specs
    assert not list(any_.deps)


def test_the_prefix_of_the_resource_selects_journals(shop: Shop, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    stream = f"again/{shop.name}/items"
    shop.streams.create(stream, 1, template=default_template(stores=[STORE_URL]))
    shop.write(stream, {"id": 1})
    store = f"sqlite:///{tmp_path}/s.db"
    made = Made(shop, tmp_path, table_file(f"{{stream: {shop.name}/items}}", store), prefix="again/")
    assert made.run(instance).success
    assert made.metadata(instance)[1].row_count == 1
    selecting = Made(shop, tmp_path, table_file("{selector: app=shop}", store, name="other"), prefix="again/")
    assert "a selector has no name that 'again/' can begin" in selecting.error(selecting.run(instance))


def test_errors_name_the_file_and_permanent_ones_are_not_retried(
    shop: Shop, tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"there is no file .*none\.yaml: write it, or correct the path"):
        build_table_asset(tmp_path / "none.yaml")
    (tmp_path / "items.yaml").write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match=r"items\.yaml is not UTF-8"):
        build_table_asset(tmp_path / "items.yaml")
    with pytest.raises(InvalidInput, match=r"^table: the field 'input' is missing"):
        build_table_asset({"name": "items"})
    stream = shop.stream()
    text = table_file(f"{{stream: {stream}}}", "sqlite:///${FOLDER}/s.db")
    made = Made(shop, tmp_path, text)
    assert "items.yaml: line 4: the environment has no variable FOLDER" in made.error(made.run(instance))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    shop.write(stream, {"id": 1, "cents": "many"})
    done = made.run(instance)
    assert "does not fit" in made.error(done)
    [failure] = done.get_step_failure_events()
    assert failure.step_failure_data.user_failure_data is not None
    assert failure.event_specific_data.error.cls_name == "Failure"
    with pytest.raises(InvalidInput, match="is not an asset of build_table_asset"):
        TABLES.of(build_other())


def build_other() -> dg.AssetsDefinition:
    @dg.asset
    def other() -> None: ...

    return other


def test_a_changed_input_needs_its_code(shop: Shop, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    first, second = f"{shop.name}/a/one", f"{shop.name}/b/one"
    shop.create(first, second)
    shop.publish(first, {"id": 1})
    shop.publish(second, {"id": 2})
    store = f"sqlite:///{tmp_path}/s.db"
    assert Made(shop, tmp_path, table_file(f"{{journal: {first}}}", store, name="moved")).run(instance).success
    made = Made(shop, tmp_path, table_file(f"{{journal: {second}}}", store, name="moved"))
    error = made.error(made.run(instance))
    assert "accept" in error
    code = error.partition("accept_changes=")[2].partition("'")[2].partition("'")[0]
    assert made.run(instance, accept_changes=code).success, error
    assert made.metadata(instance)[1].row_count == 2


DEFINITIONS = """
from pathlib import Path
import dagster as dg
from dagster_coranto import JournalResource, build_table_asset

asset = build_table_asset(Path({file!r}))
defs = dg.Definitions(
    assets=[asset],
    jobs=[dg.define_asset_job("job", selection=[asset.key], executor_def=dg.in_process_executor)],
    resources={{"journals": JournalResource(endpoint={endpoint!r})}},
)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_after_a_stopped_one_writes_the_rest(
    shop: Shop, tmp_path: Path, instance: dg.DagsterInstance, number: signal.Signals
) -> None:
    journal, store = f"{shop.name}/items", SqlStore(f"sqlite:///{tmp_path}/s.db")
    shop.create(journal)
    made = Made(
        shop, tmp_path, table_file(f"{{journal: {journal}}}", f"sqlite:///{tmp_path}/s.db", columns="id BIGINT")
    )
    for first in range(0, 40_000, 1000):
        shop.publish(journal, *({"id": first + each} for each in range(1000)))
    (tmp_path / "defs.py").write_text(DEFINITIONS.format(file=str(made.file), endpoint=shop.endpoint))
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").touch()
    command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(tmp_path / "defs.py"), "-j", "job"]
    environment = {**os.environ, "DAGSTER_HOME": str(home)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 90
            while process.poll() is None and store.read(read_table(made.text).name) is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(number)
            process.wait(90)
        finally:
            process.kill()
    assert made.run(instance).success
    assert sorted(row["id"] for row in rows_in(read_table(made.text))) == list(range(40_000))
    assert made.metadata(instance)[1].row_count == 40_000
