"""The folders that Spark's processes on one machine share, and the cache of fragments in them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pyspark import SparkContext, SparkFiles

from coranto.client.disk_cache import DiskCache


def executor_folder() -> Path | None:
    """Return the folder of this executor's files, which Spark removes when it ends.

    Processes that plan for Spark have such a folder too, and drivers. On a local master, theirs is that of the
    executor. Returns None outside of Spark's processes.
    """
    if SparkFiles._is_running_on_worker or SparkContext._active_spark_context is not None:
        return Path(SparkFiles.getRootDirectory())
    return None


def machine_folder() -> Path | None:
    """Return a folder that an application's executors on this machine share, or that of this executor.

    Standalone workers and YARN keep the folders of an application's executors in one that is named after it, and
    remove that when the application has ended. Workers of several machines may have it on one network drive. So the
    folder bears the machine's name: locks and mapped files do not reach further. Returns None outside of Spark's
    processes.
    """
    folder = executor_folder()
    if folder is None:
        return None
    for above in folder.resolve().parents:
        if _is_of_application(above.name) and os.access(above, os.W_OK):
            return above / f"coranto-{socket.gethostname()}"
    return folder


def shared_cache(max_bytes: int) -> DiskCache | None:
    """Return the cache of at most `max_bytes` for an application's processes on this machine; None outside of one."""
    folder = machine_folder()
    return DiskCache(folder / "coranto-fragments", max_bytes) if max_bytes and folder else None


def _is_of_application(name: str) -> bool:
    """Return True for an application's id, such as app-20261123103000-0001 or application_1763893800000_0001."""
    kind, *numbers = name.replace("_", "-").split("-")
    return kind in ("app", "application") and len(numbers) == 2 and all(each.isdigit() for each in numbers)
