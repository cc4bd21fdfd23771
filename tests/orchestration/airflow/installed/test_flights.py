"""The flights job on a real Airflow with a real cluster: kills, clearing, and concurrent runs."""

from __future__ import annotations

import os
import signal
import threading
from itertools import pairwise
from typing import Any

import pytest

from coranto.client.committed import committed_messages
from coranto.client.publishing import sync_publisher
from coranto.cluster.processes import ChildProcess
from coranto.messages import JsonLines
from coranto.offsets import vector_of_json
from coranto_consumers.stores.sql import SqlStore
from coranto_flights.data import expected_alerts, load_flights
from coranto_flights.names import consumer_name
from coranto_flights.proof import prove
from tests.orchestration.airflow.installed.airflow_api import kill_task, until
from tests.orchestration.airflow.installed.world import AirflowWorld

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

FLIGHTS = 40_000
PREFIX = "airflow/"
TABLE = "carrier_delays_airflow"
EVENTS = f"{PREFIX}flights/events"
ALERTS = f"{PREFIX}flights/alerts"


def consumed(world: AirflowWorld) -> int:
    """Return the bytes of events that the consumer has processed, from its checkpoint."""
    found = SqlStore(world.store_url).read(consumer_name(PREFIX))
    return 0 if found is None else sum(each.read_through for each in found.checkpoint.sources.values())


def proven(world: AirflowWorld) -> None:
    """Check the results as the demo does."""
    for claim in prove(world.config, world.store_url, load_flights(FLIGHTS), prefix=PREFIX, table=TABLE):
        assert claim.holds, f"{claim.claim}: {claim.detail}"


@pytest.fixture(scope="module")
def run(world: AirflowWorld) -> str:
    """A finished run of the job with a publisher and a consumer that were killed half-way."""
    api = world.api
    run = api.start("flights", {"limit": FLIGHTS})
    publisher = api.await_task("flights", run, "publish_flights", "running")
    until(lambda: world.total(EVENTS) if world.client.list(f"name:prefix={EVENTS}/").names else 0, pause=0.02)
    kill_task(publisher)
    assert world.messages(EVENTS) == 0
    assert api.await_task("flights", run, "publish_flights", "success")["try_number"] == 2

    consumer = api.await_task("flights", run, "consume_flights", "running")
    until(lambda: consumed(world), pause=0.05)
    kill_task(consumer)
    assert consumed(world) < world.total(EVENTS)
    assert api.await_task("flights", run, "consume_flights", "success")["try_number"] == 2
    api.await_task("flights", run, "audit", "success")
    return run


def test_the_result_of_killed_tasks_is_exact(world: AirflowWorld, run: str) -> None:
    assert world.messages(EVENTS) == FLIGHTS
    published = world.api.xcom("flights", run, "publish_flights")
    assert (published["messages"], published["is_new"]) == (FLIGHTS, True)
    assert world.api.xcom("flights", run, "audit")["sound"]
    assert world.api.xcom("flights", run, "audit", "report")["subjects"]
    proven(world)


def test_appends_start_a_dag_and_each_byte_is_in_one_event(world: AirflowWorld, run: str) -> None:
    last = until(lambda: [each for each in world.api.runs("flight_alerts") if each["state"] == "success"])[-1]
    until(lambda: sum(event["bytes"] for event in world.api.asset_events()) == world.total(ALERTS))
    result = world.api.xcom("flight_alerts", last["dag_run_id"], "count_alerts")
    assert 0 < result["alerts"] <= len(expected_alerts(load_flights(FLIGHTS)))


def test_a_cleared_task_publishes_nothing_more(world: AirflowWorld, run: str) -> None:
    before = world.total(EVENTS)
    tasks = {"dry_run": False, "dag_run_id": run, "task_ids": ["publish_flights"], "only_failed": False}
    world.api.call("/dags/flights/clearTaskInstances", tasks)
    until(lambda: world.api.task("flights", run, "publish_flights")["try_number"] == 3)
    world.api.await_task("flights", run, "publish_flights", "success")
    assert not world.api.xcom("flights", run, "publish_flights")["is_new"]
    assert world.total(EVENTS) == before
    proven(world)


def test_a_killed_triggerer_misses_and_repeats_nothing(world: AirflowWorld, run: str) -> None:
    journal = world.client.list(f"name:prefix={ALERTS}/").names[0]
    alert = next(iter(committed_messages(world.client, journal, JsonLines()))).message
    alert.pop("_meta")
    stop = threading.Event()

    def append() -> None:
        publisher = sync_publisher(world.client, JsonLines())
        while not stop.wait(0.3):
            publisher.publish(journal, alert)
            publisher.flush()

    def grow(events: int = 1) -> None:
        seen = len(world.api.asset_events())
        until(lambda: len(world.api.asset_events()) >= seen + events, pause=0.05)

    writer = threading.Thread(target=append)
    writer.start()
    paused: ChildProcess | None = None
    try:
        grow()
        triggerer = world.airflow.process("triggerer")
        os.killpg(triggerer.pid, signal.SIGKILL)
        triggerer.wait(30)
        paused = world.airflow.start_process("triggerer")
        grow()
        os.killpg(paused.pid, signal.SIGSTOP)
        world.airflow.start_process("triggerer")  # It takes over, and the paused one resumes later.
        grow()
        os.killpg(paused.pid, signal.SIGCONT)
        grow(3)
    finally:
        stop.set()
        writer.join()
        if paused is not None:
            os.killpg(paused.pid, signal.SIGKILL)
            paused.wait(30)

    def heads(event: dict[str, Any], name: str = "heads") -> dict[str, int]:
        return vector_of_json(event[name], name)

    until(lambda: world.client.head(journal) in {heads(event)[journal] for event in world.api.asset_events()})
    events = sorted(
        world.api.asset_events(), key=lambda event: (sum(heads(event, "since").values()), sum(heads(event).values()))
    )
    for earlier, later in pairwise(events):
        assert later["since"] == earlier["heads"]
    assert sum(event["bytes"] for event in events) == world.total(ALERTS)


def test_concurrent_runs_publish_their_own_rows(world: AirflowWorld, run: str) -> None:
    before = world.messages(EVENTS)
    runs = [world.api.start("flights", {"limit": 200}) for _ in range(2)]
    for each in runs:
        world.api.await_task("flights", each, "audit", "success")
    assert world.messages(EVENTS) == before + 400
    assert consumed(world) == world.total(EVENTS)
