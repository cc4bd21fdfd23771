"""A digest of rows that does not depend on their order, nor on how they are divided among tasks and batches.

It identifies the content of a query's batch, whose number alone does not: the sum of the mixed checksums of messages
without their UUIDs, which differ in each attempt. It finds accidental differences, not constructed ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from coranto.messages.columnar import UInt64s
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import ProducerId

_UUID: Final = 36
_NODE: Final = 24
"""The place of the producer in the text of a UUID."""
_ALL: Final = 1 << 64


class RowDigest:
    """The digest of the messages that were added."""

    def __init__(self, messages: int = 0, total: int = 0) -> None:
        self.messages = messages
        self.total = total

    def add(self, lines: Any, framing: JsonLines, producer: ProducerId) -> None:
        """Add an Arrow binary array of lines with UUIDs of a producer."""
        if not len(lines):
            return
        _, borders, data = lines.buffers()
        ends = np.frombuffer(borders, dtype=np.int32)[lines.offset : lines.offset + len(lines) + 1].astype(np.int64)
        behind = len(framing.uuid_prefix) + _UUID
        view, places = memoryview(data), ends.tolist()
        sums = [crc32(view[begin + behind : end]) for begin, end in pairwise(places)]
        for row in _elsewhere(np.frombuffer(data, dtype=np.uint8), ends[:-1] + behind, producer):
            uuid = re.compile(rb"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}" + producer.hex().encode())
            sums[row] = crc32(uuid.sub(b"", view[places[row] : places[row + 1]], count=1))
        self.messages += len(lines)
        self.total = (self.total + int(_mixed(np.array(sums, dtype=np.uint64)).sum())) % _ALL

    @classmethod
    def of(cls, parts: Iterable[RowDigest]) -> RowDigest:
        all_of_them = list(parts)
        return cls(sum(each.messages for each in all_of_them), sum(each.total for each in all_of_them) % _ALL)

    def __str__(self) -> str:
        return f"{self.messages}-{self.total:016x}"


def _elsewhere(content: NDArray[np.uint8], behind: NDArray[np.int64], producer: ProducerId) -> list[int]:
    """Return the lines that have their UUID not at their beginning, because their texts had a value where it comes."""
    node = np.frombuffer(producer.hex().encode(), dtype=np.uint8)
    places = (behind - (_UUID - _NODE))[:, None] + np.arange(len(node))
    return np.flatnonzero((content[np.minimum(places, len(content) - 1)] != node).any(axis=1)).tolist()


def _mixed(numbers: UInt64s) -> UInt64s:
    """Mix the bits of numbers (the finalizer of splitmix64), so that sums of different rows differ."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
