"""Containers of the images of deploy/images.sh, without a container engine.

Each has a file system that buildah makes. All share the network of this machine: each has a loopback address of its
own, which replaces `0.0.0.0` and `127.0.0.1` in its commands and variables, and a hosts file has the names of deploy/.
So the ports are as in the files. Commands run in a chroot with a writable file system: `written` returns the files they
wrote. Cgroups, network policies and user namespaces are not tested. Needs root.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import textwrap
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self

from coranto.cluster.processes import ChildProcess

_ADDRESSES: Final = "127.77.0"
_USER: Final = 10001  # The user in the Dockerfile and in the manifests.
TIMEOUT_SECONDS: Final = 900.0
_log = logging.getLogger(__name__)


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    """Return the environment of buildah. It passes proxies on, which cannot resolve the names of deploy/."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _shown(words: Sequence[str]) -> str:
    """Return a command for the log, on one line and shortened."""
    return textwrap.shorten(shlex.join(words), 100, placeholder=" …")


class Containers:
    """Containers by name. A context manager, which ends and removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_name: dict[str, Container] = {}
        self.hosts = folder / "hosts"
        self._lines = ["127.0.0.1 localhost\n"]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:  # Stop all of them, even if one fails.
            for container in self.by_name.values():
                stack.callback(container.remove)

    def name_this_machine(self, name: str) -> None:
        """Let containers reach servers of this machine by a name."""
        self._lines.append(f"127.0.0.1 {name}\n")
        self.hosts.write_text("".join(self._lines))  # Written in place: containers have mounted it.

    def add(self, image: str, name: str, *names: str) -> Container:
        """Return a container of an image, with `name` and `names` as host names. No process runs yet."""
        address = f"{_ADDRESSES}.{len(self.by_name) + 1}"
        self._lines += [f"{address} {each}\n" for each in (name, *names)]
        self.hosts.write_text("".join(self._lines))
        self.by_name[name] = Container(self, image, name, address)
        return self.by_name[name]


class Container:
    """One container. Its output goes to a log, and its volumes are folders of this machine."""

    def __init__(self, containers: Containers, image: str, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._folder = containers.folder
        self._mark = f"CONTAINER={name}-{os.getpid()}"  # In the environment of all its processes.
        self._volumes = [f"{containers.hosts}:/etc/hosts:ro"]
        self._root = _run("buildah", "from", image)
        self._made = time.time()
        self._process: ChildProcess | None = None
        self.working_directory = ""
        """The commands' working folder, if not the image's."""

    def mount(self, source: Path, target: str, *, read_only: bool = False) -> None:
        """Map a folder of this machine into the container. Its user may write to it, unless it is read-only."""
        source.mkdir(parents=True, exist_ok=True)
        if not read_only:
            os.chown(source, _USER, _USER)
        self._volumes.append(f"{source}:{target}{':ro' if read_only else ''}")

    def replace_image(self, image: str) -> None:
        """Replace its file system with an image's. Volumes and address stay."""
        _log.info("%s: replace its image with %s", self.name, image)
        assert self._process is None or not self._process.alive
        _run("buildah", "rm", self._root)
        self._root = _run("buildah", "from", image)
        self._made = time.time()

    def _here(self, text: str) -> str:
        """Replace the addresses that all containers share with the container's own address."""
        return re.sub(r"(?<![\d.])(?:0\.0\.0\.0|127\.0\.0\.1)(?![\d.])", self.address, text)

    def _command(self, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        options = [f"--volume={each}" for each in self._volumes]
        options += [f"--env={name}={self._here(value)}" for name, value in environment.items()]
        # Without --no-hosts, buildah's own file of hosts may cover ours.
        options += ["--isolation=chroot", "--no-hosts", f"--user={_USER}", f"--env={self._mark}"]
        options += [f"--hostname={self.name}"]
        if self.working_directory:
            options.append(f"--workingdir={self.working_directory}")
        return ["/usr/bin/env", "buildah", "run", *options, self._root, "--", *map(self._here, words)]

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        _log.info("%s at %s: %s", self.name, self.address, _shown(words))
        self._process = ChildProcess(
            self.name,
            self._command(words, environment),
            log=self._folder / f"{self.name}.log",
            cwd=self._folder,
            environment=_environment(),
        )

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], *, input: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command that ends. The caller checks its exit code."""
        command = self._command(words, environment)
        done = subprocess.run(command, input=input, env=_environment(), capture_output=True, check=False)
        # Health checks fail until a service is ready.
        level = logging.DEBUG if done.returncode else logging.INFO
        _log.log(level, "%s: %s: exit code %d", self.name, _shown(words), done.returncode)
        return done

    def call(
        self,
        port: int,
        path: str,
        *,
        method: str | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Return the answer of its HTTP server. Raises OSError."""
        given = {"Content-Type": "application/json"} if data else {}
        url = f"http://{self.address}:{port}{path}"
        request = urllib.request.Request(url, data=data, headers=given | dict(headers), method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def connect(self, port: int) -> None:
        """Connect to one of its ports. Raises OSError."""
        socket.create_connection((self.address, port), timeout=10).close()

    def assert_starting(self, deadline: float) -> None:
        """Fail with the end of its log if its service has ended, or the deadline has passed."""
        assert self._process is not None
        assert self._process.alive, self._process.failure()
        assert time.monotonic() < deadline, f"{self.name}: {self._process.log_tail(60)}"

    def written(self) -> list[str]:
        """Return the files that its user wrote outside of volumes since the last change of the image."""
        root = _run("buildah", "mount", self._root)
        found = _run("find", root, "-xdev", "-user", str(_USER), "-newermt", f"@{self._made}").splitlines()
        # buildah creates the commands' working folder.
        return [path for path in found if path != f"{root}{self.working_directory}"]

    def log(self) -> str:
        return (self._folder / f"{self.name}.log").read_text(errors="replace")

    def kill(self) -> None:
        _log.info("%s: kill", self.name)
        assert self._process is not None
        deadline = time.monotonic() + 60
        while self._signal(signal.SIGKILL) or self._process.alive:
            assert time.monotonic() < deadline, f"{self.name} did not end"
            time.sleep(0.1)

    def stop(self, grace_seconds: float) -> None:
        """Ask its first process to end, as container engines do. Fails if it is late or its exit code is not 0."""
        _log.info("%s: stop", self.name)
        assert self._process is not None
        self._signal(signal.SIGTERM, first=True)
        assert self._process.wait(grace_seconds), f"{self.name} did not end within {grace_seconds:g} s:\n{self.log()}"
        assert self._process.exit_code == 0, self._process.failure()

    def _signal(self, number: signal.Signals, *, first: bool = False) -> bool:
        """Signal its processes, or only the first one. Return True if there were any."""
        found: list[tuple[int, int]] = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # It has ended in the meantime.
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    started = (entry / "stat").read_text().rpartition(")")[2].split()[19]
                    found.append((int(started), int(entry.name)))
        for _, pid in sorted(found)[: 1 if first else None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(found)

    def remove(self) -> None:
        """End its processes, and remove its file system."""
        if self._process is not None:
            self.kill()
        _run("buildah", "rm", self._root)
