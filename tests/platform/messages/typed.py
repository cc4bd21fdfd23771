"""Types of messages for tests."""

from __future__ import annotations

from typing import Self
from uuid import UUID

import pyarrow as pa

from coranto.messages.uuids import Flags, ProducerId, build_uuid

A = ProducerId(b"\x01AAAAA")
UUID_1 = build_uuid(A, 160, Flags.CONTINUE_TXN)
UUID_2 = build_uuid(A, 320, Flags.ACK_TXN)


class Opaque:
    """A custom class that stores its UUID before its text."""

    def __init__(self, text: str) -> None:
        self.uuid: UUID | None = None
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def set_uuid(self, uuid: UUID) -> None:
        self.uuid = uuid

    def get_uuid(self) -> UUID | None:
        return self.uuid

    def to_bytes(self) -> bytes:
        return (self.uuid.bytes if self.uuid else bytes(16)) + self.text.encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Self:
        if len(payload) < 16:
            raise ValueError("too short")
        message = cls(payload[16:].decode())
        message.uuid = UUID(bytes=payload[:16])
        return message

    @classmethod
    def acknowledgement(cls) -> Self:
        return cls("")


BATCHES = [pa.record_batch({"a": [n, n + 1], "b": ["x", None]}) for n in range(3)]
