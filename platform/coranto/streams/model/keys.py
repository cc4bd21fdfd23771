"""Routing keys: the hash of a key, which is its position in the key space, and ranges of the key space.

The key space is the integers [0, 2**52). A key's hash is computed as in Pravega: MurmurHash3 (x64, 128 bits) hashes
the key's UTF-16 code units in little-endian order; of the lower 64 bits of the hash, the upper 52 are kept. Divided by
2**52, this is the fraction in [0, 1) that Pravega routes by, so both route the same keys the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

from coranto.errors import InvalidInput

KEY_BITS: Final = 52
KEY_SPACE: Final = 1 << KEY_BITS
"""The end of the key space (exclusive)."""

SEED: Final = 1741865571  # Java's hash of the string "EventRouter".
_MASK: Final = (1 << 64) - 1
_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F
_MANY_KEYS: Final = 200
"""With this many keys or more, numpy is faster, not counting its import."""


def key_hash(key: str) -> int:
    """Return the key's hash in [0, 2**52). Any text is a key, even empty text and text that is not valid Unicode."""
    data = key.encode("utf-16-le", "surrogatepass")
    size = len(data)
    h1 = h2 = SEED
    whole = size & ~15
    for at in range(0, whole, 16):
        h1 ^= mix1(int.from_bytes(data[at : at + 8], "little"))
        h1 = ((rotate(h1, 27) + h2) * 5 + 0x52DCE729) & _MASK
        h2 ^= mix2(int.from_bytes(data[at + 8 : at + 16], "little"))
        h2 = ((rotate(h2, 31) + h1) * 5 + 0x38495AB5) & _MASK
    # The tail is treated like a block padded with zeros, but it is only mixed in: the rotate and multiply are left out.
    h2 ^= mix2(int.from_bytes(data[whole + 8 :], "little"))
    h1 ^= mix1(int.from_bytes(data[whole : whole + 8], "little"))
    h1 ^= size
    h2 ^= size
    h1 = (h1 + h2) & _MASK
    h2 = (h2 + h1) & _MASK
    found: int = ((final_mix(h1) + final_mix(h2)) & _MASK) >> (64 - KEY_BITS)
    return found


def key_hashes(keys: Collection[str]) -> Mapping[str, int]:
    """Return the hashes of keys, by key. Large sets are computed with numpy if it is installed."""
    different = list(dict.fromkeys(keys))
    if len(different) >= _MANY_KEYS:
        with contextlib.suppress(ModuleNotFoundError):
            from coranto.streams.model.columnar_keys import text_hashes

            return dict(zip(different, text_hashes(different).tolist(), strict=True))
    return {key: key_hash(key) for key in different}


# The next functions take numbers, or arrays of unsigned 64-bit numbers (`columnar_keys.py`).


def rotate(value: Any, by: int) -> Any:
    return (value << by | value >> (64 - by)) & _MASK


def mix1(block: Any) -> Any:
    return rotate(block * _C1 & _MASK, 31) * _C2 & _MASK


def mix2(block: Any) -> Any:
    return rotate(block * _C2 & _MASK, 33) * _C1 & _MASK


def final_mix(value: Any) -> Any:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """A non-empty range [begin, end) of hashes in the key space."""

    begin: int
    end: int

    FULL: ClassVar[KeyRange]
    """The whole key space."""

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= KEY_SPACE:
            raise InvalidInput(f"[{self.begin:#x}, {self.end:#x}) is not a range of keys within [0, {KEY_SPACE:#x})")

    def __contains__(self, key_hash: object) -> bool:
        return isinstance(key_hash, int) and self.begin <= key_hash < self.end

    def contains(self, key_hash: int) -> bool:
        """Return True if a key's hash is in the range."""
        return self.begin <= key_hash < self.end

    def overlaps(self, other: KeyRange) -> bool:
        return self.begin < other.end and other.begin < self.end

    @property
    def width(self) -> int:
        return self.end - self.begin

    @property
    def share(self) -> float:
        """The range's fraction of the key space, above 0 and at most 1."""
        return self.width / KEY_SPACE

    def split(self, parts: int) -> tuple[KeyRange, ...]:
        """Split into `parts` adjacent ranges whose widths differ by at most 1. Raises InvalidInput."""
        if not 1 <= parts <= self.width:
            raise InvalidInput(f"{self} cannot be split into {parts} parts; ask for 1 to {self.width}")
        edges = [self.begin + self.width * part // parts for part in range(parts + 1)]
        return tuple(map(KeyRange, edges, edges[1:]))

    @staticmethod
    def merge(ranges: Iterable[KeyRange]) -> KeyRange:
        """Join adjacent ranges, given in any order, into one. Raises InvalidInput if they are not adjacent."""
        ordered = sorted(ranges)
        if not ordered:
            raise InvalidInput("cannot merge no ranges; give at least one")
        for left, right in pairwise(ordered):
            if left.end != right.begin:
                raise InvalidInput(f"the ranges {left} and {right} are not adjacent, so they cannot be merged")
        return KeyRange(ordered[0].begin, ordered[-1].end)

    def __str__(self) -> str:
        return f"[{self.begin / KEY_SPACE:.6g}, {self.end / KEY_SPACE:.6g})"


KeyRange.FULL = KeyRange(0, KEY_SPACE)
