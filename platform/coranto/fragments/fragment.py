"""Fragments: named, checksummed spans of a journal's content.

A fragment covers offsets [begin, end). Its *content name* has everything that is needed to verify its file: both
offsets, the SHA-1 of the uncompressed content, and (as extension) the codec. Its *content path* has the journal's name,
and optionally a postfix such as `date=2013-01-01`, before the content name.
"""

from __future__ import annotations

import enum
import hashlib
import re
import struct
from dataclasses import dataclass, field
from typing import Final

from coranto.errors import InvalidInput
from coranto.names import MAX_JOURNAL_BYTES, validate_journal, validate_path
from coranto.wire import protocol_pb2 as pb

MAX_OFFSET: Final = 2**63 - 1
SHA1_BYTES: Final = 20
ZERO_SUM: Final = bytes(SHA1_BYTES)
"""The sum of a fragment without content: all zeros, not the SHA-1 of no bytes."""

_SUM = struct.Struct(">QQI")


class Codec(enum.IntEnum):
    """The compression of a fragment's file. Numbers are as on the wire, where 0 is invalid."""

    NONE = pb.NONE
    GZIP = pb.GZIP
    ZSTANDARD = pb.ZSTANDARD
    SNAPPY = pb.SNAPPY
    GZIP_OFFLOAD_DECOMPRESSION = pb.GZIP_OFFLOAD_DECOMPRESSION
    """Gzip stored with `Content-Encoding: gzip`, which the object store undoes on reading."""

    @property
    def extension(self) -> str:
        """The file name extension for writing, with its dot; empty for the offload codec."""
        return _EXTENSIONS[self]

    @classmethod
    def from_wire(cls, value: int) -> Codec:
        """Return the codec of a wire number. Raises InvalidInput for 0 and for unknown numbers."""
        try:
            return cls(value)
        except ValueError as err:
            raise InvalidInput(f"{value} is not a codec; use one of {_CODEC_NAMES}", field="compression_codec") from err

    @classmethod
    def from_extension(cls, extension: str) -> Codec:
        """Return the codec of a file name extension (with its dot, in upper or lower case). Raises InvalidInput."""
        try:
            return _BY_EXTENSION[extension.lower()]
        except KeyError:
            known = " ".join(name for name in _BY_EXTENSION if name)
            raise InvalidInput(
                f"{extension!r} is not a codec's extension; known are {known}", field="extension"
            ) from None


_CODEC_NAMES = ", ".join(f"{codec.name} ({codec.value})" for codec in Codec)
_EXTENSIONS = {
    Codec.NONE: ".raw",
    Codec.GZIP: ".gz",
    Codec.ZSTANDARD: ".zst",
    Codec.SNAPPY: ".sz",
    Codec.GZIP_OFFLOAD_DECOMPRESSION: "",
}
_BY_EXTENSION = {
    ".raw": Codec.NONE,
    ".gz": Codec.GZIP,
    ".gzip": Codec.GZIP,
    ".zst": Codec.ZSTANDARD,
    ".zstandard": Codec.ZSTANDARD,
    ".sz": Codec.SNAPPY,
    ".snappy": Codec.SNAPPY,
    "": Codec.GZIP_OFFLOAD_DECOMPRESSION,
    ".gzod": Codec.GZIP_OFFLOAD_DECOMPRESSION,
}


@dataclass(frozen=True, slots=True)
class Fragment:
    """The content [begin, end) of a journal.

    `sum` is the SHA-1 digest (20 bytes) of the uncompressed content; all zeros when begin == end.
    `backing_store` is the URL of the store that holds the fragment; empty while it is local to a broker.
    `mod_time` is the time when the store received it, in Unix seconds; 0 while local.
    `path_postfix` is between the journal's name and the content name in the store.
    `file_bytes` is the length of its file if a store has listed it, else None. Comparison ignores it.
    """

    journal: str
    begin: int
    end: int
    sum: bytes
    codec: Codec
    backing_store: str = ""
    mod_time: int = 0
    path_postfix: str = ""
    file_bytes: int | None = field(default=None, compare=False)

    @property
    def length(self) -> int:
        """The number of bytes of uncompressed content."""
        return self.end - self.begin

    @property
    def content_name(self) -> str:
        """The file name: both offsets in 16 hexadecimal digits, the sum in 40, and the codec's extension."""
        return f"{self.begin:016x}-{self.end:016x}-{self.sum.hex()}{self.codec.extension}"

    @property
    def content_path(self) -> str:
        """The path below the store's prefix: journal, postfix and content name."""
        if self.path_postfix:
            return f"{self.journal}/{self.path_postfix}/{self.content_name}"
        return f"{self.journal}/{self.content_name}"

    def to_wire(self) -> pb.Fragment:
        wire = pb.Fragment()  # Passing the fields as arguments would take twice as long.
        self.fill(wire)
        return wire

    def fill(self, wire: pb.Fragment) -> None:
        """Set the fields of a new wire message."""
        wire.journal = self.journal
        wire.begin = self.begin
        wire.end = self.end
        digest = wire.sum
        digest.part1, digest.part2, digest.part3 = _SUM.unpack(self.sum)
        wire.compression_codec = self.codec.value
        if self.backing_store or self.mod_time or self.path_postfix:  # A broker's local fragments have none of them.
            wire.backing_store = self.backing_store
            wire.mod_time = self.mod_time
            wire.path_postfix = self.path_postfix

    def is_wire(self, wire: pb.Fragment) -> bool:
        """Return True if a wire message equals this fragment. The message may be invalid, and is not converted."""
        digest = wire.sum
        return (
            wire.end == self.end
            and wire.begin == self.begin
            and (digest.part1, digest.part2, digest.part3) == _SUM.unpack(self.sum)
            and wire.journal == self.journal
            and int(wire.compression_codec) == self.codec
            and wire.backing_store == self.backing_store
            and wire.mod_time == self.mod_time
            and wire.path_postfix == self.path_postfix
        )

    @classmethod
    def from_wire(cls, message: pb.Fragment) -> Fragment:
        """Return the fragment of a wire message. Raises InvalidInput with the invalid field."""
        validate_wire_fragment(message)
        return cls(
            journal=message.journal,
            begin=message.begin,
            end=message.end,
            sum=sum_from_wire(message.sum),
            codec=Codec.from_wire(message.compression_codec),
            backing_store=message.backing_store,
            mod_time=message.mod_time,
            path_postfix=message.path_postfix,
        )

    def validated(self) -> Fragment:
        """Return this fragment if it is well formed. Raises InvalidInput.

        The journal's name may carry metadata, because an append's commit has the name that the client used.
        """
        _validate_extent(self.journal, self.begin, self.end, self.path_postfix)
        if len(self.sum) != SHA1_BYTES:
            raise InvalidInput(f"a SHA-1 digest has 20 bytes, not {len(self.sum)}", field="sum")
        return self


def validate_wire_fragment(message: pb.Fragment) -> None:
    """Check a wire message, without the cost of making a `Fragment`. Raises InvalidInput with the invalid field."""
    Codec.from_wire(message.compression_codec)
    _validate_extent(message.journal, message.begin, message.end, message.path_postfix)


def _validate_extent(journal: str, begin: int, end: int, path_postfix: str) -> None:
    validate_journal(journal, allow_metadata=True)
    if not 0 <= begin <= end <= MAX_OFFSET:
        raise InvalidInput(f"[{begin}, {end}) is not 0 <= begin <= end <= 2^63-1", field="begin")
    if path_postfix:
        validate_path("path_postfix", path_postfix, 1, MAX_JOURNAL_BYTES)


_HEX_OFFSET = re.compile(r"[0-9a-fA-F]{1,16}")
_HEX_SUM = re.compile(r"[0-9a-fA-F]{40}")


def parse_content_path(
    journal: str, path: str, *, backing_store: str = "", mod_time: int = 0, file_bytes: int | None = None
) -> Fragment:
    """Return the fragment whose file is at `path` below its journal's folder: `[postfix/]content-name`.

    Raises InvalidInput when the file name is not a fragment's.
    """
    postfix, _, name = path.rpartition("/")
    stem, dot, extension = name.partition(".")
    fields = stem.split("-")
    if len(fields) != 3:
        raise InvalidInput(f"{path!r} is not <begin>-<end>-<sha1>.<extension>", field="content name")
    begin, end, digest = fields
    for kind, text in (("begin", begin), ("end", end)):
        if _HEX_OFFSET.fullmatch(text) is None:
            raise InvalidInput(f"{text!r} of {path!r} is not a hexadecimal offset", field=kind)
    if _HEX_SUM.fullmatch(digest) is None:
        raise InvalidInput(f"{digest!r} of {path!r} is not a SHA-1 sum of 40 hexadecimal digits", field="sum")
    return Fragment(
        journal=journal,
        begin=int(begin, 16),
        end=int(end, 16),
        sum=bytes.fromhex(digest),
        codec=Codec.from_extension(dot + extension),
        backing_store=backing_store,
        mod_time=mod_time,
        path_postfix=postfix,
        file_bytes=file_bytes,
    ).validated()


def sum_of(content: bytes) -> bytes:
    """Return the sum of a fragment with this content: its SHA-1 digest, or ZERO_SUM when it is empty."""
    return hashlib.sha1(content, usedforsecurity=False).digest() if content else ZERO_SUM


def sum_words(digest: bytes) -> tuple[int, int, int]:
    """Return the three big-endian words of a 20-byte digest, as on the wire."""
    part1, part2, part3 = _SUM.unpack(digest)
    return part1, part2, part3


def sum_from_wire(message: pb.SHA1Sum) -> bytes:
    """Return the 20-byte digest of a wire message."""
    return _SUM.pack(message.part1, message.part2, message.part3)
