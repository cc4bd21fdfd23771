"""The commit log of one spool fragment: what has committed, one small record per commit.

::

    record   = magic  length  crc32  payload          magic is `csp3`; length and CRC-32 (of the payload) are uint32
    payload  = create_revision  first_append_time  synced  written  flushed  ReplicateRequest{proposal, registers,
                     int64          float64         int64    int64    int64      readable}, protobuf
    mark     = magic  length  crc32  flushed          magic is `csm1`

`synced` and `written` are the spool's `in_sync.Stamp`. `flushed` tells what had been promised when the record was
written: the journal's end that was known to be on the disk, where acknowledgements wait for that, or UNAWAITED. A mark
says so of all that came before, once it is there. Records of magic `csp2` lack `flushed` and count as unawaited. Those
of `csp1` lack the stamp, too, and count as of before any pipeline. `readable` is up to where readers had been shown the
journal by then. Records of earlier versions lack it: what they tell of had been shown.

All numbers are little-endian. Every record stands for itself, and its fragment's SHA-1 is that of all content up to
its end. So the last one counts whose content is there. A record that a crash has torn ends the log before it. The
create revision is that of the journal's item in etcd; it tells a journal from an earlier one of the same name.
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
from coranto_broker.spool.spool import Committed

MAGIC = b"csp3"
UNAWAITED = -1
"""In place of `flushed`: the commit was acknowledged without waiting for the disk."""

_MARK = b"csm1"
_HEAD = struct.Struct("<4sII")
_PRESENT = struct.Struct("<qdqqq")
_FLUSHED = struct.Struct("<q")
_FIXED = {MAGIC: _PRESENT, b"csp2": struct.Struct("<qdqq"), b"csp1": struct.Struct("<qd")}


def encode(
    create_revision: int,
    committed: Committed,
    stamp: Stamp = UNSTAMPED,
    flushed: int = UNAWAITED,
    readable: int | None = None,
) -> bytes:
    """One record."""
    # A message of its own: one that is set again and again keeps the memory of all that it was ever set to.
    message = pb.ReplicateRequest()
    message.registers.CopyFrom(committed.registers)
    committed.fragment.fill(message.proposal)
    if readable is not None:
        message.readable = readable
    fixed = _PRESENT.pack(create_revision, committed.first_append_time, stamp.synced, stamp.written, flushed)
    return _framed(MAGIC, fixed + message.SerializeToString())


def encode_mark(flushed: int) -> bytes:
    """A mark: the journal is on the disk up to `flushed`."""
    return _framed(_MARK, _FLUSHED.pack(flushed))


def _framed(magic: bytes, payload: bytes) -> bytes:
    return _HEAD.pack(magic, len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class Record:
    """One whole record, which lies at [position, end) of its log."""

    committed: Committed
    create_revision: int
    stamp: Stamp
    flushed: int
    readable: int
    position: int
    end: int

    @property
    def awaits_flush(self) -> bool:
        """Whether whoever wrote it acknowledged a commit only once it was on the disk."""
        return self.flushed != UNAWAITED

    @property
    def promised(self) -> int:
        """The journal's end that may have been acknowledged by the time at which this was written."""
        return self.flushed if self.awaits_flush else self.committed.fragment.end


@dataclass(frozen=True, slots=True)
class Mark:
    """One whole mark, which ends at `end` of its log."""

    flushed: int
    end: int

    @property
    def promised(self) -> int:
        """As that of a record."""
        return self.flushed


def scan(data: bytes) -> Iterator[Record | Mark]:
    """Read a log up to its end or to the first record that is not whole."""
    position = 0
    while (found := entry_at(data, position)) is not None:
        yield found
        position = found.end


@dataclass(frozen=True, slots=True)
class LogContent:
    """What a log says: its last whole record, and the length in bytes up to where it is whole."""

    last: Committed | None
    create_revision: int
    valid_length: int
    stamp: Stamp = UNSTAMPED
    readable: int = 0
    """Up to where readers had been shown the journal."""


def decode(data: bytes) -> LogContent:
    """Read a log up to its end or to the first record that is not whole."""
    last: Record | None = None
    end = 0
    for found in scan(data):
        end = found.end
        if isinstance(found, Record):
            last = found
    if last is None:
        return LogContent(None, 0, end)
    return LogContent(last.committed, last.create_revision, end, last.stamp, last.readable)


def entry_at(data: bytes, position: int) -> Record | Mark | None:
    """The record or mark that begins at `position`; None when there is none that is whole."""
    begin = position + _HEAD.size
    if begin > len(data):
        return None
    magic, length, checksum = _HEAD.unpack_from(data, position)
    payload = data[begin : begin + length]
    if len(payload) != length or zlib.crc32(payload) != checksum:
        return None
    if magic == _MARK:
        return Mark(_FLUSHED.unpack(payload)[0], begin + length) if length == _FLUSHED.size else None
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
    committed = Committed(fragment, message.registers, first_append_time)
    readable = message.readable if message.HasField("readable") else fragment.end
    return Record(committed, create_revision, Stamp(*rest[:2]), flushed, readable, position, begin + length)
