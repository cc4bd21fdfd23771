"""A client of Airflow's REST API for tests, and waiting on conditions."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from airflow_coranto.offsets import MARK

T = TypeVar("T")

TIMEOUT = 400.0
REPAIR_SECONDS = 30.0
"""The maximum time of SQLite to repair its file."""
DONE = {"success", "failed", "skipped", "upstream_failed"}


def until(ask: Callable[[], T], *, pause: float = 0.2, retry_timeout: float = TIMEOUT) -> T:
    """Retry until an answer is true, and return it."""
    deadline = time.monotonic() + retry_timeout
    while True:
        if answer := ask():
            return answer
        assert time.monotonic() < deadline, f"still {answer!r} after {retry_timeout} s"
        time.sleep(pause)


class AirflowApi:
    """The API of an Airflow where every client is an administrator."""

    def __init__(self, url: str, server_log: Path) -> None:
        self._url = url
        self._server_log = server_log
        self._token = ""

    def call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Return the answer to a request for a path below /api/v2."""
        if not self._token:
            with urllib.request.urlopen(f"{self._url}/auth/token", timeout=60) as answer:
                self._token = json.load(answer)["access_token"]
        request = urllib.request.Request(
            f"{self._url}/api/v2{path}",
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
            method=method,
        )
        deadline = time.monotonic() + REPAIR_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=300) as answer:
                    content = answer.read()
                return json.loads(content) if content else None
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise
                # A process killed inside a transaction leaves a journal of SQLite. While one process rolls it back,
                # SQLite refuses others immediately. So reads are retried.
                if request.get_method() != "GET" or time.monotonic() > deadline:
                    details = f"{error.read()[:2000]!r}\n{self._server_log.read_text()[-6000:]}"
                    raise AssertionError(f"{path}: {error}\n{details}") from error
                time.sleep(0.2)

    def await_dags(self, *dags: str) -> None:
        """Wait until DAGs are parsed. Fail if one has an error."""

        def parsed() -> bool:
            errors = self.call("/importErrors")["import_errors"]
            assert not errors, errors[0]["stack_trace"]
            return set(dags) <= {dag["dag_id"] for dag in self.call("/dags?limit=100")["dags"]}

        until(parsed)

    def start(self, dag: str, conf: dict[str, Any] | None = None) -> str:
        """Start a run, and return its id."""
        run: str = self.call(f"/dags/{dag}/dagRuns", {"logical_date": None, "conf": conf or {}})["dag_run_id"]
        return run

    def runs(self, dag: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call(f"/dags/{dag}/dagRuns?order_by=run_after&limit=100")["dag_runs"]
        return found

    def task(self, dag: str, run: str, task: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call(f"/dags/{dag}/dagRuns/{quote(run)}/taskInstances/{task}")
        return found

    def await_task(self, dag: str, run: str, task: str, *states: str) -> dict[str, Any]:
        """Wait until a task is in one of the states, by default any final one. Fail in another final state."""

        def reached() -> dict[str, Any] | None:
            found = self.task(dag, run, task)
            if found["state"] in (states or DONE):
                return found
            assert found["state"] not in DONE, f"{task} is {found['state']}:\n{self.log(found)}"
            return None

        return until(reached) or {}

    def xcom(self, dag: str, run: str, task: str, key: str = "return_value") -> Any:
        path = f"/dags/{dag}/dagRuns/{quote(run)}/taskInstances/{task}/xcomEntries/{key}?deserialize=false"
        value = self.call(path)["value"]
        return json.loads(value) if isinstance(value, str) else value

    def log(self, task: dict[str, Any]) -> str:
        path = f"/dags/{task['dag_id']}/dagRuns/{quote(task['dag_run_id'])}/taskInstances/{task['task_id']}"
        try:
            content = self.call(f"{path}/logs/{task['try_number'] or 1}")["content"]
        except urllib.error.HTTPError as error:
            return str(error)
        return "\n".join(json.dumps(line)[:600] for line in content[-30:])

    def asset_events(self) -> list[dict[str, Any]]:
        """Return the payloads of watchers' events, in order. The events of tasks' outlets name no watcher."""
        events = self.call("/assets/events?limit=1000&order_by=timestamp")["asset_events"]
        return [event["extra"]["payload"] for event in events if MARK in event["extra"].get("payload", ())]


def kill_task(task: dict[str, Any]) -> None:
    """Kill the process of a running task."""
    os.kill(task["pid"], signal.SIGKILL)
