"""Processes started by the UI end with it."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from coranto.errors import ClusterError
from dagster_coranto.flights.ui import DagsterUi

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

TIMEOUT_S = 180

LAUNCH = """
mutation Launch($what: ExecutionParams!) {
  launchPipelineExecution(executionParams: $what) { __typename ... on LaunchRunSuccess { run { runId } } }
}
"""


def launch(ui: DagsterUi, job: str) -> str:
    """Start a job as the UI does, and return the run's id."""
    selector = {
        "repositoryLocationName": "dagster_coranto",
        "repositoryName": "__repository__",
        "pipelineName": job,
    }
    what = {"selector": selector, "mode": "default", "runConfigData": {}}
    body = json.dumps({"query": LAUNCH, "variables": {"what": what}}).encode()
    request = urllib.request.Request(f"{ui.url}/graphql", data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)["data"]["launchPipelineExecution"]
    assert answer["__typename"] == "LaunchRunSuccess"
    return str(answer["run"]["runId"])


def await_status(run_id: str, *wanted: dg.DagsterRunStatus) -> dg.DagsterRunStatus:
    with dg.DagsterInstance.get() as instance:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            run = instance.get_run_by_id(run_id)
            if run is not None and (run.status in wanted or run.is_finished):
                return run.status
            time.sleep(0.1)
    raise AssertionError(f"run {run_id} never reached {wanted}")


def groups(pids: list[int]) -> list[int]:
    """Return the process groups that still have processes."""
    left = []
    for pid in pids:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            continue
        left.append(pid)
    return left


@pytest.mark.exhaustive
def test_closing_the_ui_ends_its_servers_and_their_runs(cluster_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    with DagsterUi(cluster_dir, stop_seconds=TIMEOUT_S) as ui:
        # All flights, which cannot all be published before the UI is closed.
        run_id = launch(ui, "flights")
        assert await_status(run_id, dg.DagsterRunStatus.STARTED) is dg.DagsterRunStatus.STARTED
        ui.watch()
        pids = ui.pids
        assert groups(pids) == pids
    assert groups(pids) == []
    assert await_status(run_id) is dg.DagsterRunStatus.FAILURE


def test_definitions_that_fail_to_load_are_reported_with_dagsters_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('the tail numbers are gone')\n")
    (tmp_path / "workspace.yaml").write_text("load_from:\n  - python_file: broken.py\n")
    monkeypatch.chdir(tmp_path)
    ui = DagsterUi(tmp_path / "data", daemon=None, stop_seconds=TIMEOUT_S)
    with pytest.raises(ClusterError, match=r"(?s)cannot load broken.py.*the tail numbers are gone"), ui:
        raise AssertionError("the UI started")
    assert ui.pids == []


def test_a_taken_port_is_replaced_by_a_free_one(cluster_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert DagsterUi(cluster_dir, port=port).url != f"http://127.0.0.1:{port}"
