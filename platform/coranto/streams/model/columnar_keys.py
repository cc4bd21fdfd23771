"""Vectorized `keys.key_hash`, for columns of routing keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coranto.messages.arrow_values import data_of, value_offsets
from coranto.messages.columnar import Bytes, Int64s, UInt64s
from coranto.streams.model.keys import KEY_BITS, SEED, final_mix, key_hash, mix1, mix2, rotate

_BLOCK: Final = 8
"""Characters in a block of MurmurHash3: sixteen bytes of UTF-16."""
_FEW_BLOCKS: Final = 16


def key_hashes(keys: Any) -> UInt64s:
    """Return the hash of each key in an Arrow string array without nulls."""
    import pyarrow as pa

    values = keys.cast(pa.binary())
    return _hashes(data_of(values), value_offsets(values).astype(np.int64), lambda row: str(keys[row].as_py()))


def text_hashes(keys: Sequence[str]) -> UInt64s:
    """Return the hash of each key."""
    encoded = [key.encode("utf-8", "surrogatepass") for key in keys]
    ends = np.zeros(len(keys) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(keys)), out=ends[1:])
    return _hashes(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends, keys.__getitem__)


def _hashes(characters: Bytes, ends: Int64s, key_at: Callable[[int], str]) -> UInt64s:
    """Return the hashes of UTF-8 keys. `ends` is the begin of the first key, followed by the end of each key."""
    lengths = np.diff(ends)
    others = _with_non_ascii(characters, ends) | (lengths >= _FEW_BLOCKS * _BLOCK)
    found: UInt64s = np.zeros(len(lengths), dtype=np.uint64)
    # In UTF-16 (little-endian), an ASCII character is its byte and a zero byte.
    for blocks in np.unique(lengths[~others] // _BLOCK).tolist():
        rows = np.flatnonzero(~others & (lengths // _BLOCK == blocks))
        found[rows] = _hashed(characters, ends[rows], lengths[rows], blocks)
    for row in np.flatnonzero(others).tolist():
        found[row] = key_hash(key_at(row))
    return found


def _with_non_ascii(characters: Bytes, ends: Int64s) -> NDArray[np.bool_]:
    """Return the mask of keys with non-ASCII characters."""
    at = np.flatnonzero(characters[ends[0] : ends[-1]] >= 0x80) + ends[0]
    mask = np.zeros(len(ends) - 1, dtype=np.bool_)
    mask[np.searchsorted(ends, at, side="right") - 1] = True
    return mask


def _hashed(characters: Bytes, begins: Int64s, lengths: Int64s, blocks: int) -> UInt64s:
    """Return the hashes of ASCII keys that consist of `blocks` whole blocks and a partial block."""
    width = (blocks + 1) * _BLOCK
    at = np.arange(width)
    inside = at < lengths[:, None]
    units = np.zeros((len(begins), width), dtype="<u2")
    units[inside] = characters[(begins[:, None] + at)[inside]]
    words = units.view("<u8").astype(np.uint64)
    h1 = np.full(len(begins), SEED, dtype=np.uint64)
    h2 = h1.copy()
    for block in range(blocks):
        h1 = h1 ^ mix1(words[:, 2 * block])
        h1 = (rotate(h1, 27) + h2) * 5 + 0x52DCE729
        h2 = h2 ^ mix2(words[:, 2 * block + 1])
        h2 = (rotate(h2, 31) + h1) * 5 + 0x38495AB5
    sizes = (2 * lengths).astype(np.uint64)
    h1 = h1 ^ mix1(words[:, 2 * blocks]) ^ sizes
    h2 = h2 ^ mix2(words[:, 2 * blocks + 1]) ^ sizes
    h1 = h1 + h2
    h2 = h2 + h1
    found: UInt64s = (final_mix(h1) + final_mix(h2)) >> (64 - KEY_BITS)
    return found
