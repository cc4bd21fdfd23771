"""Message UUIDs compared with published vectors and with the standard library's reading of RFC 4122."""

from __future__ import annotations

import uuid
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages import uuids
from coranto.messages.uuids import (
    CLOCK_TICK,
    Flags,
    ProducerClock,
    ProducerId,
    build_uuid,
    is_same_writer,
    successor,
    uuid_runs,
)

PRODUCER = ProducerId(bytes.fromhex("010203040506"))
VECTOR = "83fc2f81-cc5f-11e9-8002-010203040506"
VECTOR_CLOCK = 0x1E9CC5F83FC2F810

producers = st.binary(min_size=6, max_size=6).map(ProducerId)
clocks = st.integers(0, 2**64 - 1)
flags = st.integers(0, 0x3FF)


def test_the_published_vector_in_both_directions() -> None:
    assert uuids.format_uuid(PRODUCER, VECTOR_CLOCK, Flags.ACK_TXN) == VECTOR
    assert uuids.parse_uuid_text(VECTOR.encode()) == (PRODUCER, VECTOR_CLOCK, Flags.ACK_TXN)
    assert uuids.build_uuid(PRODUCER, VECTOR_CLOCK, Flags.ACK_TXN) == uuid.UUID(VECTOR)
    assert uuids.parse_uuid(uuid.UUID(VECTOR)) == (PRODUCER, VECTOR_CLOCK, Flags.ACK_TXN)


@given(producers, clocks, flags)
def test_parts_round_trip_and_the_standard_library_agrees(producer: ProducerId, clock: int, flag: int) -> None:
    text = uuids.format_uuid(producer, clock, flag)
    assert uuids.parse_uuid_text(text.encode()) == (producer, clock, flag)
    assert uuids.parse_uuid_text(text.upper().encode()) == (producer, clock, flag)
    read = uuid.UUID(text)
    assert (read.version, read.variant) == (1, uuid.RFC_4122)
    assert (read.time, read.node) == (clock >> 4, int.from_bytes(producer, "big"))
    assert read.clock_seq == (clock & 0xF) << 10 | flag
    assert read == uuids.build_uuid(producer, clock, flag)


def test_the_zero_uuid_opts_out() -> None:
    assert uuids.parse_uuid(uuid.UUID(int=0)) == uuids.ZERO_UUID
    assert uuids.parse_uuid_text(str(uuid.UUID(int=0)).encode()).clock == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        VECTOR[:-1],
        VECTOR + "0",
        VECTOR.replace("-", ""),
        VECTOR.replace("8", "g", 1),
        VECTOR.replace("83fc2f81-", "83fc2f8-1"),
        " 3fc2f81-cc5f-11e9-8002-010203040506",
        "0x3fc2f8-cc5f-11e9-8002-010203040506",
        "83fc_f81-cc5f-11e9-8002-010203040506",
        "83fc2f8--cc5f-11e9-8002-010203040506",
        "83fc2f81-cc5f-41e9-8002-010203040506",  # Version 4.
        "83fc2f81-cc5f-11e9-c002-010203040506",  # Another variant.
    ],
)
def test_malformed_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        uuids.parse_uuid_text(text.encode())


@pytest.mark.parametrize(
    ("producer", "clock", "flag"), [(b"12345", 1, 0), (PRODUCER, -1, 0), (PRODUCER, 1 << 64, 0), (PRODUCER, 1, 0x400)]
)
def test_parts_that_do_not_fit_are_refused(producer: bytes, clock: int, flag: int) -> None:
    with pytest.raises(InvalidInput):
        uuids.build_uuid(ProducerId(producer), clock, flag)


def test_producer_ids_carry_the_multicast_bit() -> None:
    assert uuids.new_producer_id(lambda n: bytes(n)) == b"\x01\x00\x00\x00\x00\x00"
    assert uuids.new_producer_id(lambda n: b"\xff" * n) == b"\xff" * 6
    with pytest.raises(InvalidInput):
        uuids.new_producer_id(lambda n: b"short")


def test_a_clock_ticks_by_a_microsecond_and_never_goes_back() -> None:
    wall = [12_000_000_300]
    clock = ProducerClock(lambda: wall[0])
    first = clock.tick()
    assert first == uuids.clock_from_ns(12_000_000_300) + 160
    assert uuids.clock_to_ns(first) == 12_000_001_300
    assert clock.tick() == first + 160
    wall[0] = 11_000_000_000
    assert clock.tick() == first + 320
    clock.update(5)
    assert clock.last == first + 320
    wall[0] = 13_000_000_099  # Rounded to 100 ns.
    assert clock.tick() == uuids.clock_from_ns(13_000_000_000) + 160
    clock.update(14_000_000_000)
    assert clock.last == uuids.clock_from_ns(14_000_000_000)


@given(st.lists(st.integers(0, 2**62), min_size=1))
def test_ticks_increase_for_any_wall_clock(readings: list[int]) -> None:
    times = iter(readings)
    clock = ProducerClock(lambda: next(times))
    ticks = [clock.tick() for _ in readings]
    assert all(after > before for before, after in pairwise(ticks))
    assert all(tick > uuids.clock_from_ns(wall) for tick, wall in zip(ticks, readings, strict=True))


@given(st.integers(0, 1 << 62), st.integers(1, 20))
def test_several_ticks_together_equal_single_ticks(wall: int, count: int) -> None:
    one, other = ProducerClock(lambda: wall), ProducerClock(lambda: wall)
    ticks = [one.tick() for _ in range(count)]
    assert other.ticks(count) == ticks[0]
    assert other.last == ticks[-1] == ticks[0] + (count - 1) * uuids.CLOCK_TICK
    assert other.tick() == one.tick()


def test_a_successor_is_another_producer_of_the_same_writer() -> None:
    first = ProducerId(bytes.fromhex("010203040506"))
    second = successor(first)
    assert len(second) == 6
    assert second[0] & 1
    assert second == successor(first)
    assert second != first
    assert is_same_writer(first, first)
    assert is_same_writer(first, second)
    assert is_same_writer(second, first)
    assert not is_same_writer(first, successor(second))


def test_texts_of_consecutive_clocks_equal_single_texts() -> None:
    producer = ProducerId(b"\x01bcdef")
    for first in (0, 1 << 40, (5 << 32 | 0xFFFFFFFD) << 4 | 3, (0xABC << 48 | 0xFFFFFFFFFFF5) << 4):
        expected = [str(build_uuid(producer, first + n * CLOCK_TICK, 2)).encode() for n in range(9)]
        for count in (0, 1, 9):
            runs = uuid_runs(producer, first, count, 2)
            assert [each + rest for digits, rest in runs for each in digits] == expected[:count]
