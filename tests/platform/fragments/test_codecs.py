"""Codecs: content round-trips, and corrupt files are rejected."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptFragment
from coranto.fragments.codecs import BATCH_BYTES, Compressor, compress, decompress, decompress_into
from coranto.fragments.fragment import Codec

COMPRESSING = [codec for codec in Codec if codec is not Codec.NONE]
PIECES = st.lists(st.one_of(st.binary(max_size=200), st.integers(1, 100_000).map(lambda n: b"ab" * n)), max_size=6)


def lines(size: int) -> bytes:
    """Return content that compresses like real messages."""
    row = b'{"carrier": "UA", "tailnum": "N14228", "arr_delay": %d}\n'
    return b"".join(row % number for number in range(size // 50))


def filled(codec: Codec, data: bytes, length: int) -> bytes:
    """Decompress into an output of that length, as direct reads do."""
    output = bytearray(length)
    decompress_into(codec, data, output)
    return bytes(output)


@given(st.sampled_from(Codec), PIECES, st.integers(1, 4096))
def test_content_written_in_pieces_round_trips(codec: Codec, pieces: list[bytes], batch: int) -> None:
    compressor = Compressor(codec, batch_bytes=batch)
    data = b"".join([compressor.write(piece) for piece in pieces] + [compressor.finish()])
    content = b"".join(pieces)
    assert decompress(codec, data, len(content)) == content
    assert filled(codec, data, len(content)) == content


@pytest.mark.parametrize("codec", Codec)
def test_content_of_several_batches_round_trips(codec: Codec) -> None:
    content = lines(5 * BATCH_BYTES // 2)
    data = compress(codec, content)
    assert codec is Codec.NONE or len(data) < len(content) / 2
    assert decompress(codec, data, len(content)) == content
    assert filled(codec, data, len(content)) == content


def test_gzip_is_one_member_per_batch() -> None:
    compressor = Compressor(Codec.GZIP)
    quarter = lines(BATCH_BYTES // 4)
    ready = [compressor.write(quarter) for _ in range(11)]
    data = b"".join([*ready, compressor.finish()])
    assert sum(1 for piece in ready if piece) == 2
    members = 0
    rest = data
    while rest:
        member = zlib.decompressobj(31)
        content = member.decompress(rest)
        assert member.eof
        assert len(content) >= BATCH_BYTES or not member.unused_data
        rest, members = member.unused_data, members + 1
    assert members == 3


def test_the_offload_codec_is_a_single_gzip_stream() -> None:
    content = lines(3 * BATCH_BYTES)
    member = zlib.decompressobj(31)
    assert member.decompress(compress(Codec.GZIP_OFFLOAD_DECOMPRESSION, content)) == content
    assert member.eof
    assert member.unused_data == b""


def test_files_are_read_by_other_tools() -> None:
    content = lines(3 * BATCH_BYTES)
    assert gzip.decompress(compress(Codec.GZIP, content)) == content
    assert bytes(cramjam.zstd.decompress(compress(Codec.ZSTANDARD, content))) == content
    assert bytes(cramjam.snappy.decompress(compress(Codec.SNAPPY, content))) == content


def test_files_of_other_tools_are_read() -> None:
    content = lines(BATCH_BYTES)
    for codec, data in (
        (Codec.GZIP, gzip.compress(content[:1000]) + gzip.compress(b"") + gzip.compress(content[1000:])),
        (Codec.ZSTANDARD, bytes(cramjam.zstd.compress(content))),
        (Codec.SNAPPY, bytes(cramjam.snappy.compress(content[:10])) + bytes(cramjam.snappy.compress(content[10:]))),
    ):
        assert decompress(codec, data, len(content)) == content
        assert filled(codec, data, len(content)) == content


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("wrong_by", [-1, 1, -1000, 1000])
def test_any_other_length_is_corrupt(codec: Codec, wrong_by: int) -> None:
    content = lines(100_000)
    data = compress(codec, content)
    with pytest.raises(CorruptFragment):
        decompress(codec, data, len(content) + wrong_by)
    with pytest.raises(CorruptFragment):
        filled(codec, data, len(content) + wrong_by)


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("cut", [1, 5, 13, 500])
def test_a_file_cut_short_is_corrupt(codec: Codec, cut: int) -> None:
    content = lines(100_000)
    data = compress(codec, content)[:-cut]
    with pytest.raises(CorruptFragment):
        decompress(codec, data, len(content))
    with pytest.raises(CorruptFragment):
        filled(codec, data, len(content))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
def test_a_file_with_trailing_data_is_corrupt(codec: Codec) -> None:
    content = lines(10_000)
    data = compress(codec, content) + b"and more"
    with pytest.raises(CorruptFragment):
        decompress(codec, data, len(content))
    with pytest.raises(CorruptFragment):
        filled(codec, data, len(content))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY])
def test_a_flipped_bit_is_corrupt(codec: Codec) -> None:
    content = lines(10_000)
    data = bytearray(compress(codec, content))
    data[len(data) // 2] ^= 0x10
    with pytest.raises(CorruptFragment):
        decompress(codec, bytes(data), len(content))
    with pytest.raises(CorruptFragment):
        filled(codec, bytes(data), len(content))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
def test_a_decompression_bomb_uses_no_more_memory_than_the_expected_length(codec: Codec) -> None:
    bomb = compress(codec, bytes(64 << 20))
    expected = 10_000
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFragment, match="longer than the 10000 bytes expected"):
            decompress(codec, bomb, expected)
        with pytest.raises(CorruptFragment, match="longer than the 10000 bytes expected"):
            filled(codec, bomb, expected)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (8 << 20) + 3 * len(bomb)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
def test_a_length_in_the_name_that_the_file_cannot_fill_allocates_nothing(codec: Codec) -> None:
    with pytest.raises(CorruptFragment, match="cannot hold the 4611686018427387904 bytes"):
        decompress(codec, compress(codec, b"hello"), 1 << 62)


def test_highly_compressible_content_counts_as_plausible_for_its_file() -> None:
    content = bytes(32 << 20)
    for codec in COMPRESSING:
        assert decompress(codec, compress(codec, content), len(content)) == content


def test_the_offload_codec_accepts_content_that_the_store_decompressed() -> None:
    codec = Codec.GZIP_OFFLOAD_DECOMPRESSION
    for content in (b"", b"x", b"\x1f", b"\x1f\x8bthis only begins like gzip", lines(100_000)):
        assert decompress(codec, content, len(content)) == content
    # Content in gzip, from a store that decompressed the outer layer.
    inner = gzip.compress(b"inner")
    assert decompress(codec, inner, len(inner)) == inner
    for content in (b"", b"\x1f", lines(100_000)):
        assert filled(codec, content, len(content)) == content
    with pytest.raises(CorruptFragment):
        decompress(codec, gzip.compress(b"some content")[:-1], len(b"some content"))


def test_a_compressor_is_for_one_fragment() -> None:
    compressor = Compressor(Codec.GZIP)
    compressor.finish()
    with pytest.raises(ValueError, match="make a new one"):
        compressor.write(b"x")
    with pytest.raises(ValueError, match="make a new one"):
        compressor.finish()


def test_content_may_be_a_memoryview() -> None:
    content = memoryview(bytearray(b"hello" * 100))
    for codec in Codec:
        assert decompress(codec, memoryview(compress(codec, content)), len(content)) == bytes(content)
