"""Reject batches of too many appends before parsing: a parsed append takes far more memory than its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coranto.wire.append_stream_pb2 import AppendBatch
from coranto_broker.rpc.source import Unreadable

MAX_BATCH_APPENDS: Final = 4096
"""The maximum number of appends in one message. Coranto's clients have at most 1,024 in flight."""

_TAG: Final = AppendBatch.APPENDS_FIELD_NUMBER << 3 | 2
_TOO_MANY: Final = f"a message has at most {MAX_BATCH_APPENDS} appends; send the rest in further messages"


def batch_reader(parse: Callable[[bytes], AppendBatch | Unreadable]) -> Callable[[bytes], AppendBatch | Unreadable]:
    """Return a deserializer of batches. It calls `parse` unless a batch is too long."""

    def read(data: bytes) -> AppendBatch | Unreadable:
        # An append takes at least two bytes, so most batches need no check.
        return Unreadable(_TOO_MANY) if len(data) > 2 * MAX_BATCH_APPENDS and _is_too_long(data) else parse(data)

    return read


def _is_too_long(data: bytes) -> bool:
    """Return True if a message has too many appends, or much unknown content that may hide them."""
    at, size = 0, len(data)
    for _ in range(MAX_BATCH_APPENDS):
        if at >= size:
            return False
        if data[at] != _TAG:
            return size - at > 2 * MAX_BATCH_APPENDS
        length = shift = 0
        more = True
        while more and (at := at + 1) < size:
            length |= (data[at] & 0x7F) << shift
            shift += 7
            more = data[at] >= 0x80
        at += 1 + length
    return at < size
