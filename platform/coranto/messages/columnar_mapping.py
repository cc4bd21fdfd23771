"""Mapping of whole columns of keys to journals, as `mapping.py` maps them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from coranto.errors import InvalidInput
from coranto.messages.arrow_values import data_of, value_offsets
from coranto.messages.columnar import Int64s
from coranto.messages.mapping import fnv1a32

_BASIS: Final = np.uint32(0x811C9DC5)
_PRIME: Final = np.uint32(0x01000193)


def mapped(keys: Any, journals: Sequence[str], mapping: Literal["rendezvous", "modulo"]) -> Int64s:
    """Return for each key, of an Arrow binary array without nulls, the index of its journal."""
    if not journals:
        raise InvalidInput("no journal to map to: list the journals again, or create one")
    hashed = fnv1a32_column(keys)
    if mapping == "modulo":
        return (hashed % np.uint32(len(journals))).astype(np.int64)
    best = np.zeros(len(hashed), dtype=np.uint32)
    chosen: Int64s = np.zeros(len(hashed), dtype=np.int64)
    for number, name in enumerate(journals):
        weight = hashed ^ np.uint32(fnv1a32(name.encode()))
        better = weight > best
        best[better], chosen[better] = weight[better], number
    return chosen


def fnv1a32_column(values: Any) -> NDArray[np.uint32]:
    """Return `fnv1a32` of each value of an Arrow binary array."""
    ends, characters = value_offsets(values).astype(np.int64), data_of(values)
    begins, lengths = ends[:-1], np.diff(ends)
    hashed = np.full(len(values), _BASIS, dtype=np.uint32)
    order = np.argsort(-lengths, kind="stable")
    # Longest first, so that the values with a character at position `at` are always the first rows.
    begins, lengths, found = begins[order], lengths[order], hashed[order]
    for at in range(int(lengths[0]) if len(lengths) else 0):
        rows = int(np.searchsorted(-lengths, -at, side="left"))
        found[:rows] = (found[:rows] ^ characters[begins[:rows] + at]) * _PRIME
    hashed[order] = found
    return hashed
