"""The folders that Spark's processes on one machine share, and the cache of fragments in them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from pyspark import SparkContext, SparkFiles

from coranto.client.disk_cache import DiskCache

_LOCAL_FOLDERS: Final = "SPARK_EXECUTOR_DIRS"
"""The variable by which a standalone worker tells its executors an application's local folders."""


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

    Standalone workers give an application's executors common local folders, and remove them when it has ended. What is
    in an executor's working folder, they keep for a week. YARN has the working folders in one that is named after the
    application, and removes that when it has ended. Several machines may have one network drive. So the folder bears
    the machine's name: locks and mapped files do not reach further. Returns None outside of Spark's processes.
    """
    folder = executor_folder()
    if folder is None:
        return None
    local = os.environ.get(_LOCAL_FOLDERS, "").split(os.pathsep)[0]
    candidates = [Path(local)] if local else []
    candidates += [above for above in folder.resolve().parents if _is_of_application(above.name)]
    for each in candidates:
        if os.access(each, os.W_OK):
            return each / f"coranto-{socket.gethostname()}"
    return folder


def shared_cache(max_bytes: int) -> DiskCache | None:
    """Return the cache of at most `max_bytes` for an application's processes on this machine; None outside of one."""
    folder = machine_folder()
    return DiskCache(folder / "coranto-fragments", max_bytes) if max_bytes and folder else None


def _is_of_application(name: str) -> bool:
    """Return True for an application's id on YARN, such as application_1763893800000_0001."""
    kind, *numbers = name.split("_")
    return kind == "application" and len(numbers) == 2 and all(each.isdigit() for each in numbers)
