"""The commit log of one spool fragment, with one small record per commit.

::

    record   = magic  length  crc32  payload          magic is `csp3`; length and CRC-32 (of the payload) are uint32
    payload  = create_revision  first_append_time  synced  written  flushed  ReplicateRequest{proposal, registers,
                     int64          float64         int64    int64    int64      readable}, protobuf
    mark     = magic  length  crc32  flushed          magic is `csm1`

`synced` and `written` are the spool's `in_sync.Stamp`. `flushed` bounds the acknowledged content when the record
was written. Where acknowledgements wait for the disk, it is the journal's end that was known to be on the disk.
Otherwise it is UNAWAITED. A mark records a later value of `flushed`, once the disk has that much. `readable` is the
end of the content that was visible to readers when the record was written.

Older records lack fields. Records of magic `csp2` lack `flushed` and count as UNAWAITED. `csp1` records also lack the
stamp and count as written before any pipeline. Where `readable` is missing, all content up to the record's end was
visible.

All numbers are little-endian. Each record is independent of the others, and its fragment's SHA-1 covers all content up
to its end. So the last record whose content is present is the valid one. The log ends before a record that was torn by
a crash. The create revision belongs to the journal's item in etcd. It distinguishes a journal from an earlier one of
the same name.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool.in_sync import UNSTAMPED, Stamp
from coranto_broker.spool.spool import CommittedState

MAGIC = b"csp3"
UNAWAITED = -1
"""The value of `flushed` if commits are acknowledged without waiting for the disk."""

_MARK = b"csm1"
_HEAD = struct.Struct("<4sII")
_PRESENT = struct.Struct("<qdqqq")
_FLUSHED = struct.Struct("<q")
_FIXED = {MAGIC: _PRESENT, b"csp2": struct.Struct("<qdqq"), b"csp1": struct.Struct("<qd")}


def encode(
    create_revision: int,
    committed: CommittedState,
    stamp: Stamp = UNSTAMPED,
    flushed: int = UNAWAITED,
    readable: int | None = None,
) -> bytes:
    """Return one encoded record."""
    # A new message each time, because a reused one keeps the memory of earlier values.
    message = pb.ReplicateRequest()
    message.registers.CopyFrom(committed.registers)
    committed.fragment.fill(message.proposal)
    if readable is not None:
        message.readable = readable
    fixed = _PRESENT.pack(create_revision, committed.first_append_time, stamp.synced, stamp.written, flushed)
    return _framed(MAGIC, fixed + message.SerializeToString())


def encode_mark(flushed: int) -> bytes:
    """Return an encoded mark, which records that the journal is on the disk up to `flushed`."""
    return _framed(_MARK, _FLUSHED.pack(flushed))


def _framed(magic: bytes, payload: bytes) -> bytes:
    return _HEAD.pack(magic, len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A complete record at bytes [position, end) of its log."""

    committed: CommittedState
    create_revision: int
    stamp: Stamp
    flushed: int
    readable: int
    position: int
    end: int

    @property
    def awaits_flush(self) -> bool:
        """True if commits were acknowledged only once they were on the disk."""
        return self.flushed != UNAWAITED

    @property
    def promised(self) -> int:
        """The journal end of possibly acknowledged content when this was written."""
        return self.flushed if self.awaits_flush else self.committed.fragment.end


@dataclass(frozen=True, slots=True)
class FlushMark:
    """A complete mark, which ends at byte `end` of its log."""

    flushed: int
    end: int

    @property
    def promised(self) -> int:
        """The journal end of possibly acknowledged content when this was written."""
        return self.flushed


def scan(data: bytes) -> Iterator[CommitRecord | FlushMark]:
    """Iterate over a log's entries, up to the first incomplete one."""
    position = 0
    while (found := entry_at(data, position)) is not None:
        yield found
        position = found.end


@dataclass(frozen=True, slots=True)
class LogContent:
    """The content of a log: its last complete record, and the length in bytes of its complete entries."""

    last: CommittedState | None
    create_revision: int
    valid_length: int
    stamp: Stamp = UNSTAMPED
    readable: int = 0
    """The end of the content that was visible to readers."""


def decode(data: bytes) -> LogContent:
    """Decode a log, up to its first incomplete entry."""
    last: CommitRecord | None = None
    end = 0
    for found in scan(data):
        end = found.end
        if isinstance(found, CommitRecord):
            last = found
    if last is None:
        return LogContent(None, 0, end)
    return LogContent(last.committed, last.create_revision, end, last.stamp, last.readable)


def entry_at(data: bytes, position: int) -> CommitRecord | FlushMark | None:
    """Return the record or mark that begins at `position`; None if there is no complete one."""
    begin = position + _HEAD.size
    if begin > len(data):
        return None
    magic, length, checksum = _HEAD.unpack_from(data, position)
    payload = data[begin : begin + length]
    if len(payload) != length or zlib.crc32(payload) != checksum:
        return None
    if magic == _MARK:
        return FlushMark(_FLUSHED.unpack(payload)[0], begin + length) if length == _FLUSHED.size else None
    fixed = _FIXED.get(magic)
    if fixed is None or length < fixed.size:
        return None
    create_revision, first_append_time, *rest = fixed.unpack_from(payload)
    try:
        message = pb.ReplicateRequest.FromString(payload[fixed.size :])
        fragment = Fragment.from_wire(message.proposal)
    except (InvalidInput, DecodeError):
        return None
    flushed = rest[2] if len(rest) == 3 else UNAWAITED
    committed = CommittedState(fragment, message.registers, first_append_time)
    readable = message.readable if message.HasField("readable") else fragment.end
    return CommitRecord(committed, create_revision, Stamp(*rest[:2]), flushed, readable, position, begin + length)
