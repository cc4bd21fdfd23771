"""The commit log of one spool fragment: what has committed, one small record per commit.

::

    record   = magic  length  crc32  payload          magic is `csp2`; length and CRC-32 (of the payload) are uint32
    payload  = create_revision  first_append_time  synced  written  ReplicateRequest{proposal, registers, readable}
                     int64          float64         int64    int64      protobuf

`synced` and `written` are the spool's `in_sync.Stamp`. Records of magic `csp1` lack them, and count as of before any
pipeline. `readable` is up to where readers had been shown the journal by then. Records of earlier versions lack it:
what they tell of had been shown.

All numbers are little-endian. Every record stands for itself, so only the last whole one matters: a record that a crash
has torn ends the log before it. The create revision is that of the journal's item in etcd; it tells a journal from an
earlier one of the same name.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from coranto.errors import InvalidInput
from coranto.fragments import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.in_sync import UNSTAMPED, Stamp
from coranto_broker.spool import Committed

MAGIC = b"csp2"
_HEAD = struct.Struct("<4sII")
_PRESENT = struct.Struct("<qdqq")
_FIXED = {MAGIC: _PRESENT, b"csp1": struct.Struct("<qd")}


def encode(create_revision: int, committed: Committed, stamp: Stamp = UNSTAMPED, readable: int | None = None) -> bytes:
    """One record."""
    # A message of its own: one that is set again and again keeps the memory of all that it was ever set to.
    message = pb.ReplicateRequest()
    message.registers.CopyFrom(committed.registers)
    committed.fragment.fill(message.proposal)
    if readable is not None:
        message.readable = readable
    fixed = _PRESENT.pack(create_revision, committed.first_append_time, stamp.synced, stamp.written)
    payload = fixed + message.SerializeToString()
    return _HEAD.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class LogContent:
    """What a log says: its last whole record, and the length in bytes up to the end of that record."""

    last: Committed | None
    create_revision: int
    valid_length: int
    stamp: Stamp = UNSTAMPED
    readable: int = 0
    """Up to where readers had been shown the journal."""


def decode(data: bytes) -> LogContent:
    """Read a log up to its end or to the first record that is not whole."""
    last: Committed | None = None
    create_revision = position = readable = 0
    stamp = UNSTAMPED
    while True:
        found = _record_at(data, position)
        if found is None:
            return LogContent(last, create_revision, position, stamp, readable)
        create_revision, last, position, stamp, readable = found


def _record_at(data: bytes, position: int) -> tuple[int, Committed, int, Stamp, int] | None:
    begin = position + _HEAD.size
    if begin > len(data):
        return None
    magic, length, checksum = _HEAD.unpack_from(data, position)
    payload = data[begin : begin + length]
    fixed = _FIXED.get(magic)
    if fixed is None or len(payload) != length or length < fixed.size or zlib.crc32(payload) != checksum:
        return None
    create_revision, first_append_time, *stamp = fixed.unpack_from(payload)
    try:
        message = pb.ReplicateRequest.FromString(payload[fixed.size :])
        fragment = Fragment.from_wire(message.proposal)
    except (InvalidInput, DecodeError):
        return None
    committed = Committed(fragment, message.registers, first_append_time)
    readable = message.readable if message.HasField("readable") else fragment.end
    return create_revision, committed, begin + length, Stamp(*stamp), readable
