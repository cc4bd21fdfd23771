"""Fixed-header frames: complete, cut off and desynchronised."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.fixed_frame import MAGIC, FixedFrame, encode_frame
from coranto.messages.framing import IncompleteTail, iter_messages
from coranto.messages.reading import ReadUncommitted
from coranto.messages.uuids import UuidParts, parse_uuid_bytes
from tests.platform.messages.texts import cut, uuid_text


class Prefixed:
    """Payloads of a UUID in sixteen bytes, followed by text."""

    def encode(self, message: str | None, uuid: UUID) -> bytes:
        return uuid.bytes + (message or "").encode()

    def decode(self, payload: bytes) -> str:
        return payload[16:].decode()

    def uuid_parts(self, payload: bytes) -> UuidParts | None:
        return parse_uuid_bytes(payload[:16]) if payload else None


FRAMES = FixedFrame(Prefixed())


def test_the_fixed_frame_vector() -> None:
    assert encode_frame(b"foo") == bytes.fromhex("66 33 93 36 03 00 00 00 66 6f 6f")


@given(st.lists(st.text(), max_size=5), st.lists(st.integers(0, 500), max_size=6), st.booleans())
def test_frames_round_trip_in_any_chunks(texts: list[str], cuts: list[int], newline: bool) -> None:
    frames = [FRAMES.marshal(text, uuid_text(16 * (n + 1))) for n, text in enumerate(texts)]
    content = b"".join(frames)
    tails: list[IncompleteTail] = []
    chunks = cut(content + b"\n" * newline, cuts)
    read = list(iter_messages(FRAMES, "j", chunks, 50, tails.append))
    assert [e.message for e in read] == texts
    assert [content[e.begin - 50 : e.end - 50] for e in read] == frames
    assert [e.clock for e in read] == [16 * (n + 1) for n in range(len(texts))]
    assert tails == []


def test_frames_that_are_cut_off_desynchronised_or_without_a_uuid() -> None:
    frame = FRAMES.marshal("x", uuid_text(16))
    decoder = FRAMES.decoder("j", 0)
    assert list(decoder.feed(frame[:-1])) == []
    assert decoder.finish() == IncompleteTail("j", 0, len(frame) - 1)
    assert [e.begin for e in decoder.feed(frame[-1:])] == [0]

    with pytest.raises(CorruptMessage, match="no frame begins here; 9 bytes") as caught:
        list(decoder.feed(b"junk" + MAGIC[:2] + b"abc" + frame))
    assert caught.value.offset == len(frame)
    assert [e.begin for e in decoder.feed(b"")] == [len(frame) + 9]

    (plain,) = decoder.feed(encode_frame(b""))
    assert (plain.clock, plain.producer) == (0, bytes(6))
    with pytest.raises(CorruptMessage, match="not a version 1 UUID"):
        list(decoder.feed(encode_frame(b"\xff" * 16)))
    assert [e.message for e in decoder.feed(FRAMES.acknowledgement(uuid_text(32, 2)))] == [""]


def test_a_frame_of_invalid_length_is_skipped() -> None:
    small = FixedFrame(Prefixed(), max_payload_bytes=30)
    frame = small.marshal("x", uuid_text(16))
    broken = MAGIC + b"\xff\xff\xff\xff" + b"content"
    decoder = small.decoder("j", 0)
    with pytest.raises(CorruptMessage, match="no frame begins here; 15 bytes") as caught:
        list(decoder.feed(broken + frame))
    assert caught.value.offset == 0
    assert [e.begin for e in decoder.feed(b"")] == [len(broken)]
    with pytest.raises(InvalidInput, match="31 bytes is longer than the 30 allowed"):
        small.marshal("x" * 15, uuid_text(16))


def test_a_magic_word_split_over_chunks_is_found() -> None:
    frame = FRAMES.marshal("x", uuid_text(16))
    decoder = FRAMES.decoder("j", 0)
    with pytest.raises(CorruptMessage):
        list(decoder.feed(b"12345678" + frame[:3]))
    assert [(e.begin, e.message) for e in decoder.feed(frame[3:])] == [(8, "x")]


def test_frames_across_holes() -> None:
    frame = FRAMES.marshal("x", uuid_text(16))
    decoder = FRAMES.decoder("j", 0)
    assert [e.begin for e in decoder.feed(frame, 90)] == [90]
    assert list(decoder.feed(frame[:9])) == []
    with pytest.raises(CorruptMessage, match="rest is missing"):
        list(decoder.feed(frame, 500))
    assert [e.begin for e in decoder.feed(b"")] == [500]
    with pytest.raises(InvalidInput, match="was fed before"):
        list(decoder.feed(frame, 0))


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("kept", [1, 3, 4, 5, 6, 7, 8, 9, 100, 990])
@pytest.mark.parametrize("behind", [3, 10, 2000])
def test_frames_after_a_torn_one_are_read(behind: int, kept: int, size: int) -> None:
    before = FRAMES.marshal("before", uuid_text(16))
    torn = FRAMES.marshal("t" * 1000, uuid_text(32))
    length, torn = len(torn), torn[:kept]
    after = [FRAMES.marshal("x" * (n % 90), uuid_text(16 * (n + 3))) for n in range(behind)]
    content = b"".join([before, torn, *after])
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    errors: list[CorruptMessage] = []
    reader = ReadUncommitted(FRAMES, "j", chunks, 50, on_corrupt=errors.append)
    read = list(reader)
    if kept >= 8 and kept + len(b"".join(after)) < length + 4:  # The content has not reached the torn frame's length.
        assert (len(read), reader.tail) == (1, IncompleteTail("j", 50 + len(before), len(content) - len(before)))
        return
    assert [each.clock for each in read] == [16, *(16 * (n + 3) for n in range(behind))]
    assert read[1].begin == 50 + len(before) + kept
    assert errors[0].offset == 50 + len(before)
    if kept >= 8:
        [error] = errors
        assert f"the next one begins at offset {read[1].begin}" in str(error)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_frame_may_contain_frames(size: int) -> None:
    inner = [FRAMES.marshal("x" * n, uuid_text(16)) for n in range(20)]
    held = [b"".join(inner), MAGIC, MAGIC * 50, b"".join(inner)[:-5], inner[0] + MAGIC + b"\xff\xff\xff\xff"]
    outer = [OPAQUE.marshal(each, uuid_text(16)) for each in [*held, b"last"]]
    content = b"".join(outer)
    errors: list[CorruptMessage] = []
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    read = list(ReadUncommitted(OPAQUE, "j", chunks, 0, on_corrupt=errors.append))
    assert ([each.content for each in read], errors) == ([*held, b"last"], [])


class _Bytes:
    """Payloads without UUIDs."""

    def encode(self, message: bytes | None, uuid: UUID) -> bytes:
        return message or b""

    def decode(self, payload: bytes) -> bytes:
        return payload

    def uuid_parts(self, payload: bytes) -> None:
        return None


OPAQUE = FixedFrame(_Bytes())


@pytest.mark.parametrize("kept", [16, 25])
def test_a_torn_frame_that_seems_to_end_with_another_one_is_not_a_message(kept: int) -> None:
    torn = ORDERED.marshal(b"t" * 80, uuid_text(16))
    after = [ORDERED.marshal(b"a", uuid_text(16)) for _ in range(20)]
    assert (len(torn) - kept) % len(after[0]) == 0
    errors: list[CorruptMessage] = []
    read = list(ReadUncommitted(ORDERED, "j", [torn[:kept], *after], 0, on_corrupt=errors.append))
    assert [each.begin for each in read] == [kept + n * len(after[0]) for n in range(20)]
    assert [error.offset for error in errors] == [0]


class _Repeated(_Bytes):
    """Payloads of one repeated byte."""

    def decode(self, payload: bytes) -> bytes:
        if len(set(payload)) > 1:
            raise InvalidInput("different bytes")
        return payload


ORDERED = FixedFrame(_Repeated())
