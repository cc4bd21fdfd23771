"""A Spark consumer as a service: in a run, and outside of Dagster."""

from __future__ import annotations

import datetime as dt
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from coranto.client.loop import run_blocking
from coranto.errors import Fenced, InvalidInput
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.stopping import Stop
from dagster_coranto import (
    AsOf,
    ConsumerMode,
    ConsumerSettings,
    JournalResource,
    SparkResource,
    SqlStoreResource,
)
from dagster_coranto.consumers.assets import spark_consumer_assets
from dagster_coranto.instance.heartbeat import ALIVE_TAG
from dagster_coranto.serve import load_repository, run, serve
from tests.orchestration.instances import new_instance
from tests.orchestration.revenue import ORDERS, REVENUE, SCHEMA, Revenue

pytestmark = pytest.mark.integration

JOURNAL = "shop/orders/part-000"


def settings(context: dg.AssetExecutionContext, store: SqlStoreResource) -> ConsumerSettings:
    return ConsumerSettings(Revenue(), store.url_with_password())


consumer = spark_consumer_assets(
    name="consume_orders",
    sources=[ORDERS],
    tables=[dg.AssetSpec("revenue")],
    mode=ConsumerMode.SERVICE,
    report_seconds=0.5,
)(settings)


@dataclass(frozen=True, slots=True)
class StopOn:
    """A stop that is requested once an event is set."""

    event: threading.Event

    def __call__(self) -> bool:
        return self.event.is_set()

    def wait(self, seconds: float = 1.0) -> bool:
        return self.event.wait(seconds)


class Shop:
    def __init__(self, broker: FakeBroker, journals: JournalResource, folder: Path) -> None:
        self.broker = broker
        self.store = SqlStoreResource(url=f"sqlite:///{folder / 'store.db'}")
        self.resources = {"journals": journals, "spark": SparkResource(), "store": self.store}
        self.definitions = dg.Definitions(assets=[consumer], resources=self.resources)
        broker.create(JOURNAL)

    def order(self, cents: int) -> None:
        run_blocking(self.broker.write(JOURNAL, f'{{"customer": "ada", "cents": {cents}}}\n'.encode()))

    def total(self) -> int:
        """Return the cents in the store, or 0 before it has the table."""
        found = self.store.read("revenue")
        if found is None or not found.checkpoint.sources:
            return 0
        with self.store.store().engine.connect() as connection:
            return int(connection.execute(REVENUE.select()).one().cents)

    @contextmanager
    def orders_during(self, stop: threading.Event) -> Iterator[None]:
        """Place two orders during the block, the second after the first is consumed. Then set `stop`."""
        done = threading.Event()

        def place() -> None:
            for cents in (100, 900):
                before = self.total()
                self.order(cents)
                while self.total() < before + cents and not done.wait(0.05):
                    pass
            stop.set()

        placing = threading.Thread(target=place)
        placing.start()
        try:
            yield
        finally:
            done.set()
            placing.join()


@pytest.fixture
def shop(broker: FakeBroker, journals: JournalResource, tmp_path: Path) -> Shop:
    return Shop(broker, journals, tmp_path)


def materializations(instance: dg.DagsterInstance) -> list[dg.AssetMaterialization]:
    records = instance.fetch_materializations(dg.AssetKey("revenue"), limit=10).records
    return [made for record in reversed(records) if (made := record.asset_materialization) is not None]


def test_a_service_run_reports_periodically_and_ends_by_its_configuration(
    spark: SparkSession, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_instance() as instance:
        shop.order(100)
        config: Any = {"ops": {"consume_orders": {"config": {"for_seconds": 3600}}}}
        stop = threading.Event()
        # An hour has passed once both orders are consumed.
        monkeypatch.setattr("dagster_coranto.consumers.assets.monotonic", lambda: 3600.0 if stop.is_set() else 0.0)
        with shop.orders_during(stop):
            result = dg.materialize([consumer], resources=shop.resources, instance=instance, run_config=config)
        assert result.success
        assert shop.total() == 1_100
        made = materializations(instance)
        assert len(made) >= 2, "one report during the run, and one at its end"
        messages = [each.metadata["dagster-coranto/messages"].value for each in made]
        assert messages == sorted(messages)
        assert messages[-1] == 3
        last = made[-1].metadata
        assert last["dagster-coranto/lag_bytes"].value == 0
        assert last["dagster/row_count"].value == 1
        assert last["dagster/table_name"].value == "revenue"
        schema: Any = last["dagster/column_schema"].value
        assert [column.name for column in schema.columns] == ["customer", "cents"]
        (run,) = instance.get_runs()
        assert ALIVE_TAG in run.tags


def test_a_process_outside_of_dagster_reports_without_runs(spark: SparkSession, shop: Shop) -> None:
    with new_instance() as instance:
        stop = threading.Event()
        with shop.orders_during(stop):
            serve(shop.definitions.get_repository_def(), "", instance, StopOn(stop))
        assert shop.total() == 1_000
        made = materializations(instance)
        assert made[-1].metadata["dagster-coranto/messages"].value == 2
        assert (made[-1].tags or {})["dagster/data_version"] != (made[0].tags or {})["dagster/data_version"]
        assert instance.get_runs_count() == 0


def test_a_fenced_service_ends(spark: SparkSession, shop: Shop) -> None:
    shop.order(100)
    never, ended = threading.Event(), threading.Event()

    def take_over() -> None:
        while not shop.total() and not ended.wait(0.05):
            pass
        shop.store.store().raise_fence("revenue")
        shop.order(900)

    other = threading.Thread(target=take_over)
    other.start()
    try:
        with dg.DagsterInstance.ephemeral() as instance, pytest.raises(Fenced, match="raised by a later owner"):
            serve(shop.definitions.get_repository_def(), "consume_orders", instance, StopOn(never))
    finally:
        ended.set()
        other.join()
    assert shop.total() == 100


def test_unknown_consumers_and_modes_are_refused(shop: Shop) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        with pytest.raises(
            InvalidInput, match="'other' is not a Spark consumer of these definitions; they have: consume"
        ):
            serve(shop.definitions.get_repository_def(), "other", instance, StopOn(threading.Event()))
        config: Any = {"ops": {"consume_orders": {"config": {"mode": "for ever"}}}}
        with pytest.raises(InvalidInput, match="'for ever' is not a mode of a consumer; write drain or service"):
            dg.materialize([consumer], resources=shop.resources, instance=instance, run_config=config)


def test_as_of_a_run_over_120_journals_has_all_of_them(spark: SparkSession, shop: Shop) -> None:
    """Metadata shows 100 journals. The consumer's store has all of them."""
    names = [f"shop/orders/part-{number:03d}" for number in range(120)]
    for name in names[1:]:
        shop.broker.create(name)
    for cents, name in enumerate(names[::3]):
        run_blocking(shop.broker.write(name, f'{{"customer": "ada", "cents": {cents}}}\n'.encode()))
    drain: Any = {"ops": {"consume_orders": {"config": {"mode": "drain"}}}}
    with new_instance() as instance:
        run = dg.materialize([consumer], resources=shop.resources, instance=instance, run_config=drain)
        heads = {name: shop.broker.journals[name].head for name in names}
        shop.order(7)
        dg.materialize([consumer], resources=shop.resources, instance=instance, run_config=drain)
        key = dg.AssetKey("revenue")
        found = AsOf.run(instance, key, run.run_id, store=shop.store)
        assert {name: found.ends.get(name, 0) for name in names} == heads
        assert AsOf.time(instance, key, dt.datetime.now(dt.UTC), store=shop.store).ends[JOURNAL] > heads[JOURNAL]
        read = found.read(spark, shop.resources["journals"], SCHEMA)
        assert read.groupBy().sum("cents").first()[0] == sum(range(40)), "the later order is not included"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    before, waited = signal.getsignal(number), []

    def consume(repository: object, name: str, instance: object, stop: Stop, registry: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # A Spark session replaces the handler of interrupts.
        assert not stop()
        signal.raise_signal(number)
        waited.append(stop.wait(600))
        assert stop()

    monkeypatch.setattr("dagster_coranto.serve.load_repository", lambda module: None)
    monkeypatch.setattr("dagster_coranto.serve.serve", consume)
    monkeypatch.setattr("dagster_coranto.serve.configure_logging", lambda level: None)
    with new_instance():
        run("shop.definitions")
    assert waited == [True]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    "text", ["defs = dg.Definitions([a])", "@dg.definitions\ndef defs():\n    return dg.Definitions([a])", ""]
)
def test_definitions_of_a_module_are_found_in_all_usual_forms(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = f"served_{request.node.callspec.indices['text']}"
    (tmp_path / f"{name}.py").write_text(f"import dagster as dg\n\n@dg.asset\ndef a(): ...\n\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert dg.AssetKey("a") in load_repository(name).assets_defs_by_key


def test_a_module_with_several_definitions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served_twice.py").write_text(
        "import dagster as dg\none = dg.Definitions([])\ntwo = dg.Definitions([])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match="served_twice has 2 objects with definitions"):
        load_repository("served_twice")
