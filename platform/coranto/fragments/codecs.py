"""Compression of a fragment's content, and decompression of untrusted files.

A file is a concatenation of independent pieces of at least `BATCH_BYTES` of content (gzip members, zstd frames, snappy
framing-format chunks), so that a fragment can be compressed while it still grows. Only the offload codec writes a
single gzip stream, as object stores expect for `Content-Encoding: gzip`.

Readers know the length of a fragment's content from its name. Decompression never produces more, even if the file has
more. Any other length raises `CorruptFragment`.
"""

from __future__ import annotations

import mmap
import zlib
from typing import Any, Final

import cramjam

from coranto.errors import CorruptFragment
from coranto.fragments.fragment import Codec

BATCH_BYTES: Final = 1 << 20
"""The minimum number of content bytes that are compressed together."""

_GZIP_LEVEL = 4  # Within 1 % of level 6 on JSON, and a fifth cheaper.
_ZSTD_LEVEL = 3
_GZIP_WBITS = 31
_GZIP_MAGIC = b"\x1f\x8b"
_SNAPPY_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
_SPARE_BYTES: Final = 1 << 20
_OUTPUT_BYTES = 1 << 20  # The size of pieces when plain content is copied.

# Maximum bytes of content per byte of file: deflate 1032, snappy 64 bytes in 3, zstd a 128 KiB block in 4.
# A name that claims more than the file can hold is refused before memory is allocated for the content.
_MAX_RATIO = {
    Codec.NONE: 1,
    Codec.GZIP: 1_032,
    Codec.GZIP_OFFLOAD_DECOMPRESSION: 1_032,
    Codec.SNAPPY: 64,
    Codec.ZSTANDARD: 43_691,
}

Readable = bytes | bytearray | memoryview


class Compressor:
    """Compresses the content of one fragment, given in pieces of any size."""

    def __init__(self, codec: Codec, *, batch_bytes: int = BATCH_BYTES) -> None:
        self.codec = codec
        self._batch_bytes = batch_bytes
        self._pending = bytearray()
        self._begun = False
        self._finished = False
        offload = codec is Codec.GZIP_OFFLOAD_DECOMPRESSION
        self._stream = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WBITS) if offload else None

    def write(self, content: Readable) -> bytes:
        """Add content, and return the bytes that are ready to be stored (often none)."""
        self._check_open()
        if self.codec is Codec.NONE:
            return bytes(content)
        if self._stream is not None:
            return self._stream.compress(content)
        self._pending += content
        return self._batch() if len(self._pending) >= self._batch_bytes else b""

    def finish(self) -> bytes:
        """Return the remaining bytes to be stored. The compressor cannot be used afterwards.

        Empty content also becomes a valid file of the codec.
        """
        self._check_open()
        self._finished = True
        if self.codec is Codec.NONE:
            return b""
        if self._stream is not None:
            return self._stream.flush()
        return self._batch() if self._pending or not self._begun else b""

    def _batch(self) -> bytes:
        content, self._pending = self._pending, bytearray()
        first, self._begun = not self._begun, True
        if self.codec is Codec.GZIP:
            return bytes(cramjam.gzip.compress(content, level=_GZIP_LEVEL))
        if self.codec is Codec.ZSTANDARD:
            return bytes(cramjam.zstd.compress(content, level=_ZSTD_LEVEL))
        chunks = bytes(cramjam.snappy.compress(content)) or _SNAPPY_IDENTIFIER
        return chunks if first else chunks.removeprefix(_SNAPPY_IDENTIFIER)

    def _check_open(self) -> None:
        if self._finished:
            raise ValueError("this Compressor has finished; make a new one for each fragment")


def compress(codec: Codec, content: Readable) -> bytes:
    """Return the complete file of a fragment with this content."""
    compressor = Compressor(codec)
    return compressor.write(content) + compressor.finish()


def decompress(codec: Codec, data: Readable, expected_length: int) -> bytes:
    """Return the content of a fragment's file. It must have exactly `expected_length` bytes.

    A file of the offload codec may arrive as stored, or already decompressed by the store; both are accepted. Raises
    CorruptFragment when the file is damaged, or its content is shorter or longer. Never produces more than
    `expected_length` bytes. The sum is not checked here.
    """
    if codec is Codec.GZIP_OFFLOAD_DECOMPRESSION:
        if bytes(data[:2]) == _GZIP_MAGIC:
            try:
                return decompress(Codec.GZIP, data, expected_length)
            except CorruptFragment:
                if len(data) != expected_length:
                    raise
        codec = Codec.NONE
    if codec is Codec.NONE:
        _check_length(len(data), expected_length)
        return bytes(data)
    check_plausible(codec, len(data), expected_length)
    if not data:
        return b""
    output = bytearray(expected_length)
    _decompress_into(codec, data, output)
    return bytes(output)


def max_file_bytes(length: int) -> int:
    """Return the largest size in bytes of a file with `length` bytes of content, for any codec.

    Compression may lengthen content slightly. A much longer file is not the fragment's.
    """
    return length + (length >> 4) + _SPARE_BYTES


def check_file_length(length: int, file_length: int) -> None:
    """Raise CorruptFragment when a file is far longer than the `length` of its fragment."""
    if file_length > max_file_bytes(length):
        raise CorruptFragment("its file is far longer than its content. Restore it from a copy, or remove it.")


def check_plausible(codec: Codec, file_length: int, expected_length: int) -> None:
    """Raise CorruptFragment when a file of `file_length` bytes can never hold `expected_length` bytes of content."""
    if expected_length > file_length * _MAX_RATIO[codec]:
        raise CorruptFragment(
            f"{file_length} bytes of {codec.name} cannot hold the {expected_length} bytes of content that the name says"
        )


def can_hold(codec: Codec, file_length: int, expected_length: int) -> bool:
    """Return True if a file of that length can hold exactly `expected_length` bytes, judged by its length alone."""
    if codec is Codec.NONE:
        return file_length == expected_length
    if not file_length:
        return False
    return expected_length <= file_length * _MAX_RATIO[codec] and file_length <= max_file_bytes(expected_length)


def decompress_into(codec: Codec, data: Readable | mmap.mmap, output: bytearray | mmap.mmap) -> None:
    """Decompress content that must fill `output`, like `decompress`. Both may be mapped files, to save memory."""
    if codec is Codec.GZIP_OFFLOAD_DECOMPRESSION:
        if bytes(data[:2]) == _GZIP_MAGIC:
            try:
                decompress_into(Codec.GZIP, data, output)
            except CorruptFragment:
                if len(data) != len(output):
                    raise
            else:
                return
        codec = Codec.NONE
    if codec is Codec.NONE:
        _check_length(len(data), len(output))
        for start in range(0, len(data), _OUTPUT_BYTES):
            output[start : start + _OUTPUT_BYTES] = data[start : start + _OUTPUT_BYTES]
        return
    _decompress_into(codec, data, output)


def _decompress_into(codec: Codec, data: Readable | mmap.mmap, output: bytearray | mmap.mmap) -> None:
    module: Any = {Codec.GZIP: cramjam.gzip, Codec.ZSTANDARD: cramjam.zstd, Codec.SNAPPY: cramjam.snappy}[codec]
    try:
        length = module.decompress_into(data, output)
    except cramjam.DecompressionError as err:
        if "write whole buffer" in str(err):
            raise CorruptFragment(f"{codec.name} content is longer than the {len(output)} bytes expected") from err
        raise CorruptFragment(f"{codec.name} content cannot be decompressed: {err}") from err
    _check_length(length, len(output))


def _check_length(length: int, expected: int) -> None:
    if length != expected:
        raise CorruptFragment(f"content has {length} bytes where its name says {expected}")
