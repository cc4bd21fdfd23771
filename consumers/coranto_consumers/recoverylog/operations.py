"""Recorded operations, the content of a recovery log, as values and as bytes.

A history is a chain of operations. Each operation holds its place in the chain (`seq_no`, from 1) and a `checksum` over
all operations before it, so that an operation of another history is never mistaken for its next operation. A file is
identified by its *fnode*, the `seq_no` of the operation that created it. Links and renames do not change the fnode.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, NewType

from google.protobuf.message import DecodeError

from coranto.effects import Entropy
from coranto.errors import InvalidInput
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto.wire import recoverylog_pb2 as wire

Author = NewType("Author", int)
"""Identifies one writer of a log: random, in [1, 2^32)."""

Fnode = NewType("Fnode", int)
"""Identifies one file of a history: the `seq_no` of its creation."""

AUTHOR_REGISTER: Final = "author"
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuv"


def new_author(entropy: Entropy = os.urandom) -> Author:
    """Return a random author; never 0."""
    while (drawn := int.from_bytes(entropy(4))) == 0:
        pass
    return Author(drawn)


def fence_of(author: Author) -> pb.LabelSet:
    """Return the registers of a log that only `author` may append to: the author's number in base 32."""
    digits = ""
    rest: int = author
    while rest or not digits:
        digits = _DIGITS[rest % 32] + digits
        rest //= 32
    return label_set([(AUTHOR_REGISTER, digits)])


def author_of(registers: pb.LabelSet) -> Author | None:
    """Return the author in registers. None if there is none, or if it is not valid."""
    for label in registers.labels:
        if label.name == AUTHOR_REGISTER:
            try:
                return Author(int(label.value, 32))
            except ValueError:
                return None
    return None


@dataclass(frozen=True, slots=True)
class Create:
    """A file is created, linked at `path`."""

    path: str


@dataclass(frozen=True, slots=True)
class Link:
    """The file gets one more path."""

    fnode: Fnode
    path: str


@dataclass(frozen=True, slots=True)
class Unlink:
    """The file loses a path. A file that loses its last path is gone."""

    fnode: Fnode
    path: str


@dataclass(frozen=True, slots=True)
class Write:
    """`length` bytes are written at byte `offset` of the file. These bytes follow the operation in the log."""

    fnode: Fnode
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SetProperty:
    """A small file gets this content. It is kept apart from tracked files, and in hints. See `PROPERTY_PATHS`."""

    path: str
    content: str


PROPERTY_PATHS: Final = frozenset({"/IDENTITY"})
"""Paths of properties. Files may only be renamed to them. This one is RocksDB's."""

Change = Create | Link | Unlink | Write | SetProperty


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """One operation of a history. Without a `change` it is a no-op.

    `begin` and `end` are the journal offsets [begin, end) of `log` that hold it, a write's bytes included. A recorder
    only knows that the operation will lie at or after `begin`; `end` is 0 then.
    """

    seq_no: int
    checksum: int
    author: Author
    change: Change | None = None
    log: str = ""
    begin: int = 0
    end: int = 0

    def to_payload(self) -> bytes:
        """Return the payload of the operation's frame. Checksums are computed over the same bytes."""
        op = wire.RecordedOp(seq_no=self.seq_no, checksum=self.checksum, author=self.author)
        match self.change:
            case Create(path):
                op.create.path = path
            case Link(fnode, path):
                op.link.fnode, op.link.path = fnode, path
            case Unlink(fnode, path):
                op.unlink.fnode, op.unlink.path = fnode, path
            case Write(fnode, offset, length):
                op.write.SetInParent()
                op.write.fnode, op.write.offset, op.write.length = fnode, offset, length
            case SetProperty(path, content):
                op.property.path, op.property.content = path, content
            case None:
                pass
        return op.SerializeToString(deterministic=True)

    @classmethod
    def from_payload(cls, payload: bytes, log: str, begin: int, end: int) -> RecordedOperation:
        """Return the operation of a frame that ends at `end`. The length of a write is added to its `end`.

        Raises InvalidInput for a payload that is not an operation.
        """
        try:
            op = wire.RecordedOp.FromString(payload)
        except DecodeError as error:
            raise InvalidInput(f"{len(payload)} bytes are not a recorded operation: {error}") from error
        change = _change_of(op)
        if isinstance(change, Write):
            end += change.length
        return cls(op.seq_no, op.checksum, Author(op.author), change, log, begin, end)


def _change_of(op: wire.RecordedOp) -> Change | None:
    if op.HasField("create"):
        return Create(op.create.path)
    if op.HasField("link"):
        return Link(Fnode(op.link.fnode), op.link.path)
    if op.HasField("unlink"):
        return Unlink(Fnode(op.unlink.fnode), op.unlink.path)
    if op.HasField("write"):
        if op.write.offset < 0 or op.write.length < 0:
            raise InvalidInput(f"a recorded write of {op.write.length} bytes at offset {op.write.offset}")
        return Write(Fnode(op.write.fnode), op.write.offset, op.write.length)
    if op.HasField("property"):
        return SetProperty(op.property.path, op.property.content)
    return None


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE: Final = _crc_table()


def crc32c(checksum: int, payload: bytes) -> int:
    """Continue `checksum` (0 at first) over `payload`, and return it: CRC-32 with Castagnoli's polynomial."""
    table = _CRC_TABLE
    crc = checksum ^ 0xFFFFFFFF
    for byte in payload:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF
