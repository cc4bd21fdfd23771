"""Components in defs folders, loaded as by `dg`. The tutorial's test runs them with the real `dg` and a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.core.component_tree import ComponentTreeException
from dagster.components.testing.utils import DefsFolderSandbox, create_defs_folder_sandbox

from coranto.client.loop import run_blocking
from coranto.errors import InvalidInput
from coranto.labels import label_set
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.runtime.shard_set import parse_shards
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from dagster_coranto import (
    IngestComponent,
    JournalCollectionComponent,
    JournalResource,
    JournalTableComponent,
    ShardConsumerComponent,
    SparkConsumerComponent,
)
from dagster_coranto.components.consumer_options import ConsumerOptionsModel
from dagster_coranto.components.scaffolding import CollectionParams, ConsumerParams
from dagster_coranto.consumers.tables import TABLES
from tests.orchestration.instances import new_instance


@pytest.fixture
def sandbox() -> Iterator[DefsFolderSandbox]:
    with create_defs_folder_sandbox() as made:
        yield made


@contextmanager
def loaded(sandbox: DefsFolderSandbox, path: Any) -> Iterator[tuple[Any, dg.Definitions]]:
    with sandbox.load_component_and_build_defs(defs_path=path) as found:
        yield found


def collection(sandbox: DefsFolderSandbox, broker: FakeBroker, **attributes: Any) -> Any:
    cluster = {"endpoint": broker.endpoint, **attributes.pop("cluster", {})}
    return sandbox.scaffold_component(
        component_cls=JournalCollectionComponent,
        scaffold_params=CollectionParams(folder="shop/orders").model_dump(),
        defs_yaml_contents={
            "type": "dagster_coranto.JournalCollectionComponent",
            "attributes": {"cluster": cluster, "selector": "name:prefix=shop/", **attributes},
        },
    )


def keys_of(defs: dg.Definitions) -> set[str]:
    return {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}


def refresh(sandbox: DefsFolderSandbox, path: Any) -> None:
    with loaded(sandbox, path) as (component, _):
        asyncio.run(component.refresh_state(sandbox.project_root))


def test_the_journals_of_the_tree_are_assets_without_a_broker(sandbox: DefsFolderSandbox, broker: FakeBroker) -> None:
    with loaded(sandbox, collection(sandbox, broker, specs="journals.yaml")) as (_, defs):
        graph = defs.resolve_asset_graph()
        assert keys_of(defs) == {"journal_specs", "shop/orders"}
        orders = dg.AssetKey(["shop", "orders"])
        assert graph.get(orders).parent_keys == {dg.AssetKey("journal_specs")}
        checks = {key.to_user_string() for key in graph.asset_check_keys}
        assert checks == {"journal_specs:journals_are_as_specified", "shop/orders:audit"}
    assert broker.requests == []


def test_journals_found_by_a_refresh_are_assets_and_loading_needs_no_broker(
    sandbox: DefsFolderSandbox, broker: FakeBroker
) -> None:
    for name in ("shop/orders/part-000", "shop/orders/part-001", "shop/refunds/eu", "other/one"):
        broker.create(name)
    path = collection(sandbox, broker)
    with loaded(sandbox, path) as (_, defs):
        assert keys_of(defs) == set()
    refresh(sandbox, path)
    listings = broker.count("List")
    assert listings == 1
    with loaded(sandbox, path) as (_, defs):
        assert keys_of(defs) == {"shop/orders", "shop/refunds"}
    assert broker.count("List") == listings


def test_keys_do_not_contain_the_prefix_of_a_cluster(sandbox: DefsFolderSandbox, broker: FakeBroker) -> None:
    broker.create("rerun/shop/orders/part-000")
    broker.create("shop/refunds/eu")
    path = collection(sandbox, broker, cluster={"prefix": "rerun/"})
    refresh(sandbox, path)
    with loaded(sandbox, path) as (_, defs):
        assert keys_of(defs) == {"shop/orders"}


def test_a_translation_in_yaml_sets_every_attribute(sandbox: DefsFolderSandbox, broker: FakeBroker) -> None:
    broker.create("shop/orders/part-000", labels=label_set({"team": "sales"}))
    broker.create("shop/orders/part-001")
    translation = {
        "key": "journals/{{ journal.name }}",
        "group_name": "shop",
        "owners": ["team:{{ journal.labels.team }}"],
        "description": "{{ journal.journals }} journals",
        "automation_condition": "{{ dg.AutomationCondition.eager() }}",
    }
    path = collection(sandbox, broker, translation=translation, audits=["cheap", "deep"])
    refresh(sandbox, path)
    with loaded(sandbox, path) as (_, defs):
        graph = defs.resolve_asset_graph()
        node = graph.get(dg.AssetKey(["journals", "shop", "orders"]))
        assert (node.group_name, node.owners, node.description) == ("shop", ["team:sales"], "2 journals")
        assert node.automation_condition is not None
        assert {key.asset_key for key in graph.asset_check_keys} == {node.key}, "checks follow the key"
        assert {key.name for key in graph.asset_check_keys} == {"audit", "deep_audit"}


def test_each_journal_can_be_an_asset(sandbox: DefsFolderSandbox, broker: FakeBroker) -> None:
    broker.create("shop/orders/part-000")
    path = collection(sandbox, broker, assets="journal", audits=[])
    refresh(sandbox, path)
    with loaded(sandbox, path) as (_, defs):
        assert keys_of(defs) == {"shop/orders/part-000"}


def consumer(sandbox: DefsFolderSandbox, broker: FakeBroker, **attributes: Any) -> Any:
    return sandbox.scaffold_component(
        component_cls=SparkConsumerComponent,
        scaffold_params=ConsumerParams(application="shop:Revenue", source="shop/orders", table="revenue").model_dump(),
        defs_yaml_contents={
            "type": "dagster_coranto.SparkConsumerComponent",
            "attributes": {
                "name": "consume_orders",
                "application": "shop_that_is_not_there:Revenue",
                "sources": ["shop/orders", "shop/refunds"],
                "tables": [{"key": "revenue", "owners": ["team:sales"]}],
                "outputs": ["shop/alerts"],
                "cluster": {"endpoint": broker.endpoint},
                **attributes,
            },
        },
    )


def test_a_consumer_has_its_tables_and_outputs_as_assets_a_job_and_a_sensor(
    sandbox: DefsFolderSandbox, broker: FakeBroker
) -> None:
    """Loading does not import the application."""
    with loaded(sandbox, consumer(sandbox, broker, sensor_seconds=15)) as (_, defs):
        graph = defs.resolve_asset_graph()
        revenue = graph.get(dg.AssetKey("revenue"))
        sources = {dg.AssetKey(["shop", "orders"]), dg.AssetKey(["shop", "refunds"])}
        assert revenue.parent_keys == sources
        assert revenue.owners == ["team:sales"]
        assert graph.get(dg.AssetKey(["shop", "alerts"])).parent_keys == sources
        sensor = defs.resolve_sensor_def("consume_orders_sensor")
        assert (sensor.job.name, sensor.minimum_interval_seconds) == ("consume_orders_job", 15)
        assert defs.resolve_job_def("consume_orders_job")
    assert broker.requests == []


def test_the_error_of_a_missing_store_names_the_variable(
    sandbox: DefsFolderSandbox, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOP_STORE_URL", raising=False)
    with loaded(sandbox, consumer(sandbox, broker, store_url_variable="SHOP_STORE_URL")) as (component, _):
        with pytest.raises(InvalidInput, match="SHOP_STORE_URL has no URL of the SQL store of consume_orders"):
            component.settings(None)


def test_a_consumer_has_all_options_in_yaml(
    sandbox: DefsFolderSandbox, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(ConsumerOptionsModel.model_fields) == {each.name for each in fields(ConsumerOptions)}
    monkeypatch.setenv("CORANTO_STORE_URL", "sqlite://")
    monkeypatch.setattr("coranto_consumers.loading.load_target", lambda target: target)
    options = {"misfits": {"table": "letters"}, "fail_on_data_loss": False, "max_transaction_bytes": 1000}
    with loaded(sandbox, consumer(sandbox, broker, options=options)) as (component, defs):
        made = component.settings(None).options
        assert (made.misfits.table.name, made.fail_on_data_loss, made.max_transaction_bytes) == ("letters", False, 1000)
        checks = {key.to_user_string() for key in defs.resolve_asset_graph().asset_check_keys}
        assert checks == {"revenue:nothing_left_out", "shop/alerts:nothing_left_out"}


def test_components_of_one_project_share_resources_with_equal_settings(
    sandbox: DefsFolderSandbox, broker: FakeBroker
) -> None:
    first = collection(sandbox, broker, specs="journals.yaml")
    second = consumer(sandbox, broker)
    with loaded(sandbox, first) as (_, one), loaded(sandbox, second) as (_, two):
        merged = dg.Definitions.merge(one, two)
        assert {"journal_specs", "shop/orders", "revenue"} <= keys_of(merged)
        job = merged.resolve_implicit_global_asset_job_def()
        keys = [key for key in job.resource_defs if key.startswith("coranto_journals_")]
        assert len(keys) == 1


@pytest.mark.parametrize(
    ("component", "params", "wanted"),
    [
        (
            JournalCollectionComponent,
            {"folder": "shop/orders/", "endpoint": "b:9"},
            {
                "selector": "name:prefix=shop/orders/",
                "specs": "journals.yaml",
                "specs_asset": "shop_orders_specs",
                "cluster": {"endpoint": "b:9"},
            },
        ),
        (
            SparkConsumerComponent,
            {"application": "shop:Revenue", "source": "shop/orders", "table": "revenue"},
            {"application": "shop:Revenue", "sources": ["shop/orders"], "tables": [{"key": "revenue"}]},
        ),
        (
            SparkConsumerComponent,
            {"application": "shop:Revenue", "source": "shop/orders", "table": "revenue", "windows": True},
            {"windows": {"window_bytes": 268435456, "max_windows": 500}},
        ),
        (
            ShardConsumerComponent,
            {"application": "totals:Totals", "source": "shop/orders", "table": "revenue"},
            {"specs": "shards.yaml", "sources": ["shop/orders"], "prune_selector": "app=revenue"},
        ),
        (IngestComponent, {"stream": "shop/orders"}, {"file": "ingest.yaml", "sensor_seconds": 30}),
        (
            JournalTableComponent,
            {"stream": "shop/orders", "table": "revenue", "columns": "id BIGINT, cents BIGINT"},
            {"table": "table.yaml", "sensor_seconds": 30},
        ),
    ],
)
def test_scaffolded_components_load(
    sandbox: DefsFolderSandbox, component: Any, params: dict[str, Any], wanted: Mapping[str, Any]
) -> None:
    import yaml

    path = sandbox.scaffold_component(component_cls=component, scaffold_params=params)
    written = yaml.safe_load((path / "defs.yaml").read_text())["attributes"]
    assert {**written, **wanted} == written
    with loaded(sandbox, path) as (_, defs):
        assert keys_of(defs) & {"shop/orders", "revenue"}
        if params.get("windows"):
            assert defs.resolve_asset_graph().get(dg.AssetKey("revenue")).partitions_def is not None
            assert defs.resolve_sensor_def("consume_revenue__window_sensor")
        if component is ShardConsumerComponent:
            parents = defs.resolve_asset_graph().get(dg.AssetKey("revenue")).parent_keys
            assert parents == {dg.AssetKey("revenue_shards"), dg.AssetKey(["shop", "orders"])}
            assert parse_shards((path / "shards.yaml").read_text())[0].upsert.id == "revenue-000"


def test_a_project_can_have_several_scaffolded_collections_and_consumers(sandbox: DefsFolderSandbox) -> None:
    for folder in ("shop/orders", "shop/refunds"):
        params: dict[str, str] = {"folder": folder}
        sandbox.scaffold_component(component_cls=JournalCollectionComponent, scaffold_params=params)
        params = {"application": "shop:Revenue", "source": folder, "table": folder.rpartition("/")[2]}
        sandbox.scaffold_component(component_cls=SparkConsumerComponent, scaffold_params=params)
        params["table"] += "_shards"
        sandbox.scaffold_component(component_cls=ShardConsumerComponent, scaffold_params=params)
    with sandbox.build_all_defs() as defs:
        assert keys_of(defs) >= {"shop_orders_specs", "shop_refunds_specs", "shop/orders", "orders", "orders_shards"}


def test_the_sensor_of_a_consumer_with_windows_adds_partitions(
    sandbox: DefsFolderSandbox, broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading needs neither the store's variable nor a broker. The sensor reads the variable at a tick."""
    monkeypatch.delenv("CORANTO_STORE_URL", raising=False)
    windows = {"window_bytes": 1, "max_windows": 3, "launch": True, "sensor_seconds": 20}
    tables = [{"key": "revenue_by_window"}]
    path = consumer(sandbox, broker, name="again", outputs=[], sources=["shop/orders"], tables=tables, windows=windows)
    with loaded(sandbox, path) as (_, defs), new_instance() as instance:
        node = defs.resolve_asset_graph().get(dg.AssetKey("revenue_by_window"))
        assert isinstance(node.partitions_def, dg.DynamicPartitionsDefinition)
        (windows,) = node.parent_keys
        assert windows == dg.AssetKey(["windows", "again"])
        between = defs.resolve_asset_graph().get(windows)
        assert (between.parent_keys, between.is_executable) == ({dg.AssetKey(["shop", "orders"])}, False)
        sensor = defs.resolve_sensor_def("again__window_sensor")
        assert (sensor.minimum_interval_seconds, sensor.default_status) == (20, dg.DefaultSensorStatus.RUNNING)
        assert broker.requests == []

        broker.create("shop/orders/part-000")
        for cents in (1, 2):
            run_blocking(broker.write("shop/orders/part-000", f'{{"cents": {cents}}}\n'.encode()))
            broker.journals["shop/orders/part-000"].roll(tmp_path)
        monkeypatch.setenv("CORANTO_STORE_URL", f"sqlite:///{tmp_path / 'store.db'}")
        context = dg.build_sensor_context(instance=instance, repository_def=defs.get_repository_def())
        result: Any = sensor(context)
        (added,) = result.dynamic_partitions_requests
        assert list(added.partition_keys) == ["00000001", "00000002"]
        assert [each.partition_key for each in result.run_requests] == ["00000001", "00000002"]


@pytest.mark.parametrize("contrary", [{"outputs": ["shop/alerts"]}, {"sensor_seconds": 30}, {"mode": "service"}])
def test_options_that_contradict_windows_are_refused(
    sandbox: DefsFolderSandbox, broker: FakeBroker, contrary: dict[str, Any]
) -> None:
    path = consumer(sandbox, broker, **{"outputs": [], "windows": {}, **contrary})
    (name,) = contrary
    with pytest.raises(ComponentTreeException) as raised, loaded(sandbox, path):
        pytest.fail("it was loaded")
    assert f"consume_orders has windows, so {name} has no meaning" in str(raised.value.__cause__)


def ingest(sandbox: DefsFolderSandbox, broker: FakeBroker, **attributes: Any) -> Any:
    return sandbox.scaffold_component(
        component_cls=IngestComponent,
        scaffold_params={"stream": "shop/orders"},
        defs_yaml_contents={
            "type": "dagster_coranto.IngestComponent",
            "attributes": {"cluster": {"endpoint": broker.endpoint}, "file": "ingest.yaml", **attributes},
        },
    )


def test_an_ingest_has_its_stream_as_asset_a_job_a_check_and_a_sensor(
    sandbox: DefsFolderSandbox, broker: FakeBroker
) -> None:
    with loaded(sandbox, ingest(sandbox, broker, sensor_seconds=15)) as (_, defs):
        graph = defs.resolve_asset_graph()
        assert graph.get(dg.AssetKey(["shop", "orders"])).kinds == {"journal", "file"}
        assert {key.to_user_string() for key in graph.asset_check_keys} == {"shop/orders:is_fresh"}
        sensor = defs.resolve_sensor_def("ingest_shop_orders_sensor")
        assert (sensor.job.name, sensor.minimum_interval_seconds) == ("ingest_shop_orders_job", 15)
    assert broker.requests == []
    with loaded(sandbox, ingest(sandbox, broker, sensor_seconds=0, fresh_seconds=0, mode="service")) as (_, defs):
        assert not defs.resolve_asset_graph().asset_check_keys
        assert not list(defs.sensors or ())


def test_a_collection_omits_the_stream_of_an_ingest(sandbox: DefsFolderSandbox, broker: FakeBroker) -> None:
    collection(sandbox, broker, specs="journals.yaml")
    ingest(sandbox, broker)
    with sandbox.build_all_defs() as defs:
        assert keys_of(defs) == {"journal_specs", "shop/orders"}
        assert defs.resolve_asset_graph().get(dg.AssetKey(["shop", "orders"])).kinds == {"journal", "file"}


def table(sandbox: DefsFolderSandbox, broker: FakeBroker, **attributes: Any) -> Any:
    return sandbox.scaffold_component(
        component_cls=JournalTableComponent,
        scaffold_params={"stream": "shop/orders", "table": "orders", "columns": "id BIGINT"},
        defs_yaml_contents={
            "type": "dagster_coranto.JournalTableComponent",
            "attributes": {"cluster": {"endpoint": broker.endpoint}, "table": "table.yaml", **attributes},
        },
    )


FIELDS = {"name": "table-orders", "columns": "id BIGINT", "store": "${NOT_SET}", "table": "orders"}


def test_a_table_is_an_asset_after_its_stream_with_a_job_a_check_and_a_sensor(
    sandbox: DefsFolderSandbox, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CORANTO_STORE_URL", raising=False)
    with loaded(sandbox, table(sandbox, broker, sensor_seconds=15)) as (_, defs):
        graph = defs.resolve_asset_graph()
        orders = graph.get(dg.AssetKey("orders"))
        assert (orders.parent_keys, orders.kinds) == ({dg.AssetKey(["shop", "orders"])}, {"table"})
        assert {key.to_user_string() for key in graph.asset_check_keys} == {"orders:audit"}
        sensor = defs.resolve_sensor_def("table_table_orders_sensor")
        assert (sensor.job.name, sensor.minimum_interval_seconds) == ("table_table_orders_job", 15)
    assert broker.requests == []


def test_the_fields_of_a_table_can_be_in_the_component(
    sandbox: DefsFolderSandbox, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_TABLE", "orders")
    monkeypatch.setenv("NOT_SET", "sqlite:///shop.db")
    fields = {**FIELDS, "input": {"stream": "shop/orders"}, "mode": "upsert", "key": ["id"], "evolve": True}
    fields["table"] = "{{ env.SHOP_TABLE }}"
    with loaded(sandbox, table(sandbox, broker, table=fields, key="db/orders")) as (_, defs):
        [asset] = defs.assets
        spec = TABLES.of(asset).spec(JournalResource())
        assert (spec.table, spec.key, spec.evolves, spec.store) == ("orders", ("id",), True, "sqlite:///shop.db")
        node = defs.resolve_asset_graph().get(dg.AssetKey(["db", "orders"]))
        assert node.parent_keys == {dg.AssetKey(["shop", "orders"])}
        assert not list(defs.sensors or ())


@pytest.mark.parametrize(
    ("fields", "sensor_seconds", "problem"),
    [
        ({"input": {"stream": "shop/orders"}, "mod": "upsert"}, 0, "table: there is no field 'mod' here"),
        ({"input": {"selector": "app=shop"}}, 30, "is not below one folder, which a sensor needs"),
    ],
)
def test_an_invalid_table_is_refused(
    sandbox: DefsFolderSandbox, broker: FakeBroker, fields: dict[str, Any], sensor_seconds: int, problem: str
) -> None:
    path = table(sandbox, broker, table={**FIELDS, **fields}, sensor_seconds=sensor_seconds)
    with pytest.raises(ComponentTreeException) as raised, loaded(sandbox, path):
        pytest.fail("it was loaded")
    assert problem in str(raised.value.__cause__)


def test_a_collection_an_ingest_and_a_table_are_one_lineage(sandbox: DefsFolderSandbox, broker: FakeBroker) -> None:
    collection(sandbox, broker, specs="journals.yaml")
    ingest(sandbox, broker)
    table(sandbox, broker)
    with sandbox.build_all_defs() as defs:
        graph = defs.resolve_asset_graph()
        assert keys_of(defs) == {"journal_specs", "shop/orders", "orders"}
        stream = graph.get(dg.AssetKey(["shop", "orders"]))
        assert (stream.kinds, stream.child_keys) == ({"journal", "file"}, {dg.AssetKey("orders")})


IN_PYTHON = """
import dagster as dg
from dagster_coranto import (
    JournalGroup,
    JournalResource,
    build_journal_recovery,
    build_recovery_sensor,
    build_verification,
    journal_assets,
)
from dagster_coranto.consumers.assets import spark_consumer_assets

ORDERS = JournalGroup("shop/orders")
verification = build_verification(ORDERS)
recovery = build_journal_recovery(ORDERS)


@journal_assets(JournalGroup("shop/refunds"))
def refunds(context): ...


consumer = spark_consumer_assets(
    name="consume",
    sources=[ORDERS],
    tables=[dg.AssetSpec("revenue")],
    outputs=[JournalGroup("shop/alerts")],
)(lambda context: None)
defs = dg.Definitions.merge(
    verification.definitions,
    dg.Definitions(
        assets=[refunds, consumer],
        jobs=recovery.jobs,
        sensors=[build_recovery_sensor(recovery, verification.check_keys)],
        resources={"journals": JournalResource(), "spark": 1},
    ),
)
"""


@pytest.mark.parametrize("place", ["before", "zz_after"])
def test_a_collection_omits_assets_defined_by_other_components(
    sandbox: DefsFolderSandbox, broker: FakeBroker, place: str
) -> None:
    """Dagster refuses a key with two definitions. The order of loading does not matter."""
    for name in ("shop/orders/part-000", "shop/refunds/eu", "shop/alerts/eu", "shop/late/eu", "shop/sums/eu"):
        broker.create(name)
    path = collection(sandbox, broker, audits=["cheap", "deep"])
    refresh(sandbox, path)
    (sandbox.defs_folder_path / f"{place}.py").write_text(IN_PYTHON)
    consumer(sandbox, broker, name="late", outputs=["shop/late"], tables=[{"key": "lateness"}])
    sandbox.scaffold_component(
        component_cls=ShardConsumerComponent,
        scaffold_params=ConsumerParams(application="t:T", source="shop/orders", table="sums").model_dump(),
        defs_yaml_contents={
            "type": "dagster_coranto.ShardConsumerComponent",
            "attributes": {"specs": "shards.yaml", "sources": ["shop/orders"], "outputs": ["shop/sums"]},
        },
    )
    with sandbox.build_all_defs() as defs:
        graph = defs.resolve_asset_graph()
        folders = {"shop/orders", "shop/refunds", "shop/alerts", "shop/late", "shop/sums"}
        assert keys_of(defs) >= folders | {"revenue", "lateness"}
        executable = {key.to_user_string() for key in graph.executable_asset_keys}
        assert executable == {"shop/refunds", "shop/alerts", "shop/late", "revenue", "lateness", "shard_specs"}
        audited = {key.asset_key.to_user_string() for key in graph.asset_check_keys if key.name == "audit"}
        assert audited == folders
        assert defs.resolve_job_def("audit_shop__orders").asset_layer.selected_asset_keys == set()
        assert defs.resolve_sensor_def("journal_recovery_sensor")


def test_a_collection_can_be_loaded_alone(sandbox: DefsFolderSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not search the current folder for other components."""
    monkeypatch.chdir(sandbox.project_root)
    (sandbox.project_root / "broken.py").write_text("raise RuntimeError")
    made = JournalCollectionComponent(selector="name:prefix=shop/")
    with sandbox.build_component_tree():
        assert keys_of(dg.build_defs_for_component(made)) == set()


OVERRIDDEN = """
import dagster as dg
from dagster_coranto import (
    JournalCollectionComponent,
    JournalTableComponent,
    ShardConsumerComponent,
    SparkConsumerComponent,
)


def owned(spec):
    return spec.replace_attributes(key=dg.AssetKey(["ours", *spec.key.path]), owners=["team:ours"])


class OurCollection(JournalCollectionComponent):
    def get_asset_spec(self, data):
        return owned(super().get_asset_spec(data)).merge_attributes(tags={"journals": str(data.journals)})


class OurConsumer(SparkConsumerComponent):
    def get_asset_spec(self, spec):
        return owned(super().get_asset_spec(spec))

    def execute(self, context, consumer):
        context.log.info("it begins")
        for key in context.selected_asset_keys:
            yield dg.MaterializeResult(asset_key=key, metadata={"name": consumer.definition.name})


class OurShards(ShardConsumerComponent):
    def get_asset_spec(self, spec):
        return owned(super().get_asset_spec(spec))


class OurTable(JournalTableComponent):
    def get_asset_spec(self, spec):
        return owned(super().get_asset_spec(spec))

    def execute(self, context, table):
        yield dg.MaterializeResult(metadata={"name": table.definition.names.name})
"""


def test_a_subclass_changes_specs_and_execution(sandbox: DefsFolderSandbox, broker: FakeBroker) -> None:
    (sandbox.project_root / "src" / sandbox.project_name / "ours.py").write_text(OVERRIDDEN)
    for component, folder, attributes in (
        ("OurCollection", "one", {"selector": "name:prefix=shop/", "cluster": {"endpoint": broker.endpoint}}),
        ("OurConsumer", "two", {"name": "c", "application": "a:B", "sources": ["shop/x"], "tables": [{"key": "t"}]}),
        ("OurShards", "three", {"specs": "s.yaml", "sources": ["shop/x"], "tables": [{"key": "u"}]}),
        ("OurTable", "four", {"table": {**FIELDS, "input": {"stream": "shop/x"}}}),
    ):
        path = sandbox.defs_folder_path / folder
        path.mkdir()
        text = json.dumps({"type": f"{sandbox.project_name}.ours.{component}", "attributes": attributes})
        (path / "defs.yaml").write_text(text)
    broker.create("shop/orders/part-000")
    refresh(sandbox, sandbox.defs_folder_path / "one")
    with sandbox.build_all_defs() as defs, new_instance() as instance:
        graph = defs.resolve_asset_graph()
        x, t, u = (dg.AssetKey(["ours", *path]) for path in (["shop", "x"], ["t"], ["u"]))
        assert graph.get(t).parent_keys == {x}
        assert x in graph.get(u).parent_keys
        orders = graph.get(dg.AssetKey(["ours", "shop", "orders"]))
        assert (orders.owners, orders.tags["journals"]) == (["team:ours"], "1")
        result = defs.resolve_job_def("c_job").execute_in_process(instance=instance)
        (made,) = result.asset_materializations_for_node("c")
        assert (made.asset_key, made.metadata["name"].value) == (t, "c")
        table = dg.AssetKey(["ours", "orders"])
        assert graph.get(table).parent_keys == {x}
        (made,) = (
            defs.resolve_job_def("table_table_orders_job")
            .execute_in_process(instance=instance)
            .asset_materializations_for_node("table_table_orders")
        )
        assert (made.asset_key, made.metadata["name"].value) == (table, "table-orders")
