"""The examples of docs/airflow.md and the flights job, parsed as DAGs; and the page's Airflow, run as printed."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from coranto.cluster.processes import free_port
from tests.orchestration.airflow.installed.airflow_api import until

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "airflow.md"
FLIGHTS = ROOT / "orchestration" / "airflow_coranto" / "flights" / "dags" / "flights.py"


def test_the_examples_are_dags() -> None:
    found: dict[str, DAG] = {}
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for example in [*examples, FLIGHTS.read_text()]:
        names: dict[str, object] = {"__name__": "example"}
        dags: list[DAG] = []
        entered = DAG.__enter__

        def enter(self: DAG, entered: object = entered, dags: list[DAG] = dags) -> DAG:
            dags.append(self)
            return entered(self)  # type: ignore[operator, no-any-return]

        DAG.__enter__ = enter  # type: ignore[method-assign]
        try:
            exec(compile(example, PAGE, "exec"), names)
        finally:
            DAG.__enter__ = entered  # type: ignore[method-assign]
        found |= {dag.dag_id: dag for dag in dags}
    assert set(found) == {"flights", "flight_alerts", "ingest_orders", "orders_table", "recovery", "on_orders", "shop"}
    assert set(found["flights"].task_ids) == {"apply_specs", "publish_flights", "consume_flights", "audit"}
    assert found["orders_table"].get_task("table").upstream_task_ids == {"ingest"}
    assert set(found["shop"].task_ids) == {"specs", "publish", "consume", "audit"}
    assert set(found["recovery"].task_ids) == {"recovery.plan", "recovery.approve", "recovery.recover"}


def test_the_example_of_dlt_is_a_dag() -> None:
    text = (ROOT / "docs" / "dlt.md").read_text()
    [example] = re.findall(r"^```python\n(from airflow.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "dlt.md", "exec"), names)
    found: DAG = names["shop_orders"]()
    assert (found.dag_id, found.task_ids) == ("shop_orders", ["load"])


@pytest.mark.system
@pytest.mark.timeout(900)
def test_the_section_on_your_own_airflow_runs_as_printed(tmp_path: Path) -> None:
    """This excludes the installation, which `make test-install` tests."""
    (section,) = re.findall(
        r"^## Your own Airflow in five minutes\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    blocks = re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    commands = [re.findall(r"^\$ (.*)$", block, re.MULTILINE) for block in blocks]
    promised = [line for block in blocks for line in block.splitlines() if not line.startswith("$ ")]
    installing, cluster, connections, standalone, triggering, looking = commands
    assert installing[-1].startswith("pip install 'coranto[airflow,embedded,spark]'")
    files = re.findall(r"^[^`]*`(airflow/dags/\w+\.py)`:\n\n```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    for name, content in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    database = tmp_path / "airflow" / "airflow.db"

    def stored(query: str) -> list[Any]:
        if not database.exists():
            return []
        try:
            with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
                return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # The tables are still being created.
            return []

    def terminal(lines: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        text = "\n".join(("set -e", *lines))
        with log.open("wb") as output:
            return subprocess.Popen(
                ["bash", "-c", text],
                cwd=tmp_path,
                env=_environment(tmp_path),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def shown(lines: Sequence[str]) -> str:
        log = tmp_path / "second.log"
        code = terminal([cluster[0], *lines], log).wait(300)
        assert code == 0, log.read_text()
        return log.read_text()

    log = tmp_path / "first.log"
    first = terminal([*cluster, *connections, *standalone], log)
    try:
        until(lambda: first.poll() is not None or stored("SELECT 1 FROM dag WHERE dag_id = 'shop'"))
        assert first.poll() is None, log.read_text()
        shown(triggering)
        (state,) = until(lambda: stored("SELECT state FROM dag_run WHERE state IN ('success', 'failed')"))
        (result,) = stored("SELECT value FROM xcom WHERE task_id = 'consume' AND key = 'return_value'")
        assert state == ("success",), log.read_text()[-8000:]
        summary = json.loads(result[0])
        summary = json.loads(summary) if isinstance(summary, str) else summary
        assert summary["messages"] == 1000
        assert "rows" not in summary
        assert shown(looking).splitlines() == promised
        assert "Airflow is ready" in log.read_text()
    finally:
        _stop(first)


def _environment(home: Path) -> dict[str, str]:
    """Return the environment of a new user's terminal, with free ports."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "CORANTO", "PYTHON"))}
    port = free_port()
    logs = [free_port(taken=[port])]
    logs.append(free_port(taken=[port, *logs]))
    return {
        **kept,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": f"http://localhost:{port}",
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(logs[0]),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(logs[1]),
    }


def _stop(terminal: subprocess.Popen[bytes]) -> None:
    """End all processes of a terminal, as when it is closed."""

    def ended() -> bool:
        terminal.poll()
        try:
            os.killpg(terminal.pid, 0)
        except ProcessLookupError:
            return True
        return False

    for signum, seconds in ((signal.SIGINT, 0.0), (signal.SIGTERM, 60.0), (signal.SIGKILL, 30.0)):
        if ended():
            return
        os.killpg(terminal.pid, signum)
        with suppress(AssertionError):
            until(ended, retry_timeout=seconds)
