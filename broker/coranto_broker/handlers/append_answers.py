"""Encoding of responses to appends that commit at once, with little work beyond their own fields."""

from __future__ import annotations

import weakref
from functools import lru_cache, partial

from coranto.fragments.fragment import sum_words
from coranto.specs.durability import Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.fast_path import ALONE, CommittedAppend
from coranto_broker.replication.resolver import Resolution


@lru_cache(maxsize=64)
def wire_of(durability: Durability) -> pb.Durability:
    """Return the part of a response that tells an append's durability. Do not change it."""
    return pb.Durability(
        replicas=durability.replicas,
        zones=durability.zones,
        synced_replicas=durability.synced_replicas,
        synced_zones=durability.synced_zones,
    )


@lru_cache(maxsize=64)
def _encoded(durability: Durability) -> bytes:
    return pb.AppendResponse(durability=wire_of(durability)).SerializeToString()


_ENCODED_ALONE = _encoded(ALONE)


class Answers:
    """Encodes responses.

    The header is most of a response, and is encoded once for each resolution. In protobuf, two encoded messages one
    after the other are one message with the fields of both.
    """

    def __init__(self) -> None:
        self._headers: dict[str, tuple[weakref.ref[Resolution], bytes]] = {}

    def encode(self, committed: CommittedAppend) -> bytes:
        """Return the encoded response to an append that has committed."""
        # A new message each time: a reused one would keep the memory of all values that it ever had.
        response, fragment = pb.AppendResponse(), committed.fragment
        commit = response.commit
        digest = commit.sum
        commit.journal = fragment.journal
        commit.begin, commit.end = committed.begin, fragment.end
        commit.compression_codec = int(fragment.codec)  # type: ignore[assignment]
        digest.part1, digest.part2, digest.part3 = sum_words(committed.sum)
        response.registers.CopyFrom(committed.registers)
        response.total_chunks = committed.chunks
        found = self._headers.get(fragment.journal)
        if found is None or found[0]() is not committed.resolution:
            found = self._encode_header(fragment.journal, committed.resolution)
        survives = committed.durability
        told = _ENCODED_ALONE if survives is ALONE else _encoded(survives)
        return found[1] + response.SerializeToString() + told

    def _encode_header(self, journal: str, resolution: Resolution) -> tuple[weakref.ref[Resolution], bytes]:
        # Hold the resolution weakly: it refers to the whole key space of its time.
        encoded = pb.AppendResponse(header=resolution.header).SerializeToString()
        found = self._headers[journal] = weakref.ref(resolution, partial(self._forget, journal)), encoded
        return found

    def _forget(self, journal: str, resolution: weakref.ref[Resolution]) -> None:
        """Drop the header of a resolution that is gone."""
        found = self._headers.get(journal)
        if found is not None and found[0] is resolution:
            del self._headers[journal]
