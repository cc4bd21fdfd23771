"""Clients of tasks: a fragment cache that processes on one machine share, and concurrent reads of small ranges."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from pyspark import SparkContext, SparkFiles

from coranto.client import Chunk, ClientConfig, SyncJournalClient
from coranto.client.disk_cache import DEFAULT_CACHE_BYTES, DiskCache
from coranto.client.range_prefetch import JournalRange
from coranto.messages.framing import JsonLines
from coranto_consumers.journals.framings import ReadFraming
from coranto_consumers.journals.ranges import Range
from coranto_consumers.journals.reading import OVERRUN_BYTES, JournalContent, contiguous

_LOCAL_FOLDERS: Final = "SPARK_EXECUTOR_DIRS"
"""The environment variable with an application's local folders, which standalone workers set for executors."""


def executor_folder() -> Path | None:
    """Return the folder of this executor, driver or planner, which Spark removes at its end. None outside of Spark."""
    if SparkFiles._is_running_on_worker or SparkContext._active_spark_context is not None:
        return Path(SparkFiles.getRootDirectory())
    return None


def machine_folder() -> Path | None:
    """Return a folder shared by an application's executors on this machine, or else this executor's folder.

    Standalone workers give executors common local folders, which they remove after the application has ended; they keep
    working folders for a week. On YARN, working folders are inside the application's folder. The name contains the
    machine's name, because machines may share a network drive, but file locks and mapped files work on one machine
    only. None outside of Spark's processes.
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


def task_client(config: ClientConfig, cache_bytes: int = DEFAULT_CACHE_BYTES) -> SyncJournalClient:
    """Return a client that shares fetched fragments with the application's other processes on this machine."""
    folder = machine_folder() if cache_bytes else None
    cache = None if folder is None else DiskCache(folder / "coranto-fragments", cache_bytes)
    return SyncJournalClient.of(replace(config, disk_cache=cache), timeout=config.retry_timeout)


def _is_of_application(name: str) -> bool:
    """Return True for an application's id on YARN, such as application_1763893800000_0001."""
    kind, *numbers = name.split("_")
    return kind == "application" and len(numbers) == 2 and all(each.isdigit() for each in numbers)


SMALL_BYTES: Final = 256 << 10


class SmallRanges:
    """The content of ranges that are read in order, as `JournalContent`. `small` are the prefetched ranges."""

    def __init__(self, client: JournalContent, small: Sequence[JournalRange], contents: Iterator[Sequence[Chunk]]):
        self._client = client
        self._due = deque(small)
        self._contents = contents
        self._held = JournalRange("", 0, 0)
        self._content = b""

    def read(self, journal: str, offset: int = 0, *, end_offset: int = 0, **how: Any) -> Iterator[Chunk]:
        """Yield content as the client does. Raises the errors of a prefetched range when it is read."""
        if self._due and self._due[0][:2] == (journal, offset):
            self._held = self._due.popleft()
            self._content = b"".join(contiguous(self._held, next(self._contents)))
        held = self._held
        if held.journal == journal and held.offset <= offset < end_offset <= held.end_offset:
            yield Chunk(offset, self._content[offset - held.offset : end_offset - held.offset], held.end_offset)
            return
        yield from self._client.read(journal, offset, end_offset=end_offset, **how)


@contextmanager
def read_together(client: SyncJournalClient, parts: Sequence[Range], framing: ReadFraming) -> Iterator[JournalContent]:
    """Yield the content of ranges, to be read once each, in this order. Prefetches small ranges concurrently."""
    reads = [_first_read(part, framing) for part in parts if part.length > 0]
    small = [each for each in reads if each.length <= SMALL_BYTES]
    if len(small) < 2:
        yield client
        return
    contents = client.read_each(small, block=True, fail_on_jump=True)
    try:
        yield SmallRanges(client, small, contents)
    finally:
        cast("Generator[Sequence[Chunk]]", contents).close()


def _first_read(part: Range, framing: ReadFraming) -> JournalRange:
    """Return the first read of a range. It includes enough bytes after the range for a last line of usual length."""
    start = part.start if isinstance(framing, JsonLines) else part.begin
    return JournalRange(part.journal, start, min(part.limit, part.end + OVERRUN_BYTES), part.journal_id)
