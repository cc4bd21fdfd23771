"""Dagster's UI for the demo's definitions: the web server and the daemon (for the sensor), as child processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from coranto.cluster import EmbeddedCluster
from coranto.cluster.processes import ChildProcess, LocalService, stop_all, wait_ready
from coranto.errors import ClusterError
from dagster_coranto.instance.home import dagster_environment, prepare_storage

_WORKSPACE = Path("workspace.yaml")
_MODULE = "dagster_coranto.flights.definitions"
DAEMON = ("-m", "dagster._daemon", "run")
_LOCATIONS = """
{ workspaceOrError { ... on Workspace { locationEntries {
    name locationOrLoadError { ... on PythonError { message causes { message } } } } }
  ... on PythonError { message causes { message } } } }
"""
_READY_SECONDS = 180.0
_STOP_SECONDS = 20.0
_KILL_SECONDS = 10.0
_WATCH_SECONDS = 0.5
_POLL_SECONDS = 0.05


class DagsterUi(LocalService):
    """The UI for the cluster below `data_dir`, from `start` to `close`; a context manager.

    It listens on `port` if that is free, otherwise on another port; see `url`. The output of its processes goes to
    `data_dir`/logs. `daemon` has Python's arguments for the daemon, which runs sensors; None: no daemon. Processes that
    do not end within `stop_seconds` of closing are killed.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        daemon: Sequence[str] | None = DAEMON,
        stop_seconds: float = _STOP_SECONDS,
    ) -> None:
        super().__init__(port)
        self._data_dir = data_dir.absolute()
        self._daemon = daemon
        self._stop_seconds = stop_seconds

    @property
    def pids(self) -> list[int]:
        """The ids of the started processes. Each one leads a process group with its own children."""
        return [child.pid for child in self._children.values()]

    def start(self) -> None:
        """Start the UI, and return when it answers and has loaded the definitions.

        Raises ClusterError when it does not start, or when Dagster cannot load the definitions.
        """
        prepare_storage(self._data_dir)
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        server = self._child("dagster-webserver", "-m", "dagster_webserver", *address)
        if self._daemon is not None:
            self._child("dagster-daemon", *self._daemon)
        ready = partial(self._answers, "/server_info")
        wait_ready(server, ready, timeout_seconds=_READY_SECONDS, cancelled=lambda: False)
        self._check_loaded(server)

    def _check_loaded(self, server: ChildProcess) -> None:
        """Raise ClusterError unless Dagster has loaded all definitions, which it does before it answers requests."""
        request = urllib.request.Request(
            f"{self.url}/graphql", json.dumps({"query": _LOCATIONS}).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_READY_SECONDS) as response:
                workspace = json.load(response)["data"]["workspaceOrError"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ClusterError(
                f"Dagster's UI at {self.url} does not return its code locations ({error}); see {server.log}"
            ) from error
        # A failed workspace has an error instead of entries.
        entries = workspace.get("locationEntries") or [{"name": "the workspace", "locationOrLoadError": workspace}]
        for entry in entries:
            problem = entry["locationOrLoadError"] or {}
            if "message" in problem:
                messages = [each["message"].strip() for each in (problem, *problem["causes"])]
                said = "\n".join(messages)
                raise ClusterError(f"Dagster cannot load {entry['name']}; its log is {server.log}. It says:\n{said}")

    def close(self) -> None:
        """Stop the processes, and the runs that they have started."""
        # Dagster's servers do not stop their code servers and runs, which are in the process groups of `groups`.
        groups = self.pids
        for group in groups:
            _signal(group, signal.SIGTERM)
        deadline = time.monotonic() + self._stop_seconds
        stop_all(self._children.values(), self._stop_seconds)
        _await_end(groups, deadline)
        for group in groups:
            _signal(group, signal.SIGKILL)
        _await_end(groups, time.monotonic() + _KILL_SECONDS)
        self._children.clear()

    def _child(self, name: str, *arguments: str) -> ChildProcess:
        child = ChildProcess(
            name,
            [sys.executable, *arguments, *_workspace()],
            log=self._data_dir / "logs" / f"{name}.log",
            cwd=Path.cwd(),
            environment=dagster_environment(self._data_dir),
        )
        self._children[name] = child
        return child


def _signal(group: int, number: int) -> bool:
    """Signal a process group, and return whether it has any process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _await_end(groups: Sequence[int], deadline: float) -> None:
    """Wait until process groups are empty, or until the deadline."""
    while any(_signal(group, 0) for group in groups) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _workspace() -> list[str]:
    """Return the arguments that select the definitions: workspace.yaml if it exists, otherwise the module."""
    if _WORKSPACE.exists():
        return ["--workspace", str(_WORKSPACE.absolute())]
    return ["--module-name", _MODULE]


def serve(data_dir: Path, *, brokers: int, port: int, console: Console) -> None:
    """Run the cluster below `data_dir` and Dagster's UI for it, until interrupted.

    Raises ClusterError when a part cannot be started or ends by itself.
    """
    try:
        with EmbeddedCluster(data_dir, brokers=brokers, progress=console.print) as cluster:
            console.print(
                f"[bold]Cluster[/] is up at {cluster.info.endpoint}; starting Dagster's UI …", highlight=False
            )
            with DagsterUi(data_dir, port=port) as ui:
                console.print(f"[bold]Dagster[/] is at {ui.url}/asset-groups   (Ctrl-C stops it, and the cluster)")
                never = threading.Event()
                while not never.wait(_WATCH_SECONDS):
                    ui.watch()
    except KeyboardInterrupt:
        console.print("\nStopped.")
