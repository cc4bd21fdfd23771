"""The location of a running cluster: `cluster.json`, written by the process that runs it and read by all others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coranto.effects import LocalDisk
from coranto.errors import ClusterError

CLUSTER_FILE = "cluster.json"
DATA_VARIABLE = "CORANTO_DATA"
DEFAULT_DATA_DIR = Path(".coranto")


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """A cluster's addresses (`host:port`), directories and process ids.

    `pids` has the names `cluster` (the process that runs it), `etcd`, `broker-0` …
    """

    data_dir: Path
    etcd: str
    etcd_prefix: str
    endpoints: tuple[str, ...]
    file_root: Path
    pids: Mapping[str, int]

    @property
    def endpoint(self) -> str:
        """The address of the first broker. Clients find all brokers through any one of them."""
        if not self.endpoints:
            raise ClusterError(
                f"the cluster in {self.data_dir} runs without brokers; start it with some (`coranto up --brokers 1`)"
            )
        return self.endpoints[0]


def save(info: ClusterInfo, *, running: bool = True) -> None:
    """Write cluster.json atomically. A stopped cluster keeps the file for its ports, which the next start prefers."""
    content = {
        "etcd": info.etcd,
        "etcd_prefix": info.etcd_prefix,
        "endpoints": list(info.endpoints),
        "file_root": str(info.file_root),
        "pids": dict(info.pids),
        # Distinguishes the cluster's process from a later one that happens to get the same id.
        "started": process_start(info.pids["cluster"]) if running else "",
    }
    LocalDisk().write_atomic(info.data_dir / CLUSTER_FILE, json.dumps(content, indent=2).encode() + b"\n")


def load(data_dir: Path) -> tuple[ClusterInfo, bool] | None:
    """Return cluster.json's content and whether its writer is still alive; None if there is no readable file."""
    try:
        content = json.loads((data_dir / CLUSTER_FILE).read_bytes())
        info = ClusterInfo(
            data_dir=data_dir,
            etcd=str(content["etcd"]),
            etcd_prefix=str(content["etcd_prefix"]),
            endpoints=tuple(str(endpoint) for endpoint in content["endpoints"]),
            file_root=Path(content["file_root"]),
            pids={str(name): int(pid) for name, pid in content["pids"].items()},
        )
        started = str(content["started"])
        return info, process_start(info.pids["cluster"]) == started != ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def locate(data_dir: Path | None = None) -> ClusterInfo:
    """Return the cluster that runs in `data_dir`, else in $CORANTO_DATA, else in ./.coranto. Raises ClusterError."""
    chosen = data_dir or Path(os.environ.get(DATA_VARIABLE) or DEFAULT_DATA_DIR)
    found = load(chosen.absolute())
    if found is None or not found[1]:
        raise ClusterError(
            f"no cluster runs in {chosen.absolute()}. Start one with `coranto up --data-dir {chosen}`, or say where "
            f"one is with ${DATA_VARIABLE} (its directory) or $CORANTO_ENDPOINT (a broker's host:port)"
        )
    return found[0]


def process_start(pid: int) -> str:
    """Return the process's start time, in a form for comparison only; empty if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _alive(pid)
    except ProcessLookupError:
        return ""
    # The command's name may hold any character; plain fields follow its closing parenthesis. Zombies count as dead.
    fields = status.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _alive(pid: int) -> str:
    """Return "alive" if the process exists, else "". Without /proc, no start time is known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
