"""The decoder of a log's bytes into operations. It skips bytes that are not an operation.

Pure: its caller feeds it content. Frames are as in `coranto.messages.fixed_frame`. A write's bytes follow its frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from coranto.errors import InvalidInput
from coranto.messages.fixed_frame import MAGIC
from coranto_consumers.recoverylog.operations import RecordedOperation, Write

MAX_PAYLOAD_BYTES: Final = 4 << 20
"""A frame that claims a longer payload is not a frame: operations only hold names and the content of properties."""
MAX_DOUBTFUL_BYTES: Final = 16 << 10
"""The same limit after garbage. Garbage may hold a magic word every few bytes, and each claimed payload is examined."""

_HEADER: Final = struct.Struct("<4sI")


@dataclass(frozen=True, slots=True)
class DecodedOperation:
    """An operation. `payload` is the content of its frame."""

    op: RecordedOperation
    payload: bytes


@dataclass(frozen=True, slots=True)
class WrittenData:
    """Some of the bytes of the last accepted write, in order."""

    content: bytes


@dataclass(frozen=True, slots=True)
class SkippedContent:
    """Journal offsets [begin, end) that hold no operation and were skipped."""

    begin: int
    end: int


Event = DecodedOperation | WrittenData | SkippedContent


class LogDecoder:
    """Decodes the content of `log` from `offset` on, where an operation begins.

    The reader of its events calls `accept` for each operation that continues the reader's history. The bytes of an
    accepted write follow as `WrittenData`; the bytes of other writes are skipped. After garbage, the length of a write
    counts only once the operation is accepted. Bytes that merely look like an operation then cannot hide the ones that
    follow.
    """

    def __init__(self, log: str, offset: int) -> None:
        self._log = log
        self._content = b""  # The rest of earlier content, followed by the content fed last.
        self._at = 0  # The number of bytes of `_content` that are already decoded.
        self._offset = offset  # The same position as an offset of the log.
        self._missing = 0  # Bytes of a write that are still to come.
        self._wanted = False  # True if these bytes are to be returned.
        self._claimed = 0  # The length of the write that the last operation claims.
        self._doubtful = False  # There was garbage, and no operation was accepted since.

    @property
    def fed(self) -> int:
        """The required begin offset of the next content."""
        return self._offset + len(self._content) - self._at

    @property
    def position(self) -> int:
        """The end offset of the decoded content."""
        return self._offset

    @property
    def is_between(self) -> bool:
        """True if the decoder is between two operations."""
        return not self._missing and self._at == len(self._content)

    @property
    def is_inside_wanted(self) -> bool:
        """True if bytes of an accepted write are still to come."""
        return self._missing > 0 and self._wanted

    def accept(self) -> None:
        """Accept the operation found last as part of the history."""
        self._missing, self._wanted, self._doubtful = self._claimed, True, False

    def restart(self, offset: int) -> None:
        """Drop incomplete content, and continue at `offset`, where an operation begins.

        Raises InvalidInput when bytes of an accepted write are still to come.
        """
        if self.is_inside_wanted:
            raise InvalidInput(f"{self._missing} bytes of a write in {self._log} are still to come at {self._offset}")
        self._content, self._at = b"", 0
        self._missing, self._offset = 0, offset

    def feed(self, content: bytes) -> Iterator[Event]:
        """Yield the events that `content` completes. It follows all earlier content.

        Iterate to the end, or call `restart` afterwards.
        """
        # Pieces are slices of the fed content, which is copied only if a frame began in earlier content.
        self._content = self._content[self._at :] + content if self._at < len(self._content) else content
        self._at = 0
        while self._at < len(self._content):
            if self._missing:
                begin = self._at
                self._pass(min(self._missing, len(self._content) - begin))
                self._missing -= self._at - begin
                if self._wanted:
                    yield WrittenData(self._content[begin : self._at])
                continue
            found = self._frame()
            if isinstance(found, SkippedContent):
                self._doubtful = True
                if found.end > found.begin:
                    yield found
                continue
            if found is None:
                return
            self._claimed = found.op.change.length if isinstance(found.op.change, Write) else 0
            self._missing, self._wanted = 0 if self._doubtful else self._claimed, False
            yield found

    def _frame(self) -> DecodedOperation | SkippedContent | None:
        """Return the next frame, or the garbage in its place. None when it takes more content to decide."""
        content, at = self._content, self._at
        if not MAGIC.startswith(content[at : at + len(MAGIC)]):
            return self._pass_over()
        if len(content) - at < _HEADER.size:
            return None
        _, length = _HEADER.unpack_from(content, at)
        if length > (MAX_DOUBTFUL_BYTES if self._doubtful else MAX_PAYLOAD_BYTES):
            return self._pass_over()
        size = _HEADER.size + length
        if len(content) - at < size:
            return None
        payload = content[at + _HEADER.size : at + size]
        try:
            op = RecordedOperation.from_payload(payload, self._log, self._offset, self._offset + size)
        except InvalidInput:
            return self._pass_over()
        self._pass(size)
        return DecodedOperation(op, payload)

    def _pass_over(self) -> SkippedContent:
        """Drop bytes up to the next magic word, or up to bytes that may be the beginning of one."""
        begin = self._offset
        found = self._content.find(MAGIC, self._at + 1)
        if found < 0:
            found = max(self._at + 1, len(self._content) - (len(MAGIC) - 1))
        self._pass(found - self._at)
        return SkippedContent(begin, self._offset)

    def _pass(self, count: int) -> None:
        self._at += count
        self._offset += count
