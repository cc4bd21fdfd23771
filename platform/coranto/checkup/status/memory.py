"""The last snapshot of each cluster, in a file of this user: `$XDG_STATE_HOME/coranto/status-<cluster>.json.gz`."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pydantic

from coranto.checkup.status.values import ClusterSnapshot
from coranto.effects import LocalDisk

_SNAPSHOT: Final = pydantic.TypeAdapter(ClusterSnapshot)


def memory_file(cluster: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a cluster's file."""
    home = environment.get("XDG_STATE_HOME")
    folder = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "state"
    return folder / "coranto" / f"status-{cluster}.json.gz"


def load(path: Path) -> ClusterSnapshot | None:
    """Return the last snapshot; None if there is none, or if its file cannot be read."""
    try:
        return _SNAPSHOT.validate_json(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error, pydantic.ValidationError):
        return None


def save(path: Path, snapshot: ClusterSnapshot) -> None:
    """Save a snapshot for the next status. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    LocalDisk().write_atomic(path, gzip.compress(_SNAPSHOT.dump_json(snapshot), 1))
