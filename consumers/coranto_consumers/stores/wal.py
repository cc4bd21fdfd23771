"""A reader of the content that each commit adds to SQLite's write-ahead log.

SQLite documents the format (https://www.sqlite.org/fileformat2.html#the_write_ahead_log). The file has a header of 32
bytes, followed by frames. Each frame is a 24-byte header and a page. The header of a transaction's last frame has the
size of the database after the commit; other frames have 0. A frame is valid if it has the same two salts as the file's
header. The salts change when the file is restarted.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coranto.errors import CorruptData

HEADER: Final = struct.Struct(">8I")
FRAME_HEADER: Final = struct.Struct(">6I")
_MAGICS: Final = (0x377F0682, 0x377F0683)


@dataclass(frozen=True, slots=True)
class WalTail:
    """Bytes of the file from `offset` on. They include the file's header if the offset is 0."""

    offset: int
    content: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.content)


class WalFollower:
    """Reads the content that commits add to a write-ahead log. Only one connection may write to and restart the log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._salts: tuple[int, int] | None = None
        self.position = 0
        """The end offset of the last commit that was read."""

    def restart(self) -> None:
        """Record that the file is empty, and will restart with new salts."""
        self._salts, self.position = None, 0

    def read(self) -> WalTail:
        """Return the complete transactions since the last call. Raises CorruptData for invalid content."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return WalTail(self.position, b"")
        try:
            size = os.fstat(descriptor).st_size
            if size < HEADER.size:
                return WalTail(self.position, b"")
            frame = FRAME_HEADER.size + self._page_size(os.pread(descriptor, HEADER.size, 0))
            begin = self.position
            place = max(begin, HEADER.size)
            end = begin
            while place + frame <= size:
                _, pages, *rest = FRAME_HEADER.unpack(os.pread(descriptor, FRAME_HEADER.size, place))
                if (rest[0], rest[1]) != self._salts:
                    break
                place += frame
                if pages:
                    end = place
            content = _read_all(descriptor, begin, end)
        finally:
            os.close(descriptor)
        self.position = end
        return WalTail(begin, content)

    def _page_size(self, header: bytes) -> int:
        numbers: tuple[int, ...] = HEADER.unpack(header)
        magic, _, page_size, _, salt_1, salt_2, _, _ = numbers
        if magic not in _MAGICS:
            raise CorruptData(f"{self._path} is not a write-ahead log of SQLite; let nothing but the store write there")
        if self._salts is None:
            self._salts = salt_1, salt_2
        elif self._salts != (salt_1, salt_2):
            raise CorruptData(
                f"{self._path} was checkpointed by another program than its store, which cannot find the changes. "
                "Leave `PRAGMA wal_checkpoint` and `journal_mode` to the store, and open no other connection."
            )
        return page_size


def _read_all(descriptor: int, begin: int, end: int) -> bytes:
    pieces = []
    while begin < end:
        piece = os.pread(descriptor, min(end - begin, 1 << 24), begin)
        if not piece:
            raise CorruptData(f"a write-ahead log of SQLite ends at {begin}, in the midst of its frames")
        pieces.append(piece)
        begin += len(piece)
    return b"".join(pieces)
