"""Heartbeat of a consuming run: a timestamp in its tags that the run renews.

In Dagster, a run whose process was killed stays "started" forever. The tag distinguishes it from a working run.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from types import TracebackType
from typing import Final

import dagster as dg
import structlog

from coranto.cluster.info import process_start

ALIVE_TAG: Final = "coranto/alive"
"""The tag of a consuming run with the time of its last heartbeat, in seconds since 1970."""
PROCESS_TAG: Final = "coranto/process"
"""The tag of a consuming run with the host, the id and the start of its process."""
BEAT_SECONDS: Final = 30.0
PRESUMED_DEAD_SECONDS: Final = 300.0
"""A run without a heartbeat for this long is presumed dead."""

_log = structlog.get_logger(__name__)


class Heartbeat:
    """Renews a run's heartbeat in a background thread, while the context is open."""

    def __init__(self, instance: dg.DagsterInstance, run_id: str, *, every_seconds: float = BEAT_SECONDS) -> None:
        self._instance = instance
        self._run_id = run_id
        self._process = _process(os.getpid())
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coranto-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_seconds):
            self._beat()

    def _beat(self) -> None:
        from sqlalchemy.exc import SQLAlchemyError  # Imported here, so that loading definitions stays cheap.

        try:
            self._instance.add_run_tags(self._run_id, {ALIVE_TAG: str(int(time.time())), PROCESS_TAG: self._process})
        except (dg.DagsterError, SQLAlchemyError, OSError) as error:
            # Consuming continues without Dagster's database: the fence, not this tag, excludes concurrent consumers.
            _log.warning("dagster.heartbeat_not_stored", run=self._run_id, error=str(error))


def last_heartbeat(run: dg.DagsterRun) -> float | None:
    """Return the time of a run's last heartbeat, in seconds since 1970. None before the first one."""
    text = run.tags.get(ALIVE_TAG, "")
    return float(text) if text.isdecimal() else None


def process_is_gone(run: dg.DagsterRun) -> bool:
    """Return True if a run's process was on this machine and is gone. Returns False for other machines."""
    known = run.tags.get(PROCESS_TAG, "")
    host, _, rest = known.partition(" ")
    pid = rest.partition(" ")[0]
    return host == _host() and pid.isdecimal() and known != _process(int(pid))


def _process(pid: int) -> str:
    return f"{_host()} {pid} {process_start(pid)}"


def _host() -> str:
    """Return the machine and its namespace of process ids, which distinguishes containers with one host name."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{platform.node()}/{space}"
