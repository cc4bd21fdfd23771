"""The folder that Spark's processes on one machine share, and the cache of fragments in it."""

from __future__ import annotations

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


def shared_cache(max_bytes: int) -> DiskCache | None:
    """Return the cache that the processes of this executor share, or None outside of one."""
    folder = executor_folder()
    return DiskCache(folder / "coranto-fragments", max_bytes) if max_bytes and folder else None
