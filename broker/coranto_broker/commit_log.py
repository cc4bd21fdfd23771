"""The commit log of one spool fragment: what has committed, one small record per commit.

::

    record   = magic  length  crc32  payload          magic is `csp1`; length and CRC-32 (of the payload) are uint32
    payload  = create_revision  first_append_time  ReplicateRequest{proposal, registers}
                     int64          float64            protobuf

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
from coranto_broker.spool import Committed

MAGIC = b"csp1"
_HEAD = struct.Struct("<4sII")
_FIXED = struct.Struct("<qd")


def encode(create_revision: int, committed: Committed) -> bytes:
    """One record."""
    message = pb.ReplicateRequest(proposal=committed.fragment.to_wire(), registers=committed.registers)
    payload = _FIXED.pack(create_revision, committed.first_append_time) + message.SerializeToString()
    return _HEAD.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


@dataclass(frozen=True, slots=True)
class LogContent:
    """What a log says: its last whole record, and the length in bytes up to the end of that record."""

    last: Committed | None
    create_revision: int
    valid_length: int


def decode(data: bytes) -> LogContent:
    """Read a log up to its end or to the first record that is not whole."""
    last: Committed | None = None
    create_revision = position = 0
    while True:
        found = _record_at(data, position)
        if found is None:
            return LogContent(last, create_revision, position)
        create_revision, last, position = found


def _record_at(data: bytes, position: int) -> tuple[int, Committed, int] | None:
    begin = position + _HEAD.size
    if begin > len(data):
        return None
    magic, length, checksum = _HEAD.unpack_from(data, position)
    payload = data[begin : begin + length]
    if magic != MAGIC or len(payload) != length or length < _FIXED.size or zlib.crc32(payload) != checksum:
        return None
    create_revision, first_append_time = _FIXED.unpack_from(payload)
    try:
        message = pb.ReplicateRequest.FromString(payload[_FIXED.size :])
        fragment = Fragment.from_wire(message.proposal)
    except (InvalidInput, DecodeError):
        return None
    return create_revision, Committed(fragment, message.registers, first_append_time), begin + length
