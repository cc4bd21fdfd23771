"""Frames: their layout in a stream of bytes, and their parser.

Each side begins with PREFACE. A frame is its payload's length (4 bytes, big endian), its kind (1 byte) and the payload.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import Final, NamedTuple

from coranto.errors import CorantoError

VERSION: Final = 1
_MAGIC: Final = b"CORANTO"
PREFACE: Final = _MAGIC + bytes([VERSION])
"""The first bytes of each side. The last one is the version of the format."""

_HEADER: Final = struct.Struct("!IB")
_SEPARATE_BYTES: Final = 1 << 16


class FrameError(CorantoError):
    """The peer's bytes are not frames of this version, or exceed a limit."""


class FrameKind(enum.IntEnum):
    """The kinds of frames. The client begins with OPENING, the broker with OPENED or, to reject the call, with END."""

    OPENING = 1
    OPENED = 2
    MESSAGE = 3
    END = 4
    PING = 5
    PONG = 6


class Frame(NamedTuple):
    kind: int
    payload: bytes


def encode_frame(kind: FrameKind, payload: bytes) -> tuple[bytes, ...]:
    """Return a frame as one piece if it is small, otherwise as a header and the payload."""
    header = _HEADER.pack(len(payload), kind)
    return (header + payload,) if len(payload) < _SEPARATE_BYTES else (header, payload)


class FrameDecoder:
    """Parses the bytes of one side in pieces of any size. It holds at most one incomplete frame."""

    def __init__(self, limit: int, most: float = math.inf) -> None:
        """`limit` is the maximum payload in bytes, `most` the maximum number of further frames. Both may be changed."""
        self.limit = limit
        self.most = most
        self._incomplete = bytearray()
        self._needed = len(PREFACE)
        self._introduced = False

    @property
    def held(self) -> int:
        """The number of received bytes of the incomplete frame."""
        return len(self._incomplete)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. Raises FrameError, which makes the connection unusable."""
        if self._introduced and not self._incomplete and len(data) >= _HEADER.size and self.most > 0:
            length, kind = _HEADER.unpack_from(data)
            if len(data) == _HEADER.size + length and length <= self.limit:  # The usual case.
                self.most -= 1
                return [Frame(kind, data[_HEADER.size :])]
        if self._incomplete:
            self._incomplete += data
            if len(self._incomplete) < self._needed:
                self._check_preface()
                return []
            data, self._incomplete = bytes(self._incomplete), bytearray()
        frames: list[Frame] = []
        at, size = 0, len(data)
        if not self._introduced:
            if size < len(PREFACE):
                self._incomplete += data
                self._check_preface()
                return frames
            _check_preface(data[: len(PREFACE)])
            self._introduced, at = True, len(PREFACE)
        self._needed = _HEADER.size
        while size - at >= _HEADER.size and self.most > 0:
            length, kind = _HEADER.unpack_from(data, at)
            if length > self.limit:
                raise FrameError(f"a frame of {length} bytes is longer than the {self.limit} that are accepted")
            begin = at + _HEADER.size
            if begin + length > size:
                self._needed = _HEADER.size + length
                break
            at = begin + length
            frames.append(Frame(kind, data[begin:at]))
            self.most -= 1
        if at < size and self.most <= 0:
            raise FrameError("more data arrived before the call was opened; wait for the broker's first frame")
        if at < size:
            self._incomplete += memoryview(data)[at:]
        return frames

    def _check_preface(self) -> None:
        if not self._introduced:
            _check_preface(bytes(self._incomplete[: len(PREFACE)]))


def _check_preface(given: bytes) -> None:
    """Check the first bytes of a peer, which may be incomplete. Raises FrameError."""
    if not _MAGIC.startswith(given[: len(_MAGIC)]):
        raise FrameError("the bytes are not of Coranto's frame transport; connect to the gRPC endpoint instead")
    if len(given) == len(PREFACE) and given[-1] != VERSION:
        raise FrameError(f"this side speaks version {VERSION} of the frame transport, the other version {given[-1]}")
