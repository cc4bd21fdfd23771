"""The content of segments, read by an independent parser, so that the code under test does not check itself."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from coranto.streams.model.keys import KeyRange

CONTINUE, ACK = 1, 2  # The flags of messages. An event outside of transactions has none.
_MAGIC = b"\x66\x33\x93\x36"


class Message(NamedTuple):
    """One message: its place in the journal, the parts of its UUID, and its event or transaction end.

    `sequence` is -1 except for a transaction end. `unit` is -1 for that and for other acknowledgements.
    """

    begin: int
    end: int
    producer: bytes
    clock: int
    flags: int
    unit: int = -1
    part: int = 0
    writer: str = ""
    sequence: int = -1


class Unreadable(Exception):
    """Content that no writer writes."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment at the end of a run. `sealed_at` is from its label."""

    number: int
    range: KeyRange
    content: bytes
    sealed_at: int | None = None
    messages: list[Message] = field(default_factory=list)
    journal: str = ""
    predecessors: frozenset[int] = frozenset()


def parse(content: bytes, *, json_lines: bool) -> list[Message]:
    """Return the messages of a segment. Raises Unreadable."""
    try:
        return list(_lines(content) if json_lines else _frames(content))
    except (ValueError, KeyError, struct.error) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _lines(content: bytes) -> Iterator[Message]:
    begin = 0
    while begin < len(content):
        end = content.index(b"\n", begin) + 1
        found: dict[str, Any] = json.loads(content[begin:end])
        meta = found["_meta"]
        flags, parts = _uuid(UUID(meta["uuid"]))
        if "sequence" in meta:
            yield Message(begin, end, *parts, flags, writer=meta["writer"], sequence=int(meta["sequence"], 16))
        elif "unit" in found:
            yield Message(begin, end, *parts, flags, found["unit"], found["index"])
        else:
            yield Message(begin, end, *parts, flags)
        begin = end


def _frames(content: bytes) -> Iterator[Message]:
    begin = 0
    while begin < len(content):
        magic, length = struct.unpack_from("<4sI", content, begin)
        end = begin + 8 + length
        if magic != _MAGIC or end > len(content):
            raise ValueError(f"no frame at {begin}")
        payload = content[begin + 8 : end]
        flags, parts = _uuid(UUID(bytes=payload[:16]))
        event = payload[16:]
        if flags == ACK and len(event) > 8:
            (sequence,) = struct.unpack_from("<Q", event)
            yield Message(begin, end, *parts, flags, writer=event[8:].decode(), sequence=sequence)
        elif flags == ACK:
            yield Message(begin, end, *parts, flags)
        else:
            found = json.loads(event)
            yield Message(begin, end, *parts, flags, found["unit"], found["index"])
        begin = end


def _uuid(uuid: UUID) -> tuple[int, tuple[bytes, int]]:
    """Return the flags, the producer and the clock: the time, shifted by the sequence's four bits."""
    return uuid.clock_seq & 0x3FF, (uuid.node.to_bytes(6, "big"), uuid.time << 4 | (uuid.clock_seq >> 10) & 0xF)
