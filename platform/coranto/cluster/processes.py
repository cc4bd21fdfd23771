"""Child processes that end with their parent and write to a log file. They are asked to end before they are killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from coranto.errors import ClusterError, InvalidInput

_MAX_LOG_BYTES = 16 << 20
_PORTS = range(20000, 30000)  # Below the ephemeral ports of outgoing connections.

PORTS_VARIABLE = "CORANTO_PORTS"
"""The environment variable with the range of ports to choose from, as `first-last`.

Concurrent programs that restart servers at their old ports avoid conflicts by using different ranges.
"""

# Asks the kernel to kill this process when its parent dies, then becomes the program. This is a process of its own
# instead of a `preexec_fn`, because code between fork and exec is not safe in a parent with threads. It checks for a
# parent that is gone already.
_LAUNCHER = """
import os, sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A program started at construction. Its output is appended to `log`.

    On Linux the child is killed when the *thread* that created it ends, and so when its process does. Create it on a
    thread that lives at least as long as the child has to.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
            log.replace(log.with_suffix(".old.log"))
        with log.open("ab") as output:
            self._log_begin = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=dict(environment),
                # Only the parent gets Ctrl-C from the terminal; it stops its children in order.
                start_new_session=True,
            )
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while the process runs, negative if a signal ended it."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def signal(self, number: int) -> None:
        """Send a signal. No effect if the process has ended."""
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the process to end. Return False if it does not within the time."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process, and return when it is gone."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def stop(self, grace_seconds: float) -> bool:
        """Ask the process to end, and kill it after `grace_seconds`. Return True if it was not killed."""
        stop_all([self], grace_seconds)
        return self._process.returncode != -signal.SIGKILL

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the process's output since its start."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_begin, size - 16_384))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def failure(self) -> ClusterError:
        """Return an error with the exit code and the end of the log."""
        return ClusterError(
            f"{self.name} ended with {describe_exit(self.exit_code)}; its log {self.log} ends with:\n{self.log_tail()}"
        )


class LocalService(ABC):
    """Child processes that serve one URL of this machine, from `start` to `close`; a context manager.

    It listens on `port` if that is free, otherwise on another one; see `url`.
    """

    def __init__(self, port: int = 0) -> None:
        self._port = free_port(port)
        self._children: dict[str, ChildProcess] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @abstractmethod
    def start(self) -> None:
        """Start the processes, and return when the URL answers. Raises ClusterError when it does not."""

    @abstractmethod
    def close(self) -> None:
        """Stop the processes, and their child processes."""

    def watch(self) -> None:
        """Raise ClusterError when one of the processes has ended."""
        for child in self._children.values():
            if not child.alive:
                raise child.failure()

    def _answers(self, path: str) -> bool:
        """Return True if a path below the URL can be read."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def stop_all(processes: Collection[ChildProcess], grace_seconds: float) -> None:
    """Ask all processes to end, and kill the remaining ones after `grace_seconds`."""
    for process in processes:
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)  # A process stopped by SIGSTOP would not notice the SIGTERM.
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.kill()


def describe_exit(code: int | None) -> str:
    if code is None:
        return "no exit code yet"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def wait_ready(
    process: ChildProcess, ready: Callable[[], bool], *, timeout_seconds: float, cancelled: Callable[[], bool]
) -> None:
    """Wait until `ready` returns True. Raises ClusterError if the process ends first, and after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        if not process.alive:
            raise process.failure()
        if cancelled():
            raise ClusterError(f"{process.name} was not awaited: the cluster is closing")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{process.name} was not ready after {timeout_seconds:g} s; its log {process.log} ends with:\n"
                f"{process.log_tail()}"
            )
        time.sleep(0.02)


def free_port(preferred: int = 0, *, taken: Collection[int] = ()) -> int:
    """Return a TCP port of the loopback interface without a listener: `preferred` if possible.

    Raises ClusterError if there is none, and InvalidInput if $CORANTO_PORTS is not a range.
    """
    chooser, ports = random.SystemRandom(), _ports()
    for port in (preferred, *(chooser.choice(ports) for _ in range(200))):
        if port and port not in taken and is_free(port):
            return port
    raise ClusterError(
        f"found no free port between {ports.start} and {ports.stop - 1}; set $CORANTO_PORTS to a wider range"
    )


def _ports() -> range:
    given = os.environ.get(PORTS_VARIABLE, "")
    if not given:
        return _PORTS
    first, _, last = given.partition("-")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 1 << 16):
        raise InvalidInput(f"{given!r} is not a range of ports such as 20000-20999", field=f"${PORTS_VARIABLE}")
    return range(int(first), int(last) + 1)


def is_free(port: int) -> bool:
    """Return True if a server could listen on a port of the loopback interface now."""
    with socket.socket() as probe:
        # Servers bind the same way: lingering connections of an earlier server do not matter, a listening one does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
