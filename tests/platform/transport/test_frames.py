"""Frames round-trip for any split of the bytes; invalid frames are refused early."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.transport.frames import PREFACE, Frame, FrameDecoder, FrameError, FrameKind, encode_frame

FRAMES = st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=300)), max_size=6)
LIMIT = 300


def bytes_of(frames: list[tuple[FrameKind, bytes]]) -> bytes:
    return PREFACE + b"".join(b"".join(encode_frame(kind, payload)) for kind, payload in frames)


def feed_in_pieces(decoder: FrameDecoder, data: bytes, piece: int) -> list[Frame]:
    return [frame for at in range(0, len(data), piece) for frame in decoder.feed(data[at : at + piece])]


@given(FRAMES, st.lists(st.integers(0, 2000)))
def test_frames_round_trip_for_any_split_of_the_bytes(frames: list[tuple[FrameKind, bytes]], cuts: list[int]) -> None:
    data, decoder, found = bytes_of(frames), FrameDecoder(LIMIT), list[Frame]()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for begin, end in pairwise(edges):
        found += decoder.feed(data[begin:end])
        assert decoder.held <= LIMIT + 5
    assert found == frames
    assert decoder.held == 0


@given(FRAMES, st.integers(1, 400))
def test_an_incomplete_frame_is_not_returned(frames: list[tuple[FrameKind, bytes]], missing: int) -> None:
    data = bytes_of(frames)
    found = FrameDecoder(LIMIT).feed(data[: max(0, len(data) - missing)])
    assert found == frames[: len(found)]
    assert len(found) < len(frames) or not frames


@given(st.binary(max_size=64), st.integers(1, 64))
def test_invalid_frames_are_refused_and_not_buffered(garbage: bytes, piece: int) -> None:
    decoder = FrameDecoder(LIMIT)
    try:
        assert feed_in_pieces(decoder, garbage, piece) == []
    except FrameError:
        return
    assert PREFACE.startswith(garbage[: len(PREFACE)])


@pytest.mark.parametrize("piece", [1, 4, 100])
def test_a_client_of_another_protocol_is_referred_to_the_grpc_endpoint(piece: int) -> None:
    request, decoder = b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n", FrameDecoder(LIMIT)
    with pytest.raises(FrameError, match="connect to the gRPC endpoint"):
        feed_in_pieces(decoder, request, piece)


@pytest.mark.parametrize("piece", [1, 100])
def test_a_client_of_another_version_gets_both_versions(piece: int) -> None:
    preface, decoder = PREFACE[:-1] + b"\x07more", FrameDecoder(LIMIT)
    with pytest.raises(FrameError, match="speaks version 1 of the frame transport, the other version 7"):
        feed_in_pieces(decoder, preface, piece)


def test_a_length_beyond_the_limit_is_refused_before_the_payload() -> None:
    decoder = FrameDecoder(LIMIT)
    assert decoder.feed(PREFACE + b"".join(encode_frame(FrameKind.MESSAGE, b"x" * LIMIT))) == [
        (FrameKind.MESSAGE, b"x" * LIMIT)
    ]
    with pytest.raises(FrameError, match="301 bytes is longer than the 300"):
        decoder.feed(b"".join(encode_frame(FrameKind.MESSAGE, b"x" * (LIMIT + 1)))[:5])
    decoder = FrameDecoder(LIMIT)
    with pytest.raises(FrameError, match="4294967295 bytes"):
        decoder.feed(PREFACE + b"\xff" * 5)


def test_a_large_payload_is_not_copied_into_its_frame() -> None:
    payload = b"x" * (1 << 20)
    assert encode_frame(FrameKind.MESSAGE, payload)[1] is payload
