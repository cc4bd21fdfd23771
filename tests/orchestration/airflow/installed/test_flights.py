"""The flights job on a real Airflow over a real cluster: kills, clearing, two runs at once, and a browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

from airflow_coranto.flights.standalone import DAGS, AirflowStandalone
from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.cluster import EmbeddedCluster
from coranto.messages import JsonLines
from coranto_consumers.stores.sql import SqlStore
from coranto_flights.data import expected_alerts, load_flights
from coranto_flights.names import consumer_name
from coranto_flights.proof import prove
from tests.orchestration.airflow.installed.airflow_api import AirflowApi, kill_task, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[4]
SOURCES = ("platform", "broker", "consumers", "orchestration")
FLIGHTS = 40_000
PREFIX = "airflow/"
TABLE = "carrier_delays_airflow"
EVENTS = f"{PREFIX}flights/events"
ALERTS = f"{PREFIX}flights/alerts"
TOKEN = "eyJhbGciOiJIUzI1NiJ9.c2VjcmV0LXNjb3Bl.c2lnbmF0dXJlLXRoYXQtbm9ib2R5LW1heS1zZWU"
CHROMIUM = "/usr/bin/chromium"
RECOVERY = f'''
from airflow.sdk import DAG
from airflow_coranto.operators import recovery_with_approval

with DAG("recovery", schedule=None):
    recovery_with_approval(group="{PREFIX}flights")
'''


@dataclass(frozen=True)
class World:
    """Airflow and the cluster below it."""

    airflow: AirflowStandalone
    api: AirflowApi
    config: ClientConfig
    client: SyncJournalClient
    store: SqlStore

    def total(self, group: str) -> int:
        """Return the bytes that the journals of a group hold."""
        return sum(self.client.head(name) for name in self.client.list(f"name:prefix={group}/").names)

    def messages(self, group: str) -> int:
        """Return the number of messages that a reader of committed messages sees."""
        names = self.client.list(f"name:prefix={group}/").names
        return sum(1 for name in names for _ in committed_messages(self.client, name, JsonLines()))

    def consumed(self) -> int:
        found = self.store.read(consumer_name(PREFIX))
        return 0 if found is None else sum(each.read_through for each in found.checkpoint.sources.values())

    def prove(self) -> None:
        url = f"sqlite:///{self.airflow.data_dir / 'store.db'}"
        for claim in prove(self.config, url, load_flights(FLIGHTS), prefix=PREFIX, table=TABLE):
            assert claim.holds, f"{claim.claim}: {claim.detail}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("airflow-cluster")
    dags = tmp_path_factory.mktemp("dags")
    for path in DAGS.glob("*.py"):
        shutil.copy(path, dags)
    (dags / "recovery.py").write_text(RECOVERY)
    connection = {"conn_type": "coranto", "password": TOKEN, "extra": {"data_dir": str(data), "cluster": "demo"}}
    settings = {
        "AIRFLOW_CONN_CORANTO_DEFAULT": json.dumps(connection),
        # Another triggerer takes over from a dead one after this many seconds.
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "8",
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / each) for each in ("platform", "broker", "consumers", "orchestration")
        ),
    }
    with EmbeddedCluster(data, brokers=1, lease_seconds=60, etcd_fsync=False) as cluster:
        config = ClientConfig(cluster.info.endpoint, cluster.info.file_root)
        with AirflowStandalone(data, dags=dags, settings=settings) as airflow, SyncJournalClient.of(config) as client:
            api = AirflowApi(airflow.url)
            api.await_dags("flights", "flight_alerts", "recovery")
            yield World(airflow, api, config, client, SqlStore(f"sqlite:///{data / 'store.db'}"))


@pytest.fixture(scope="module")
def run(world: World) -> str:
    """A finished run of the job, whose publisher and consumer were killed half-way."""
    api = world.api
    run = api.start("flights", {"limit": FLIGHTS})
    publisher = api.await_task("flights", run, "publish_flights", "running")
    until(lambda: world.total(EVENTS) if world.client.list(f"name:prefix={EVENTS}/").names else 0, pause=0.02)
    kill_task(publisher)
    assert world.messages(EVENTS) == 0
    assert api.await_task("flights", run, "publish_flights", "success")["try_number"] == 2

    consumer = api.await_task("flights", run, "consume_flights", "running")
    until(world.consumed, pause=0.05)
    kill_task(consumer)
    assert world.consumed() < world.total(EVENTS)
    assert api.await_task("flights", run, "consume_flights", "success")["try_number"] == 2
    api.await_task("flights", run, "audit", "success")
    return run


def test_the_result_of_killed_tasks_is_exact(world: World, run: str) -> None:
    assert world.messages(EVENTS) == FLIGHTS
    published = world.api.xcom("flights", run, "publish_flights")
    assert (published["messages"], published["is_new"]) == (FLIGHTS, True)
    assert world.api.xcom("flights", run, "audit")["sound"]
    assert world.api.xcom("flights", run, "audit", "report")["subjects"]
    world.prove()


def test_appends_start_a_dag_and_each_byte_is_in_one_event(world: World, run: str) -> None:
    last = until(lambda: [each for each in world.api.runs("flight_alerts") if each["state"] == "success"])[-1]
    until(lambda: sum(event["bytes"] for event in world.api.asset_events()) == world.total(ALERTS))
    told = world.api.xcom("flight_alerts", last["dag_run_id"], "count_alerts")
    assert 0 < told["alerts"] <= len(expected_alerts(load_flights(FLIGHTS)))


def test_a_cleared_task_publishes_nothing_more(world: World, run: str) -> None:
    before = world.total(EVENTS)
    tasks = {"dry_run": False, "dag_run_id": run, "task_ids": ["publish_flights"], "only_failed": False}
    world.api.call("/dags/flights/clearTaskInstances", tasks)
    until(lambda: world.api.task("flights", run, "publish_flights")["try_number"] == 3)
    world.api.await_task("flights", run, "publish_flights", "success")
    assert not world.api.xcom("flights", run, "publish_flights")["is_new"]
    assert world.total(EVENTS) == before
    world.prove()


def test_a_killed_triggerer_misses_and_repeats_nothing(world: World, run: str) -> None:
    journal = world.client.list(f"name:prefix={ALERTS}/").names[0]
    alert = next(iter(committed_messages(world.client, journal, JsonLines()))).message
    alert.pop("_meta")
    stop = threading.Event()

    def append() -> None:
        from coranto.client.publishing import sync_publisher

        publisher = sync_publisher(world.client, JsonLines())
        while not stop.wait(0.3):
            publisher.publish(journal, alert)
            publisher.flush()

    writer = threading.Thread(target=append)
    writer.start()
    try:
        for _ in range(2):
            seen = len(world.api.asset_events())
            until(lambda seen=seen: len(world.api.asset_events()) > seen, pause=0.05)  # type: ignore[misc]
            triggerer = world.airflow.part("triggerer")
            os.killpg(triggerer.pid, signal.SIGKILL)
            triggerer.wait(30)
            world.airflow.start_part("triggerer")
    finally:
        stop.set()
        writer.join()
    until(lambda: world.api.asset_events()[-1]["heads"][journal] == world.client.head(journal))
    events = world.api.asset_events()
    for earlier, later in pairwise(events):
        assert later["since"] == earlier["heads"]
    assert sum(event["bytes"] for event in events) == world.total(ALERTS)


def test_two_runs_at_once_publish_their_own_rows(world: World, run: str) -> None:
    before = world.messages(EVENTS)
    runs = [world.api.start("flights", {"limit": 200}) for _ in range(2)]
    for each in runs:
        world.api.await_task("flights", each, "audit", "success")
    assert world.messages(EVENTS) == before + 400
    assert world.consumed() == world.total(EVENTS)


def test_damage_is_mended_as_a_person_has_approved(world: World, run: str) -> None:
    folder = world.config.file_root
    assert folder is not None
    damaged = max((folder / EVENTS).rglob("*.zst"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-7])
    recovery = world.api.start("recovery")
    world.api.await_task("recovery", recovery, "recovery.plan", "success")
    plan = world.api.xcom("recovery", recovery, "recovery.plan")
    assert plan["steps"]
    world.api.await_task("recovery", recovery, "recovery.approve", "awaiting_input", "deferred")
    assert world.api.task("recovery", recovery, "recovery.recover")["state"] is None
    path = f"/dags/recovery/dagRuns/{recovery}/taskInstances/recovery.approve/-1/hitlDetails"
    details = world.api.call(path.replace(recovery, recovery.replace("+", "%2B")))
    assert f"Approve {plan['hash']}" in details["options"]
    assert plan["hash"] in details["body"]
    answer = {"chosen_options": [f"Approve {plan['hash']}"], "params_input": {}}
    world.api.call(path.replace(recovery, recovery.replace("+", "%2B")), answer, "PATCH")
    world.api.await_task("recovery", recovery, "recovery.approve", "success")
    world.api.await_task("recovery", recovery, "recovery.recover", "success")
    assert world.api.xcom("recovery", recovery, "recovery.recover")["done"]


def test_no_log_tells_the_token(world: World, run: str) -> None:
    files = [
        path for path in world.airflow.home.rglob("*") if path.is_file() and path.suffix in (".log", ".db", ".json")
    ]
    files += list((world.airflow.data_dir / "logs").glob("*.log"))
    assert any("task_id=publish_flights" in str(path) for path in files)
    secret = TOKEN.rpartition(".")[2].encode()
    assert not [path for path in files if secret in path.read_bytes()]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path / "profile",
            executable_path=CHROMIUM,
            headless=True,
            args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"],
            viewport={"width": 1500, "height": 850},
        )
        context.set_default_timeout(120_000)
        yield context.new_page()
        context.close()


def picture(page: Page, name: str) -> None:
    """Keep a picture in the folder that $CORANTO_PICTURES names, if it does."""
    if folder := os.environ.get("CORANTO_PICTURES"):
        page.screenshot(path=Path(folder) / name)


@pytest.mark.browser
def test_the_pages_of_the_job_in_a_browser(world: World, run: str, page: Page) -> None:
    page.goto(f"{world.airflow.url}/dags/flights")
    page.get_by_text("publish_flights").first.wait_for()
    page.get_by_test_id("graph-button").click() if page.get_by_test_id("graph-button").count() else None
    page.wait_for_load_state("networkidle")
    picture(page, "airflow-flights.png")
    page.goto(f"{world.airflow.url}/dags/flights/runs/{run}/tasks/audit")
    link: Any = page.get_by_role("link", name="Report")
    link.first.wait_for()
    page.goto(link.first.get_attribute("href"))
    page.get_by_text("report").first.wait_for()
    picture(page, "airflow-report.png")
    page.goto(f"{world.airflow.url}/assets")
    page.get_by_text("journal://demo/airflow/flights/alerts").or_(page.get_by_text(ALERTS)).first.wait_for()
    picture(page, "airflow-assets.png")
