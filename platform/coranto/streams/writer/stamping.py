"""Fast stamping of a writer's events, with the same bytes as the event format.

A commit waits while its events are stamped. A writer's UUIDs differ only in clock and flags, and its transaction ends
only in UUID and sequence. So for the built-in formats, only these parts are filled in, without intermediate objects.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId, build_uuid, format_uuid, pack_uuid
from coranto.streams.model.events import BytesEvents, EventFormat, JsonEvents

_STEP = CLOCK_TICK >> 4
"""The growth of the timestamp with each tick. The counter below it does not change."""
_CONTINUE: Final = Flags.CONTINUE_TXN.value
_stamp_into: Final = struct.Struct(">I12s").pack_into


class Stamper:
    """Stamps the events and transaction ends of one writer, in any format."""

    def __init__(self, events: EventFormat[Any], producer: ProducerId, writer: str) -> None:
        self._events = events
        self._producer = producer
        self._writer = writer

    def event(self, encoded: bytes, clock: int, flags: int) -> bytes:
        """Stamp an encoded event with the UUID of this clock and these flags."""
        return self._events.stamp(encoded, build_uuid(self._producer, clock, flags))

    def events(self, encoded: Sequence[bytes], clock: int, flags: int) -> list[bytes]:
        """Stamp several encoded events. Their clocks begin with this one and are CLOCK_TICK apart."""
        return [self.event(each, clock + index * CLOCK_TICK, flags) for index, each in enumerate(encoded)]

    def transaction_end(self, clock: int, sequence: int) -> bytes:
        """Return the end of a transaction, with the UUID of this clock."""
        uuid = build_uuid(self._producer, clock, Flags.ACK_TXN)
        return self._events.transaction_end(uuid, self._writer, sequence)

    def transaction(self, encoded: Sequence[bytes], clock: int, sequence: int) -> bytes:
        """Stamp a whole transaction, including its end. Its clocks begin with this one and are CLOCK_TICK apart."""
        end = self.transaction_end(clock + len(encoded) * CLOCK_TICK, sequence)
        return b"".join([*self.events(encoded, clock, _CONTINUE), end])


class _JsonStamper(Stamper):
    """The stamper of JSON lines: a UUID has 36 characters after a prefix, a sequence 16 digits at the line's end."""

    def __init__(self, events: JsonEvents, producer: ProducerId, writer: str) -> None:
        super().__init__(events, producer, writer)
        blank = events.transaction_end(build_uuid(producer, 0, Flags.ACK_TXN), writer, 0)
        self._begin = len(events.uuid_prefix)
        self._end = self._begin + 36
        self._node = format_uuid(producer, 0, 0).encode()[-13:]  # Including the dash before it.
        self._ack_head = blank[: self._begin]
        self._ack_middle = blank[self._end : -20]
        self._ack_tail = blank[-4:]

    def event(self, encoded: bytes, clock: int, flags: int) -> bytes:
        return b"%b%08x-%04x-%04x-%04x%b%b" % (
            encoded[: self._begin],
            (clock >> 4) & 0xFFFFFFFF,
            (clock >> 36) & 0xFFFF,
            clock >> 52 | 0x1000,
            (clock & 0xF) << 10 | flags | 0x8000,
            self._node,
            encoded[self._end :],
        )

    def events(self, encoded: Sequence[bytes], clock: int, flags: int) -> list[bytes]:
        low = (clock >> 4) & 0xFFFFFFFF
        if low + len(encoded) * _STEP > 0xFFFFFFFF:
            return super().events(encoded, clock, flags)
        # These clocks differ only in the lowest 32 bits of the timestamp.
        rest = b"-%04x-%04x-%04x%b" % (
            (clock >> 36) & 0xFFFF,
            clock >> 52 | 0x1000,
            (clock & 0xF) << 10 | flags | 0x8000,
            self._node,
        )
        head, end = self._ack_head, self._end  # All events begin like a transaction end.
        return [b"%b%08x%b%b" % (head, low + at * _STEP, rest, each[end:]) for at, each in enumerate(encoded)]

    def transaction_end(self, clock: int, sequence: int) -> bytes:
        return b"%b%08x-%04x-%04x-%04x%b%b%016x%b" % (
            self._ack_head,
            (clock >> 4) & 0xFFFFFFFF,
            (clock >> 36) & 0xFFFF,
            clock >> 52 | 0x1000,
            (clock & 0xF) << 10 | Flags.ACK_TXN.value | 0x8000,
            self._node,
            self._ack_middle,
            sequence,
            self._ack_tail,
        )


class _BytesStamper(Stamper):
    """The stamper of fixed frames: a header of 8 bytes, a UUID of 16, and in a transaction end a sequence of 8."""

    def __init__(self, events: BytesEvents, producer: ProducerId, writer: str) -> None:
        super().__init__(events, producer, writer)
        blank = events.transaction_end(build_uuid(producer, 0, Flags.ACK_TXN), writer, 0)
        self._ack_head, self._ack_tail = blank[:8], blank[32:]

    def event(self, encoded: bytes, clock: int, flags: int) -> bytes:
        return b"%b%b%b" % (encoded[:8], pack_uuid(self._producer, clock, flags), encoded[24:])

    def transaction_end(self, clock: int, sequence: int) -> bytes:
        uuid = pack_uuid(self._producer, clock, Flags.ACK_TXN)
        return b"%b%b%b%b" % (self._ack_head, uuid, sequence.to_bytes(8, "little"), self._ack_tail)

    def transaction(self, encoded: Sequence[bytes], clock: int, sequence: int) -> bytes:
        low, at = (clock >> 4) & 0xFFFFFFFF, 8
        if low + len(encoded) * _STEP > 0xFFFFFFFF:
            return super().transaction(encoded, clock, sequence)
        # These clocks differ only in the lowest 32 bits of the timestamp.
        rest = pack_uuid(self._producer, clock, _CONTINUE)[4:]
        content = bytearray().join(encoded)
        for each in encoded:
            _stamp_into(content, at, low, rest)
            at += len(each)
            low += _STEP
        content += self.transaction_end(clock + len(encoded) * CLOCK_TICK, sequence)
        return bytes(content)


def stamper_of(events: EventFormat[Any], producer: ProducerId, writer: str) -> Stamper:
    """Return the fastest stamper with exactly the bytes of this format."""
    if type(events) is JsonEvents:  # Subclasses may stamp differently.
        return _JsonStamper(events, producer, writer)
    if type(events) is BytesEvents:
        return _BytesStamper(events, producer, writer)
    return Stamper(events, producer, writer)
