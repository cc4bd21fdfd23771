"""Helper for tests: a broker in its own process, which can be queried, signalled, killed and restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.lease import LeaseRecord
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, eventually

_SECONDS = 120.0
"""Timeout of a start, an end or an answer, on a slow machine that sometimes stalls."""


class BrokerChild:
    """A broker process with these settings. `close` ends it."""

    def __init__(self, settings: BrokerSettings, log: Path) -> None:
        self.settings = settings
        self._log = log
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. `ready` waits until it serves."""
        arguments = ["--log-json"]
        for name in self.settings.model_fields_set - {"log_json"}:
            value = getattr(self.settings, name)
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                arguments += [f"--{flag}", str(getattr(value, "value", value))]
        self._lives += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "coranto_broker", "serve", *arguments], stdout=log, stderr=log
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the log entries of `event`, from all its starts."""
        lines = self._log.read_text().splitlines(keepends=True) if self._log.exists() else []
        # The last one may be incomplete.
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [entry for entry in found if entry["event"] == event]

    def log(self) -> str:
        return self._log.read_text()

    async def ready(self) -> dict[str, Any]:
        """Wait until it serves, and return its "member.ready" log entry with its endpoints."""

        def serves() -> bool:
            assert self.process.poll() is None, self.log()
            return len(self.events("member.ready")) >= self._lives

        await eventually(serves, _SECONDS)
        return self.events("member.ready")[-1]

    async def client(self) -> RawClient:
        """Wait until it serves, and return a client."""
        return RawClient(str((await self.ready())["endpoint"]))

    def metrics(self) -> dict[str, float]:
        """Return its metrics by name with labels. The broker must serve metrics."""
        with urllib.request.urlopen(
            self.events("member.ready")[-1]["metrics"] + "/metrics", timeout=_SECONDS
        ) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_SECONDS)

    async def expire(self) -> None:
        """Kill it and revoke its lease, as etcd does once a dead broker's lease has run out.

        So tests can use a lease so long that a broker keeps it even if it is slow because the CPU is busy.
        """
        self.end()
        remembered = LeaseRecord.within(self.settings.data_dir).load()
        assert remembered is not None, self.log()
        async with EtcdCoordinator(self.settings.etcd) as coordinator:
            await coordinator.lease_revoke(remembered[1])

    def close(self) -> None:
        """Kill it if it is alive."""
        if self._process is not None and self._process.poll() is None:
            self.end()


def descriptors(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
