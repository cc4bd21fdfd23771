"""Message UUIDs: the producer of a message, its place in that producer's order, and its part in a transaction.

A message carries an RFC 4122 version 1 UUID whose bits are

=====================  =====================================================================================
node (bytes 10-15)     the ProducerId: six random bytes with the multicast bit set
timestamp (60 bits)    the upper 60 bits of the Clock: 100 ns ticks since 1582-10-15
clock sequence, high   the lower 4 bits of the Clock, a counter
clock sequence, low    10 bits of flags
=====================  =====================================================================================

So a Clock is `timestamp << 4 | counter`, a 64-bit integer that totally orders the messages of one producer. Readers
keep the largest clock of each producer, and messages with smaller clocks are duplicates. A zero clock opts a message
out: it is always delivered, at least once.

Code that runs for each message uses `parse_uuid_text` and `format_uuid`, which create no `uuid.UUID` objects.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import uuid
from binascii import Error as HexError
from binascii import unhexlify
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, NewType

from coranto.errors import InvalidInput

ProducerId = NewType("ProducerId", bytes)
"""Six bytes that identify one producer. Two writers never use the same id."""

ZERO_PRODUCER: Final = ProducerId(bytes(6))

CLOCK_TICK: Final = 160
"""One microsecond in clock units: the minimum step of `ProducerClock.tick`."""

_EPOCH_100NS: Final = 122_192_928_000_000_000  # From 1582-10-15 to 1970-01-01.
_MAX_CLOCK: Final = (1 << 64) - 1
_MAX_FLAGS: Final = 0x3FF
_LAYOUT: Final = struct.Struct(">IHHH6s")
_DASH: Final = 0x2D


class Flags(enum.IntEnum):
    """A message's part in a transaction. Readers treat other values as OUTSIDE_TXN."""

    OUTSIDE_TXN = 0
    """Outside of transactions: committed by itself."""
    CONTINUE_TXN = 1
    """Pending until an ACK_TXN of the same producer with an equal or larger clock."""
    ACK_TXN = 2
    """Commits pending messages up to its clock and rolls back the others."""


class UuidParts(NamedTuple):
    """The parts of a message UUID. `flags` may be a number that `Flags` does not know."""

    producer: ProducerId
    clock: int
    flags: int


ZERO_UUID: Final = UuidParts(ZERO_PRODUCER, 0, 0)


def new_producer_id(random_bytes: Callable[[int], bytes]) -> ProducerId:
    """Return a new ProducerId from a source of strong randomness, such as `os.urandom`."""
    drawn = bytearray(random_bytes(6))
    if len(drawn) != 6:
        raise InvalidInput(
            f"asked for 6 random bytes, got {len(drawn)}; give a source that returns as many as it is asked for"
        )
    drawn[0] |= 0x01  # RFC 4122: marks a node that is not a network card's address.
    return ProducerId(bytes(drawn))


def successor(producer: ProducerId) -> ProducerId:
    """Return the id that a writer uses after it abandons `producer`. The id is deterministic and unique."""
    return new_producer_id(lambda size: hashlib.sha1(producer, usedforsecurity=False).digest()[:size])


def is_same_writer(one: ProducerId, other: ProducerId) -> bool:
    """Return True if the ids are equal, or if one is the successor of the other."""
    return one == other or successor(one) == other or successor(other) == one


def clock_from_ns(unix_ns: int) -> int:
    """Return the clock of a wall time in nanoseconds since the Unix epoch, precise to 100 ns."""
    return (unix_ns // 100 + _EPOCH_100NS) << 4


def clock_to_ns(clock: int) -> int:
    """Return the wall time of a clock, in nanoseconds since the Unix epoch."""
    return ((clock >> 4) - _EPOCH_100NS) * 100


class ProducerClock:
    """The strictly increasing clock of one producer. Not thread-safe.

    It follows the wall time of `wall_ns` (nanoseconds since the Unix epoch, like `time.time_ns`). It never goes back,
    even when the wall time does, and each tick advances it by at least a microsecond.
    """

    __slots__ = ("_last", "_wall_ns")

    def __init__(self, wall_ns: Callable[[], int]) -> None:
        self._wall_ns = wall_ns
        self._last = 0

    @property
    def last(self) -> int:
        """The last clock that was returned or set; 0 initially."""
        return self._last

    def update(self, unix_ns: int) -> None:
        """Advance to a wall time. A time in the clock's past changes nothing."""
        now = clock_from_ns(unix_ns)
        if now > self._last:
            self._last = now

    def tick(self) -> int:
        """Read the wall time, and return a clock larger than all earlier ones."""
        now = ((self._wall_ns() // 100) + _EPOCH_100NS) << 4
        self._last = last = (now if now > self._last else self._last) + CLOCK_TICK
        return last

    def ticks(self, count: int) -> int:
        """Reserve `count` clocks (at least 1) that are CLOCK_TICK apart, and return the first."""
        first = self.tick()
        self._last = first + (count - 1) * CLOCK_TICK
        return first


def build_uuid(producer: ProducerId, clock: int, flags: int) -> uuid.UUID:
    """Return the UUID of a message. Raises InvalidInput for parts that do not fit their bits."""
    return uuid.UUID(bytes=pack_uuid(producer, clock, flags))


def uuid_runs(producer: ProducerId, first_clock: int, count: int, flags: int) -> Iterator[tuple[list[bytes], bytes]]:
    """Yield runs of the UUIDs of messages whose clocks are CLOCK_TICK apart.

    The UUIDs of a run differ only in their first eight digits: a run ends where these overflow. Each item has the first
    eight digits of each UUID, and the rest of all of them.
    """
    clock, left = first_clock, count
    while left:
        lows = range(clock >> 4 & 0xFFFFFFFF, 1 << 32, CLOCK_TICK >> 4)[:left]
        digits = struct.pack(f">{len(lows)}I", *lows).hex(" ", 4).encode().split()
        yield digits, str(build_uuid(producer, clock, flags)).encode()[8:]
        clock, left = clock + len(lows) * CLOCK_TICK, left - len(lows)


def parse_uuid(value: uuid.UUID) -> UuidParts:
    """Return the parts of a message UUID. Raises InvalidInput if it is neither version 1 nor all zeros."""
    return parse_uuid_bytes(value.bytes)


def parse_uuid_bytes(value: bytes) -> UuidParts:
    """Parse the sixteen bytes of a UUID, like `parse_uuid`."""
    if len(value) != 16:
        raise InvalidInput(f"a UUID has 16 bytes, not {len(value)}")
    low, mid, high, sequence, node = _LAYOUT.unpack(value)
    if high >> 12 != 1 or sequence >> 14 != 2:
        if value.count(0) == 16:
            return ZERO_UUID
        raise InvalidInput(f"{uuid.UUID(bytes=value)} is not a version 1 UUID, so it has no producer and clock")
    clock = low << 4 | mid << 36 | (high & 0xFFF) << 52 | (sequence >> 10) & 0xF
    return UuidParts(node, clock, sequence & _MAX_FLAGS)


def parse_uuid_text(text: bytes) -> UuidParts:
    """Return the parts of a message UUID, given as 36 ASCII characters in lower or upper case.

    Raises InvalidInput for any other text, and for UUIDs that are neither version 1 nor all zeros.
    """
    if len(text) != 36 or not text[8] == text[13] == text[18] == text[23] == _DASH:
        raise InvalidInput(f"{text[:64]!r} is not a UUID of 36 characters")
    try:
        packed = unhexlify(text.replace(b"-", b""))
    except HexError:
        raise InvalidInput(f"{text!r} is not a UUID: it holds characters that are not hexadecimal") from None
    return parse_uuid_bytes(packed)


def format_uuid(producer: ProducerId, clock: int, flags: int) -> str:
    """Return the 36 characters of a message UUID. Raises InvalidInput for parts that do not fit their bits."""
    text = pack_uuid(producer, clock, flags).hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def pack_uuid(producer: ProducerId, clock: int, flags: int) -> bytes:
    """Return the 16 bytes of a message UUID. Raises InvalidInput for parts that do not fit their bits."""
    if len(producer) != 6:
        raise InvalidInput(f"a producer id has 6 bytes, not {len(producer)}")
    if not 0 <= clock <= _MAX_CLOCK:
        raise InvalidInput(f"clock {clock} is not an unsigned 64-bit number")
    if not 0 <= flags <= _MAX_FLAGS:
        raise InvalidInput(f"flags {flags} do not fit in 10 bits")
    return _LAYOUT.pack(
        (clock >> 4) & 0xFFFFFFFF,
        (clock >> 36) & 0xFFFF,
        clock >> 52 | 0x1000,
        (clock & 0xF) << 10 | flags | 0x8000,
        producer,
    )
