"""The folders that Spark's processes on one machine share, and the cache of fragments in them."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Final

from pyspark import SparkContext, SparkFiles

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.disk_cache import DEFAULT_CACHE_BYTES, DiskCache

_LOCAL_FOLDERS: Final = "SPARK_EXECUTOR_DIRS"
"""The variable with an application's local folders, from a standalone worker to its executors."""


def executor_folder() -> Path | None:
    """Return the folder of this executor's files, which Spark removes with it. None outside of Spark's processes.

    Drivers, and processes that plan for Spark, have one too.
    """
    if SparkFiles._is_running_on_worker or SparkContext._active_spark_context is not None:
        return Path(SparkFiles.getRootDirectory())
    return None


def machine_folder() -> Path | None:
    """Return a folder shared by an application's executors on this machine, or else this executor's folder.

    Standalone workers give executors common local folders, which they remove when the application has ended, and keep
    working folders for a week. On YARN, working folders are in the application's. Machines may share a network drive,
    and locks and mapped files work on one machine only, so the name contains the machine's. None outside of Spark's
    processes.
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
    folder = machine_folder()
    return DiskCache(folder / "coranto-fragments", max_bytes) if max_bytes and folder else None


def task_client(config: ClientConfig, cache_bytes: int = DEFAULT_CACHE_BYTES) -> SyncJournalClient:
    """Return a client that shares the fragments it fetches with the other processes of the application."""
    return SyncJournalClient.of(replace(config, disk_cache=shared_cache(cache_bytes)), timeout=config.retry_timeout)


def _is_of_application(name: str) -> bool:
    """Return True for an application's id on YARN, such as application_1763893800000_0001."""
    kind, *numbers = name.split("_")
    return kind == "application" and len(numbers) == 2 and all(each.isdigit() for each in numbers)
