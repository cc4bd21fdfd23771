"""Committed reads of one journal by many tasks.

The committed messages of a range depend on the other ranges only through their *outlines*, which are small
(`coranto.messages.outlines`). So each range is *scanned*, which yields its outline. Once all ranges are scanned, the
committed rows of each range are *chosen*.

**Tasks scan and resolve.** Spark plans a read in a process that cannot start tasks, and a task must not wait for a task
that may not have started. So each task goes through the journal's ranges, beginning with its own, and scans each range
that no other task has scanned or is scanning. Then it waits for the scans of running tasks. These tasks hold file
locks, which the operating system releases when their processes end. One task resolves the outlines, and every task
reads the decision about its range from the result.

**Tasks on one machine share a folder of the application** (`fetching.machine_folder`), with the fetched fragments
(`coranto.client.disk_cache`). So a machine fetches a fragment and scans a range once. A task keeps its own range in
memory, up to `HELD_BYTES`, instead of reading it again. Without a folder, a task scans all ranges itself.

**Machines share nothing.** M machines fetch and scan a journal of more than one range up to M times, and parse its
values once. `SparkConsumer`, whose driver can start tasks, fetches and scans everything once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from coranto.errors import CorantoError
from coranto.messages.columnar import Int32s
from coranto.messages.outlines import resolve_outlines
from coranto_consumers.journals.framings import ReadFraming
from coranto_consumers.journals.ranges import NumberedRange, Range
from coranto_consumers.journals.reading import JournalContent, Lines
from coranto_consumers.spark.committed.scanning import RangeSummarizer, RangeSummary
from coranto_consumers.spark.committed.sequencing import RangeDecision, read_end

HELD_BYTES: Final = 64 << 20
_KEPT_SECONDS: Final = 3600.0
"""The retention of a read's scans in seconds, from the start of the read's last task."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CommittedReader:
    """Reads the committed content of ranges. Together, the ranges are one contiguous part of a journal."""

    content: JournalContent
    ranges: Sequence[Range]
    framing: ReadFraming
    shared: Path | None = None
    """The folder that the tasks of one read of one journal share. None if they share nothing."""
    commits: bool = False

    def read(self, number: int) -> Iterator[Lines]:
        """Yield the committed content of range `number`, ignoring messages before the first range."""
        held: list[tuple[Lines, Int32s]] = []

        def scan(wanted: int) -> RangeSummary:
            return self._scan(wanted, held if wanted == number else None)

        decision = None
        if self.shared is not None and len(self.ranges) > 1:
            try:
                decision = _SharedScans(self.shared, len(self.ranges), scan, self._resolve).decided(number)
            except CorantoError:
                raise
            except OSError as error:
                _log.warning("spark.scans_not_shared", folder=str(self.shared), error=str(error))
        if decision is None:
            decision = self._resolve([scan(wanted) for wanted in range(len(self.ranges))])[number]
        for lines, segments in held or self._scan_of(number).segments(self.content, self.framing):
            yield decision.committed(lines, segments, commits=self.commits)

    def _scan(self, number: int, held: list[tuple[Lines, Int32s]] | None) -> RangeSummary:
        """Scan a range. Adds its lines to `held`, if given, unless the range is too long to hold."""
        scan = self._scan_of(number)
        if held is not None:
            held.clear()
        for each in scan.segments(self.content, self.framing):
            if held is not None and self.ranges[number].length <= HELD_BYTES:
                held.append(each)
        return scan.summary()

    def _scan_of(self, number: int) -> RangeSummarizer:
        return RangeSummarizer(NumberedRange(number, self.ranges[number], commits=self.commits))

    def _resolve(self, summaries: Sequence[RangeSummary]) -> list[RangeDecision]:
        """Return the decision about each range. Raises CorruptData if a message between two ranges is missing."""
        found = {part: summary for part, summary in zip(self.ranges, summaries, strict=True) if summary.rows}
        if found:
            first = min(found)
            read_end(first.journal, found[first].first, found)
        resolution = resolve_outlines([summary.outline for summary in summaries], {}, replayed=())
        return [RangeDecision(*each) for each in zip(resolution.limits, resolution.acknowledged, strict=True)]


@dataclass(frozen=True, slots=True)
class _SharedScans:
    folder: Path
    count: int
    scan: Callable[[int], RangeSummary]
    resolve: Callable[[Sequence[RangeSummary]], list[RangeDecision]]

    def decided(self, number: int) -> RangeDecision:
        """Return the decision about a range. Waits until all ranges are scanned.

        Raises OSError if the folder cannot be used.
        """
        _open_folder(self.folder)
        done = self.folder / "decided"
        if not done.exists():
            self._scan_missing(number)
            with self._lock("decided", wait=True):
                if not done.exists():
                    found = self.resolve([RangeSummary.loads(self._path(n).read_bytes()) for n in range(self.count)])
                    for each, decision in enumerate(found):
                        _write(self._decision(each), msgspec.json.encode(decision))
                    _write(done, b"")
        return msgspec.json.decode(self._decision(number).read_bytes(), type=RangeDecision)

    def _scan_missing(self, own: int) -> None:
        for wait in (False, True):  # The second pass waits for scans of other tasks, and repeats failed ones.
            for number in (*range(own, self.count), *range(own)):
                path = self._path(number)
                if not path.exists():
                    with self._lock(str(number), wait=wait) as is_held:
                        if is_held and not path.exists():
                            _write(path, self.scan(number).dumps())

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.scan"

    def _decision(self, number: int) -> Path:
        return self.folder / f"{number}.decision"

    @contextlib.contextmanager
    def _lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Hold a file lock, which ends with the process. Without `wait`, yields False if another process holds it."""
        with (self.folder / f"{name}.lock").open("ab") as file:
            is_held = False
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                is_held = True
            yield is_held


def _open_folder(folder: Path) -> None:
    """Create a read's folder, and remove folders of reads that ended long ago."""
    try:
        os.utime(folder)
    except FileNotFoundError:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        oldest = time.time() - _KEPT_SECONDS
        for other in folder.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):  # Another task has removed it.
                if other.stat().st_mtime < oldest:
                    shutil.rmtree(other, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
