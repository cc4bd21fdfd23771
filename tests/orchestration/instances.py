"""Dagster instances for tests, without the costs of databases on disk and of captured output."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import dagster as dg

_MEMORY: Final = Path("/dev/shm")
_MIN_FREE_BYTES: Final = 1 << 30
_NO_OUTPUT: Final = {
    "compute_logs": {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
}
"""Without this, each step starts four processes that copy its output to the terminal."""


@contextmanager
def new_instance(overrides: Mapping[str, Any] | None = None) -> Iterator[dg.DagsterInstance]:
    """Yield an instance without runs, named by $DAGSTER_HOME. It has SQLite databases like Dagster's default one.

    The databases are copies of empty ones, and in memory if it has free space, so that their many small commits do not
    wait for a disk.
    """
    with tempfile.TemporaryDirectory(dir=_parent(), ignore_cleanup_errors=True) as home:
        shutil.copytree(_empty_home(), home, dirs_exist_ok=True)
        with dg.instance_for_test({**_NO_OUTPUT, **(overrides or {})}, temp_dir=home) as instance:
            yield instance


@cache
def _empty_home() -> Path:
    """Return the home of an unused instance. It is removed when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="dagster-empty-")
    _kept.append(folder)
    with dg.instance_for_test(temp_dir=folder.name, set_dagster_home=False):
        return Path(folder.name)


_kept: Final[list[tempfile.TemporaryDirectory[str]]] = []


def _parent() -> Path | None:
    """Return a folder in memory, if one has enough free space."""
    if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _MIN_FREE_BYTES:
        return _MEMORY
    return None
