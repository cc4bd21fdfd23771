"""The spill of an `AppendService`: accepted content in files of one folder, until brokers have committed it.

A folder has segments, `00000001.spill` and so on, each a sequence of records with a CRC-32. A record of content has a
sequence number, the journal's name and the content. A DONE record marks all content of a journal up to a number as
done. A segment is deleted when all content up to its end is done. If the spill is full and at least half of the
oldest segment is done, the rest is copied to the end.

Files are not synced for each record: they survive the end of the process, but a power loss may lose the newest records.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from coranto.errors import CorruptData, InvalidInput, SpillFailed
from coranto.process.dirlock import DirectoryLock

DEFAULT_SPILL_BYTES: Final = 1 << 30
_SEGMENT_BYTES: Final = 16 << 20
_SUFFIX: Final = ".spill"
_MAGIC: Final = b"CSp1"
_HEAD: Final = struct.Struct("<4sIBHIQ")
"""Magic, CRC-32 of everything after it, kind, length of the journal's name, length of the content, number."""
_CHECKED: Final = 8
_CONTENT, _DONE = 0, 1

_log = structlog.get_logger(__name__)


class _Record(NamedTuple):
    kind: int
    journal: str
    number: int
    begin: int
    """The offset of the content in its segment."""
    end: int


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    fd: int
    size: int = 0
    live: dict[int, Spilled] = field(default_factory=dict)
    """Pending content, by number."""

    @property
    def live_bytes(self) -> int:
        return sum(each.size for each in self.live.values())


@dataclass(slots=True, eq=False)
class Spilled:
    """Content in a spill."""

    journal: str
    number: int
    size: int
    segment: _Segment
    begin: int
    crc: int
    last_byte: int
    """A newline if the content is empty."""

    @classmethod
    def of(cls, journal: str, number: int, content: bytes | memoryview, segment: _Segment, begin: int) -> Spilled:
        last = content[-1] if len(content) else ord("\n")
        return cls(journal, number, len(content), segment, begin, zlib.crc32(content), last)


class Spill:
    """Pending content in `folder`, for one process at a time. Call its methods from one thread."""

    def __init__(
        self, folder: Path, max_bytes: int = DEFAULT_SPILL_BYTES, *, segment_bytes: int = _SEGMENT_BYTES
    ) -> None:
        """Open a spill, and read all of its files. The files may slightly exceed `max_bytes`.

        Removes a torn record at the end, with a log line. Raises DirectoryInUse, CorruptData for a damaged record
        before other records, and SpillFailed if files cannot be read or written.
        """
        if max_bytes <= 0:
            raise InvalidInput(
                f"a spill of {max_bytes} bytes holds nothing; give a positive number", field="spill_bytes"
            )
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []
        self._next = 1
        self._broken = False
        with self._failures("open"):
            self._lock = DirectoryLock(folder)
        try:
            with self._failures("read"):
                self._load()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files. They keep pending content."""
        for segment in self._segments:
            os.close(segment.fd)
        self._segments = []
        self._lock.close()

    @property
    def pending(self) -> list[Spilled]:
        """The pending content, in the order of acceptance."""
        return sorted((each for segment in self._segments for each in segment.live.values()), key=_number)

    def has_capacity(self, journal: str, size: int) -> bool:
        """Return True if content fits. Raises InvalidInput for content that is larger than the spill."""
        record = _HEAD.size + len(journal.encode()) + size
        if record > self._max_bytes:
            raise InvalidInput(f"{size} bytes do not fit into a spill of {self._max_bytes}; give a larger spill_bytes")
        if self._used + record <= self._max_bytes:
            return True
        self._reclaim()
        while self._used + record > self._max_bytes and self._move_oldest():
            self._reclaim()
        return self._used + record <= self._max_bytes

    def add(self, journal: str, content: bytes) -> Spilled:
        """Write content. Raises SpillFailed, for example when the disk is full; then no part of it is kept."""
        added = self._write_content(journal, content, self._next)
        self._next += 1
        return added

    def read(self, spilled: Spilled) -> bytes:
        """Return content. Raises CorruptData if its file was damaged, and SpillFailed."""
        with self._failures("read"):
            content = os.pread(spilled.segment.fd, spilled.size, spilled.begin)
        if len(content) != spilled.size or zlib.crc32(content) != spilled.crc:
            raise self._corrupt(spilled.segment.path, spilled.begin)
        return content

    def mark_done(self, journal: str, pieces: Iterable[Spilled]) -> None:
        """Mark content of a journal as done, and all content that was accepted earlier for the journal.

        If the DONE record cannot be written, the content is pending again when the spill is next opened.
        """
        through = 0
        for each in pieces:
            each.segment.live.pop(each.number, None)
            through = max(through, each.number)
        if through and self._segments:
            try:
                self._write(_DONE, journal, through, b"")
            except SpillFailed as error:
                _log.warning("spill.not_settled", folder=str(self._folder), journal=journal, error=str(error))
        self._reclaim()

    # -- Files -----------------------------------------------------------------------------------------------------

    @property
    def _used(self) -> int:
        return sum(segment.size for segment in self._segments)

    def _write_content(self, journal: str, content: bytes, number: int) -> Spilled:
        segment, begin = self._write(_CONTENT, journal, number, content)
        added = Spilled.of(journal, number, content, segment, begin)
        segment.live[number] = added
        return added

    def _write(self, kind: int, journal: str, number: int, content: bytes) -> tuple[_Segment, int]:
        """Append a record, and return its segment and the offset of its content."""
        if self._broken:
            raise SpillFailed(f"{self._folder} could not be written before; close it, and open it again")
        name = journal.encode()
        rest = _HEAD.pack(_MAGIC, 0, kind, len(name), len(content), number)[_CHECKED:] + name
        crc = zlib.crc32(content, zlib.crc32(rest))
        record = b"".join((_MAGIC, crc.to_bytes(4, "little"), rest, content))
        with self._failures("written"):
            segment = self._active()
            begin = segment.size
            try:
                written = 0
                while written < len(record):
                    written += os.pwrite(segment.fd, record[written:], begin + written)
            except OSError:
                self._cut_off(segment, begin)
                raise
        segment.size = begin + len(record)
        return segment, segment.size - len(content)

    def _cut_off(self, segment: _Segment, size: int) -> None:
        """Remove a torn record. If that fails, the spill refuses further records."""
        try:
            os.ftruncate(segment.fd, size)
        except OSError:
            self._broken = True

    def _active(self) -> _Segment:
        if self._segments and self._segments[-1].size < self._segment_bytes:
            return self._segments[-1]
        last = int(self._segments[-1].path.stem) if self._segments else 0
        if self._segments:
            os.fsync(self._segments[-1].fd)
        made = self._opened(self._folder / f"{last + 1:08}{_SUFFIX}")
        self._segments.append(made)
        return made

    def _opened(self, path: Path) -> _Segment:
        return _Segment(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def _reclaim(self) -> None:
        """Delete the oldest segments until one has pending content."""
        with contextlib.suppress(OSError):  # A later call tries again.
            while self._segments and not self._segments[0].live:
                oldest = self._segments[0]
                if len(self._segments) == 1:
                    os.ftruncate(oldest.fd, 0)
                    oldest.size = 0
                    return
                oldest.path.unlink()
                os.close(oldest.fd)
                del self._segments[0]

    def _move_oldest(self) -> bool:
        """Copy the pending content of the oldest segment to the end, if that frees at least half of the segment."""
        if len(self._segments) < 2 or 2 * self._segments[0].live_bytes > self._segments[0].size:
            return False
        oldest = self._segments[0]
        for each in sorted(oldest.live.values(), key=_number):
            moved = self._write_content(each.journal, self.read(each), each.number)
            del moved.segment.live[each.number]
            each.segment, each.begin = moved.segment, moved.begin
            each.segment.live[each.number] = each
            del oldest.live[each.number]
        return True

    # -- Reading after a restart -----------------------------------------------------------------------------------

    def _load(self) -> None:
        paths = sorted(self._folder.glob(f"*{_SUFFIX}"))
        done: dict[str, int] = {}
        found: dict[int, Spilled] = {}
        for path in paths:
            segment = self._opened(path)
            self._segments.append(segment)
            data = path.read_bytes()
            for record in self._records(segment, data, is_last=path == paths[-1]):
                self._next = max(self._next, record.number + 1)
                if record.kind == _DONE:
                    done[record.journal] = max(done.get(record.journal, 0), record.number)
                else:
                    content = memoryview(data)[record.begin : record.end]
                    found[record.number] = Spilled.of(record.journal, record.number, content, segment, record.begin)
        for each in found.values():
            if each.number > done.get(each.journal, 0):
                each.segment.live[each.number] = each
        self._reclaim()

    def _records(self, segment: _Segment, data: bytes, *, is_last: bool) -> Iterator[_Record]:
        """Yield the records of a segment, and cut off a torn one at its end."""
        at = 0
        while at < len(data):
            record = _record_at(data, at)
            if record is None:
                later = data.find(_MAGIC, at + 1)
                while later >= 0 and _record_at(data, later) is None:
                    later = data.find(_MAGIC, later + 1)
                if later >= 0 or not is_last:
                    raise self._corrupt(segment.path, at)
                _log.warning("spill.torn_tail", file=str(segment.path), offset=at, lost_bytes=len(data) - at)
                os.ftruncate(segment.fd, at)
                break
            yield record
            at = record.end
        segment.size = at

    def _corrupt(self, path: Path, offset: int) -> CorruptData:
        return CorruptData(
            f"{path} has a damaged record at offset {offset}. Its content is lost, because no broker has it. Move the "
            f"folder {self._folder} away to begin with an empty spill; its other content is then not appended"
        )

    @contextlib.contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpillFailed(
                f"the spill {self._folder} cannot be {action}: {error}. Free space on its disk, or correct its "
                "owner and permissions"
            ) from error


def _record_at(data: bytes, at: int) -> _Record | None:
    """Return the complete, undamaged record at an offset, or None."""
    if at + _HEAD.size > len(data):
        return None
    magic, crc, kind, name_length, length, number = _HEAD.unpack_from(data, at)
    begin = at + _HEAD.size + name_length
    end = begin + length
    if magic != _MAGIC or end > len(data) or zlib.crc32(memoryview(data)[at + _CHECKED : end]) != crc:
        return None
    return _Record(kind, data[at + _HEAD.size : begin].decode(), number, begin, end)


def _number(spilled: Spilled) -> int:
    return spilled.number
