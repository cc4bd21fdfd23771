"""A task cleared while it runs, with a connection from Airflow's database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.orchestration.airflow.installed.airflow_api import until
from tests.orchestration.airflow.installed.world import SLOW, STORED, AirflowWorld

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SECRET = "bm90LWEtdG9rZW4tb2YtYW55Ym9keQ"
TASK = "publish_slowly"


@pytest.fixture(scope="module")
def stored(world: AirflowWorld) -> Iterator[None]:
    """A connection with a token, created through Airflow's API."""
    extra = {"data_dir": str(world.airflow.data_dir), "cluster": "demo"}
    fields = {"connection_id": STORED, "conn_type": "coranto", "password": f"header.{SECRET}.signature"}
    world.api.call("/connections", {**fields, "extra": json.dumps(extra)})
    yield
    world.api.call(f"/connections/{STORED}", method="DELETE")


@pytest.fixture(scope="module")
def run(world: AirflowWorld, stored: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A finished run with a publisher that was cleared while publishing."""
    gate: Path = tmp_path_factory.mktemp("gate") / "open"
    run = world.api.start("slow_shop", {"gate": str(gate)})
    world.api.await_task("slow_shop", run, TASK, "running")
    until(lambda: world.total(SLOW))
    tasks = {"dry_run": False, "dag_run_id": run, "task_ids": [TASK], "only_failed": False}
    world.api.call("/dags/slow_shop/clearTaskInstances", tasks)
    until(lambda: world.api.task("slow_shop", run, TASK)["try_number"] == 2)
    assert world.messages(SLOW) == 0
    gate.touch()
    world.api.await_task("slow_shop", run, TASK, "success")
    return run


def test_the_rows_of_a_cleared_task_are_published_once(world: AirflowWorld, run: str) -> None:
    assert world.messages(SLOW) == 2001
    assert world.api.xcom("slow_shop", run, TASK)["messages"] == 2001


def test_the_token_of_the_connection_is_shown_nowhere(world: AirflowWorld, run: str) -> None:
    task = world.api.task("slow_shop", run, TASK)
    xcoms = world.api.call(f"/dags/slow_shop/dagRuns/{quote(run)}/taskInstances/{TASK}/xcomEntries")
    shown = [task, world.api.log(task), xcoms, world.api.call(f"/connections/{STORED}")]
    assert task["rendered_fields"]["group"] == SLOW
    assert SECRET not in json.dumps(shown)
    assert not world.files_containing(SECRET)
