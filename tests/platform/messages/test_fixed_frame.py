"""Frames of fixed headers, whole, cut off and desynchronised."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.fixed_frame import MAGIC, FixedFrame, encode_frame
from coranto.messages.framing import IncompleteTail, iter_messages
from coranto.messages.uuids import UuidParts, parse_uuid_bytes
from tests.platform.messages.texts import cut, uuid_text


class Prefixed:
    """Payloads that are a UUID of sixteen bytes and then text."""

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
def test_frames_come_back_from_any_chunks(texts: list[str], cuts: list[int], newline: bool) -> None:
    frames = [FRAMES.marshal(text, uuid_text(16 * (n + 1))) for n, text in enumerate(texts)]
    content = b"".join(frames)
    tails: list[IncompleteTail] = []
    chunks = cut(content + b"\n" * newline, cuts)
    read = list(iter_messages(FRAMES, "j", chunks, 50, tails.append))
    assert [e.message for e in read] == texts
    assert [content[e.begin - 50 : e.end - 50] for e in read] == frames
    assert [e.clock for e in read] == [16 * (n + 1) for n in range(len(texts))]
    assert tails == []


def test_frames_that_are_cut_off_desynchronised_or_without_uuid() -> None:
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


def test_a_frame_of_absurd_length_is_passed_over() -> None:
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
