"""A local Airflow for the flights' DAGs: SQLite, child processes, and all files below a data directory."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from coranto.cluster.processes import ChildProcess, LocalService, free_port, stop_all, wait_ready
from coranto.effects import LocalDisk
from coranto.errors import ClusterError

DAGS: Final = Path(__file__).with_name("dags")
_COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "api-server": ("api-server", "--workers", "1"),
    # Logs are read from files: log servers would listen on fixed ports on all interfaces.
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
_READY_SECONDS: Final = 180.0
_STOP_SECONDS: Final = 20.0
_KEYS: Final = "keys.json"


class AirflowStandalone(LocalService):
    """Airflow for the cluster below `data_dir`, from `start` to `close`; a context manager.

    Its state is in `data_dir`/airflow, and survives restarts. It listens on localhost only, and every user of this
    machine is an administrator. If `port` is in use, it listens on another port; see `url`.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        dags: Path = DAGS,
        settings: Mapping[str, str] | None = None,
        stop_seconds: float = _STOP_SECONDS,
    ) -> None:
        super().__init__(port)
        self.data_dir = data_dir.absolute()
        self._dags = dags
        self._settings = dict(settings or {})
        self._stop_seconds = stop_seconds

    @property
    def home(self) -> Path:
        return self.data_dir / "airflow"

    def environment(self) -> dict[str, str]:
        """Return the environment of Airflow's processes, and of commands that belong to them."""
        keys = self._keys()
        store = f"sqlite:///{self.data_dir / 'store.db'}"
        coranto = {"conn_type": "coranto", "extra": {"data_dir": str(self.data_dir), "cluster": "demo"}}
        return {
            **os.environ,
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW_CONN_CORANTO_DEFAULT": json.dumps(coranto),
            "AIRFLOW_CONN_FLIGHTS_STORE": json.dumps({"conn_type": "sqlite", "host": str(self.data_dir / "store.db")}),
            "CORANTO_STORE_URL": store,
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__SECRET_KEY": keys["secret"],
            "AIRFLOW__API_AUTH__JWT_SECRET": keys["jwt"],
            "AIRFLOW__CORE__AUTH_MANAGER": (
                "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager"
            ),
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(self._dags),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__FERNET_KEY": keys["fernet"],
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            # SQLite has one writer at a time; on a busy machine, the default timeout of five seconds is too short.
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home / 'airflow.db'}?timeout=60",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
            # The API may answer tasks slowly, because all processes share one machine.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            # With gRPC's fork support, forks of Airflow's processes may fail.
            "GRPC_ENABLE_FORK_SUPPORT": "false",
            "GRPC_VERBOSITY": "ERROR",
            **self._settings,
        }

    def start(self) -> None:
        """Create the database, start all processes, and wait until the API answers. Raises ClusterError."""
        self.home.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            env=self.environment(),
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise ClusterError(f"Airflow's database cannot be created:\n{made.stderr[-2000:]}")
        self._port = free_port(self._port)  # Another process may have taken it in the meantime.
        for name in _COMMANDS:
            self.start_process(name)
        ready = partial(self._answers, "/api/v2/monitor/health")
        wait_ready(self._children["api-server"], ready, timeout_seconds=_READY_SECONDS, cancelled=lambda: False)

    def start_process(self, name: str) -> ChildProcess:
        """Start one process: api-server, scheduler, dag-processor or triggerer."""
        arguments = list(_COMMANDS[name])
        if name == "api-server":
            arguments += ["--host", "127.0.0.1", "--port", str(self._port)]
        self._children[name] = ChildProcess(
            f"airflow {name}",
            [sys.executable, "-m", "airflow", *arguments],
            log=self.data_dir / "logs" / f"airflow-{name}.log",
            cwd=self.home,
            environment=self.environment(),
        )
        return self._children[name]

    def process(self, name: str) -> ChildProcess:
        """Return a process by its name."""
        return self._children[name]

    def close(self) -> None:
        """Stop all processes, and their tasks."""
        children = list(self._children.values())
        stop_all(children, self._stop_seconds)
        for child in children:
            _kill_group(child.pid)
        self._children.clear()

    def _keys(self) -> dict[str, str]:
        """Return Airflow's secret keys. They are created once, readable only by their owner."""
        path = self.home / _KEYS
        if not path.exists():
            from cryptography.fernet import Fernet

            self.home.mkdir(parents=True, exist_ok=True)
            made = {"fernet": Fernet.generate_key().decode()}
            made |= {name: secrets.token_urlsafe(48) for name in ("jwt", "secret")}
            LocalDisk().write_atomic(path, json.dumps(made).encode())
            path.chmod(0o600)
        keys: dict[str, str] = json.loads(path.read_text())
        return keys


def _kill_group(group: int) -> None:
    """Kill the remaining processes of a process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
