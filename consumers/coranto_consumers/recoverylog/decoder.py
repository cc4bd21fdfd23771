"""From the bytes of a log to operations, and on from the next one where bytes are none.

Pure: it is fed content as it comes. Frames are those of `coranto.messages.fixed_frame`; a write's bytes follow its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from coranto.errors import InvalidInput
from coranto.messages.fixed_frame import MAGIC
from coranto_consumers.recoverylog.operations import Operation, Write

MAX_PAYLOAD_BYTES: Final = 4 << 20
"""A frame that claims more is no frame: operations hold names, and the content of properties."""
MAX_DOUBTFUL_BYTES: Final = 16 << 10
"""The same behind garbage, which may hold a magic word every few bytes: what each of them claims is looked at."""

_HEADER: Final = struct.Struct("<4sI")


@dataclass(frozen=True, slots=True)
class Found:
    """An operation. `payload` is what its frame held."""

    op: Operation
    payload: bytes


@dataclass(frozen=True, slots=True)
class Data:
    """Some of the bytes of the write that was found last and accepted, in order."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Garbage:
    """Journal offsets [begin, end) are no operation and were passed over."""

    begin: int
    end: int


Event = Found | Data | Garbage


class LogDecoder:
    """Takes the content of `log` from `offset` on, where an operation begins.

    Whoever reads its events calls `accept` upon those operations that continue its history: their bytes are then given
    as `Data`, those of others are passed over. Behind garbage the length that an operation claims is believed only when
    it was accepted, so that bytes that look like one cannot swallow what follows.
    """

    def __init__(self, log: str, offset: int) -> None:
        self._log = log
        self._content = b""  # What was fed last, behind what was left of the content before.
        self._at = 0  # How much of it was given.
        self._offset = offset  # The same as an offset of the log.
        self._owed = 0  # Bytes of a write still to come,
        self._wanted = False  # and whether they are to be given.
        self._claimed = 0  # By the operation found last.
        self._doubtful = False  # There was garbage, and nothing was accepted since.

    @property
    def fed(self) -> int:
        """The offset that the next content must have."""
        return self._offset + len(self._content) - self._at

    @property
    def position(self) -> int:
        """The offset up to which all was given."""
        return self._offset

    @property
    def is_between(self) -> bool:
        """Whether it stands between two operations."""
        return not self._owed and self._at == len(self._content)

    @property
    def is_inside_wanted(self) -> bool:
        """Whether bytes of an accepted write are still to come."""
        return self._owed > 0 and self._wanted

    def accept(self) -> None:
        """The operation just found is one of the history."""
        self._owed, self._wanted, self._doubtful = self._claimed, True, False

    def restart(self, offset: int) -> None:
        """Drop what is incomplete, and go on where an operation begins. Bytes of an accepted write may not be due."""
        if self.is_inside_wanted:
            raise InvalidInput(f"{self._owed} bytes of a write in {self._log} are still to come at {self._offset}")
        self._content, self._at = b"", 0
        self._owed, self._offset = 0, offset

    def feed(self, content: bytes) -> Iterator[Event]:
        """What `content`, which follows all before, completes. Iterate it to its end, or `restart` after."""
        # Pieces are cut out of the content as it came: it is only copied where a frame reaches over its beginning.
        self._content = self._content[self._at :] + content if self._at < len(self._content) else content
        self._at = 0
        while self._at < len(self._content):
            if self._owed:
                begin = self._at
                self._pass(min(self._owed, len(self._content) - begin))
                self._owed -= self._at - begin
                if self._wanted:
                    yield Data(self._content[begin : self._at])
                continue
            found = self._frame()
            if isinstance(found, Garbage):
                self._doubtful = True
                if found.end > found.begin:
                    yield found
                continue
            if found is None:
                return
            self._claimed = found.op.change.length if isinstance(found.op.change, Write) else 0
            self._owed, self._wanted = 0 if self._doubtful else self._claimed, False
            yield found

    def _frame(self) -> Found | Garbage | None:
        """The frame that comes next, or what is there instead; None when more is needed to tell."""
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
            op = Operation.from_payload(payload, self._log, self._offset, self._offset + size)
        except InvalidInput:
            return self._pass_over()
        self._pass(size)
        return Found(op, payload)

    def _pass_over(self) -> Garbage:
        """Drop bytes up to the next magic word, or to what may be the beginning of one."""
        begin = self._offset
        found = self._content.find(MAGIC, self._at + 1)
        if found < 0:
            found = max(self._at + 1, len(self._content) - (len(MAGIC) - 1))
        self._pass(found - self._at)
        return Garbage(begin, self._offset)

    def _pass(self, count: int) -> None:
        self._at += count
        self._offset += count
