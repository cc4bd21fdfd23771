"""Dagster shows the changes of journals by any writer, and runs downstream assets for them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time as time_of_day
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.freshness import FreshnessState
from dagster._core.definitions.freshness_evaluator import TimeWindowFreshnessPolicyEvaluator
from dagster._core.loader import LoadingContextForTest
from dagster._serdes import serialize_value

from coranto.client.heads import Heads, JournalHead
from coranto.messages.checkpoints import Checkpoint, Source
from coranto.offsets import id_of, vector_of_json
from coranto.specs.journal_tree import parse_tree
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import (
    JournalGroup,
    JournalResource,
    SqlStoreResource,
    build_journal_observation_sensor,
    on_new_content,
)
from dagster_coranto.observation.consumers import ConsumerObservationSensorCursor, ReportedConsumerState
from dagster_coranto.observation.journals import (
    JournalObservationSensorCursor,
    ObservedGroup,
    ReportedGroupState,
    _is_due,
)
from dagster_coranto.translation.metadata import vector_version
from dagster_coranto.translation.translator import build_group_spec
from tests.orchestration.instances import new_instance

ORDERS = JournalGroup("shop/orders")
JOURNALS = ("shop/orders/part-000", "shop/orders/part-001")
KEY = dg.AssetKey(["shop", "orders"])
SPEC = """
name: {name}
replication: 1
fragment: {{length: 1048576, stores: ["file:///"], compression_codec: NONE, refresh_interval: 1m}}
"""


class Shop:
    def __init__(self, cluster: Path, folder: Path, instance: dg.DagsterInstance) -> None:
        self.journals = JournalResource(data_dir=str(cluster))
        self.client = self.journals.client()
        self.instance = instance
        self.store = SqlStoreResource(url=f"sqlite:///{folder / 'store.db'}")
        self.sensor = build_journal_observation_sensor(
            journals=self.journals, groups=[ORDERS], consumers={"revenue": self.store}
        )
        self.cursor: str | None = None

    def tick(self) -> list[dg.AssetMaterialization | dg.AssetObservation]:
        """Evaluate the sensor, and store its events as the daemon does."""
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor)
        result = self.sensor.evaluate_tick(context)
        self.cursor = result.cursor or self.cursor
        events: Any = list(result.asset_events)
        for event in events:
            self.instance.report_runless_asset_event(event)
        return events

    def consume(self) -> None:
        """Commit the current heads, as a consumer does."""
        store = self.store.store()
        fence, _ = store.raise_fence("revenue")
        sources = {journal: Source(self.client.head(journal)) for journal in JOURNALS}
        with store.transaction("revenue", fence) as transaction:
            transaction.commit(Checkpoint(sources, {}))


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with new_instance() as instance:
        yield instance


@pytest.fixture
def shop(cluster_dir: Path, tmp_path: Path, instance: dg.DagsterInstance) -> Iterator[Shop]:
    instance.wipe_assets([KEY])
    shop = Shop(cluster_dir, tmp_path, instance)
    if not shop.client.list(ORDERS.selector).journals:
        for name in JOURNALS:
            shop.client.apply(parse_tree(SPEC.format(name=name)))
    yield shop
    shop.client.close()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets seconds pass for the sensor."""
    passed = [0.0]
    monkeypatch.setattr("dagster_coranto.observation.journals.time", lambda: time_of_day() + passed[0])

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def test_external_writes_are_materialisations_and_lag_is_an_observation(shop: Shop, later: Any) -> None:
    begun = time.time()
    shop.client.append(JOURNALS[0], b"x" * 10)
    heads = {journal: shop.client.head(journal) for journal in JOURNALS}
    (first,) = shop.tick()
    assert isinstance(first, dg.AssetMaterialization)
    assert first.asset_key == KEY
    assert (first.tags or {})["dagster/data_version"] == vector_version(heads).value
    shown = {key.removeprefix("dagster-coranto/"): value.value for key, value in first.metadata.items()}
    assert shown["head"] == sum(heads.values())
    assert vector_of_json(shown["heads"], "heads") == heads
    assert id_of(vector_of_json(shown["heads"], "heads")[JOURNALS[0]])
    assert shown["lag_bytes/revenue"] == sum(heads.values()), "the consumer has consumed nothing yet"
    assert shown["stored_bytes"] + shown["unstored_bytes"] == sum(heads.values())
    assert begun - 1 <= float(shown["last_append"]) <= time.time() + 1  # type: ignore[arg-type]
    table: Any = first.metadata["dagster-coranto/journals"]
    assert table.records[0].data["journal"] == JOURNALS[0], "the journal with the latest append comes first"

    shop.client.append(JOURNALS[1], b"y" * 7)
    assert shop.tick() == [], "one event a minute is enough"
    later(61)
    (second,) = shop.tick()
    assert isinstance(second, dg.AssetMaterialization)
    assert second.metadata["dagster-coranto/bytes"].value == 7
    later(61)
    assert shop.tick() == [], "nothing has changed"

    shop.consume()
    (third,) = shop.tick()
    assert isinstance(third, dg.AssetObservation), "without writes, no downstream asset has to run"
    assert third.metadata["dagster-coranto/lag_bytes/revenue"].value == 0
    shop.client.append(JOURNALS[1], b"z" * 5)
    later(61)
    (fourth,) = shop.tick()
    assert fourth.metadata["dagster-coranto/lag_bytes/revenue"].value == 5


def test_a_version_reported_by_a_run_is_not_reported_again(shop: Shop, later: Any) -> None:
    shop.client.append(JOURNALS[0], b"x")
    heads = {journal: shop.client.head(journal) for journal in JOURNALS}
    tags = {"dagster/data_version": vector_version(heads).value}
    shop.instance.report_runless_asset_event(dg.AssetMaterialization(KEY, tags=tags))
    assert all(isinstance(event, dg.AssetObservation) for event in shop.tick())
    later(61)
    assert shop.tick() == []


def test_a_cursor_ahead_of_the_clock_does_not_stop_reports() -> None:
    """Another machine with a clock that was a day ahead wrote the cursor."""
    assert _is_due(ReportedGroupState(at=time.time() + 86_400, version="1", head=0), 60.0)
    assert not _is_due(ReportedGroupState(at=time.time(), version="1", head=0), 60.0)


def test_an_unknown_head_is_reported_and_counts_as_no_growth() -> None:
    def heads(*statuses: Any) -> Heads:
        journals = (JournalHead(f"a/{n}", status, head=10 * (status == pb.OK)) for n, status in enumerate(statuses))
        return Heads(pb.Header(), tuple(journals))

    whole = ObservedGroup.of(heads(pb.OK, pb.OK), {})
    assert isinstance(whole.event(KEY, None, {}), dg.AssetMaterialization)
    seen = whole.next_state(None, reported=True)
    partial = ObservedGroup.of(heads(pb.OK, pb.NO_JOURNAL_PRIMARY_BROKER), {})
    event = partial.event(KEY, seen, {})
    assert isinstance(event, dg.AssetObservation)
    assert event.metadata["dagster-coranto/unknown_journals"].value == 1
    back = whole.event(KEY, partial.next_state(seen, reported=True), {})
    assert isinstance(back, dg.AssetObservation)


def test_events_about_many_journals_are_small() -> None:
    many = tuple(
        JournalHead(f"shop/orders/region-{n:05}/part", pb.OK, head=n, last_append_time=float(n)) for n in range(10_000)
    )
    event = ObservedGroup.of(Heads(pb.Header(), many), {}).event(KEY, None, {})
    assert event is not None
    assert len(serialize_value(event)) < 60_000
    heads: Any = event.metadata["dagster-coranto/heads"].value
    assert len(heads) == 101
    assert sum(heads.values()) == sum(range(10_000))
    assert len((event.tags or {})["dagster/data_version"]) == 32
    table: Any = event.metadata["dagster-coranto/journals"]
    assert (table.records[0].data["head"], table.records[-1].data["journal"]) == (9_999, "and 9,900 more")
    assert sum(record.data["head"] for record in table.records) == sum(range(10_000))


def test_ticks_are_skipped_while_there_is_no_cluster(tmp_path: Path) -> None:
    sensor = build_journal_observation_sensor(journals=JournalResource(data_dir=str(tmp_path)), groups=[ORDERS])
    with dg.DagsterInstance.ephemeral() as instance:
        result = sensor.evaluate_tick(dg.build_sensor_context(instance=instance))
    assert re.match("Cluster or store does not answer: ", result.skip_message or "")


def test_a_consumer_runs_by_declarative_automation_alone(shop: Shop, later: Any) -> None:
    """No sensor requests its runs: the observing sensor reports growth, and the consumer's condition requests runs."""
    shop.consume()
    runs = 0

    @dg.asset(deps=[build_group_spec(ORDERS)], automation_condition=on_new_content())
    def revenue() -> dg.MaterializeResult[None]:
        if runs == 2:
            # Another producer writes, and the sensor reports it, during a run.
            shop.client.append(JOURNALS[0], b"meanwhile\n")
            later(61)
            assert shop.tick()
        shop.consume()
        return dg.MaterializeResult()

    definitions = dg.Definitions(assets=[build_group_spec(ORDERS), revenue])
    cursor = None

    def evaluate() -> int:
        """Evaluate conditions as the automation sensor does, and execute the requested runs."""
        nonlocal cursor, runs
        result = dg.evaluate_automation_conditions(definitions, shop.instance, cursor=cursor)
        cursor = result.cursor
        if result.total_requested:
            runs += 1
            assert dg.materialize([revenue], instance=shop.instance).success
        return result.total_requested

    evaluate()
    for _ in range(2):
        shop.client.append(JOURNALS[0], b"order\n")
        later(61)
        shop.tick()
        assert evaluate() == 1
    assert evaluate() == 1, "a third run consumes the content that arrived during the second"
    assert evaluate() == 0
    assert evaluate() == 0, "nothing is left to consume"
    store = shop.store.read("revenue")
    assert store is not None
    assert {journal: source.read_through for journal, source in store.checkpoint.sources.items()} == {
        journal: shop.client.head(journal) for journal in JOURNALS
    }


def test_declarative_automation_retries_a_failed_run(shop: Shop, later: Any) -> None:
    fails = True

    @dg.asset(deps=[build_group_spec(ORDERS)], automation_condition=on_new_content())
    def revenue() -> None:
        if fails:
            raise RuntimeError("the store is away")

    definitions = dg.Definitions(assets=[build_group_spec(ORDERS), revenue])
    cursor = None
    at = datetime(2030, 1, 1, 12, 1, tzinfo=UTC)

    def evaluate(minutes: int) -> int:
        nonlocal cursor
        now = at + timedelta(minutes=minutes)
        result = dg.evaluate_automation_conditions(definitions, shop.instance, cursor=cursor, evaluation_time=now)
        cursor = result.cursor
        if result.total_requested:
            dg.materialize([revenue], instance=shop.instance, raise_on_error=False)
        return result.total_requested

    evaluate(0)
    shop.client.append(JOURNALS[0], b"order\n")
    later(61)
    shop.tick()
    assert [evaluate(minutes) for minutes in (1, 2, 3, 10, 11, 12)] == [1, 0, 0, 1, 0, 0]
    fails = False
    assert [evaluate(minutes) for minutes in (20, 21, 30, 40)] == [1, 0, 0, 0]


def test_a_freshness_policy_is_updated_by_external_writes(shop: Shop, later: Any) -> None:
    policy = dg.FreshnessPolicy.time_window(fail_window=timedelta(minutes=5))
    spec = build_group_spec(ORDERS).replace_attributes(freshness_policy=policy)
    graph = dg.Definitions(assets=[spec]).resolve_asset_graph()
    assert graph.get(KEY).freshness_policy == policy
    assert state_of(shop.instance, graph) is FreshnessState.UNKNOWN
    shop.client.append(JOURNALS[0], b"order\n")
    later(61)
    assert shop.tick()
    assert state_of(shop.instance, graph) is FreshnessState.PASS


def state_of(instance: dg.DagsterInstance, graph: Any) -> FreshnessState:
    """Return the freshness of the group, as Dagster's daemon evaluates it."""
    evaluator = TimeWindowFreshnessPolicyEvaluator()
    return asyncio.run(evaluator.evaluate_freshness(LoadingContextForTest(instance), graph.get(KEY)))


def test_cursors_of_an_earlier_version_can_be_parsed() -> None:
    kept = (
        '{"__class__": "JournalObservationSensorCursor", "groups": {"g": {"__class__": "GroupSeen", "at": 1.5, '
        '"head": 3, "state": "s", "version": "v"}}}'
    )
    wanted = JournalObservationSensorCursor(groups={"g": ReportedGroupState(at=1.5, head=3, state="s", version="v")})
    assert JournalObservationSensorCursor.parse(kept) == wanted
    assert JournalObservationSensorCursor.parse(wanted.to_text()) == wanted
    consumers = (
        '{"__class__": "ConsumerObservationSensorCursor", "consumers": {"c": {"__class__": "ConsumerSeen", '
        '"at": 1.5, "lag": 3, "version": "v"}}}'
    )
    seen = ConsumerObservationSensorCursor(consumers={"c": ReportedConsumerState(at=1.5, lag=3, version="v")})
    assert ConsumerObservationSensorCursor.model_validate_json(consumers) == seen
