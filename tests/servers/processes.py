"""Processes that experiments kill, pause and restart. Only processes started here are signalled, by their pid."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from coranto.cluster.processes import ChildProcess, describe_exit
from coranto.errors import ClusterError

SECONDS: Final = 180.0
"""The time limit of each wait for an event that is certain, even on a slow machine."""
_POLL_SECONDS: Final = 0.02

CORANTO: Final = (sys.executable, "-P", "-c", "import sys; from coranto.cli import main; sys.exit(main())")
"""The `coranto` command."""


def broker_command(
    *,
    etcd: str,
    prefix: str,
    port: int,
    zone: str,
    id: str,
    data_dir: Path,
    file_root: Path,
    lease_seconds: float,
    host: str = "127.0.0.1",
) -> list[str]:
    """Return the command of a broker process on a fixed port of this machine."""
    return [
        *(sys.executable, "-P", "-m", "coranto_broker", "serve"),
        *("--etcd", etcd, "--etcd-prefix", prefix, "--host", host, "--port", str(port)),
        *("--zone", zone, "--id", id, "--data-dir", str(data_dir), "--file-root", str(file_root)),
        *("--lease-seconds", f"{lease_seconds:g}", "--log-level", "info"),
    ]


async def until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """Wait until the condition holds. Raises ClusterError after `seconds`; `what` describes the condition."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        if loop.time() > end:
            raise ClusterError(f"after {seconds:g} s this does not hold yet: {what}")
        await asyncio.sleep(_POLL_SECONDS)


class ProcessSlot:
    """One process of an experiment, over all its restarts. `command(incarnation)` starts each incarnation.

    `serves(incarnation)` returns True if an incarnation is ready.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: Callable[[], Mapping[str, str]],
        command: Callable[[int], list[str]],
        serves: Callable[[int], Awaitable[bool]],
    ) -> None:
        self.name = name
        self.log = folder / "logs" / f"{name}.log"
        self.incarnation = -1
        self.is_harmed = False
        """True while a fault holds the process, so that only the fault starts it."""
        self.kills = 0
        self.own_ends: list[str] = []
        """Descriptions of the exits of incarnations without a kill."""
        self._folder = folder
        self._environment = environment
        self._command = command
        self._serves = serves
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int:
        """Process id of the last incarnation; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.alive

    def spawn(self) -> None:
        """Start another incarnation. Call it in the main thread: the process dies with the thread."""
        self.incarnation += 1
        # Do not inherit settings of other clusters.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
        self._process = ChildProcess(
            self.name,
            self._command(self.incarnation),
            log=self.log,
            cwd=self._folder,
            environment={**inherited, **self._environment()},
        )

    async def serving(self) -> None:
        """Wait until the process is ready. If an incarnation ends before that, start another one."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SECONDS
        while not await self._serves(self.incarnation):
            if not self.is_running:
                self.note_end()
                self.spawn()
            if loop.time() > end:
                raise ClusterError(f"{self.name} does not serve after {SECONDS:g} s:\n{self.log_tail()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def start(self) -> None:
        """Start another incarnation, and return once it is ready."""
        self.spawn()
        await self.serving()
        self.is_harmed = False

    async def kill(self) -> None:
        """Send SIGKILL, and return when the process has ended."""
        self.is_harmed = True
        process = self._process
        if process is not None and process.alive:
            self.kills += 1
            process.signal(signal.SIGKILL)
            await until(lambda: not process.alive, f"{self.name} has ended")

    def pause(self) -> None:
        self.is_harmed = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def ended(self) -> None:
        """Wait until the process has exited."""
        await until(lambda: not self.is_running, f"{self.name} exits")
        self.note_end()

    async def stop(self) -> int:
        """Send SIGTERM, wait until the process has ended, and return the exit code."""
        self.is_harmed = True
        process = self._process
        if process is None:
            return 0
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGTERM)
        await until(lambda: not process.alive, f"{self.name} exits on SIGTERM:\n{self.log_tail()}")
        assert process.exit_code is not None
        return process.exit_code

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None and self._process.alive:
            self._process.kill()

    def note_end(self) -> None:
        """Record the end of the process in `own_ends`."""
        if self._process is not None:
            self.own_ends.append(describe_exit(self._process.exit_code))

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        return self._process.log_tail(lines) if self._process is not None else ""

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.signal(number)
