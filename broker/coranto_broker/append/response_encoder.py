"""The encoder of responses to appends, with cached headers."""

from __future__ import annotations

import weakref
from functools import lru_cache, partial

from coranto.fragments.fragment import sum_words
from coranto.specs.durability import Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.queued_append import AppendOutcome
from coranto_broker.replication.resolver import Resolution


@lru_cache(maxsize=64)
def _encoded(durability: Durability, stored_end: int) -> bytes:
    wire = pb.Durability(
        replicas=durability.replicas,
        zones=durability.zones,
        synced_replicas=durability.synced_replicas,
        synced_zones=durability.synced_zones,
        stored_end=stored_end,
    )
    return pb.AppendResponse(durability=wire).SerializeToString()


class AppendResponseEncoder:
    """Encodes responses to appends.

    The header is most of a response, and is encoded once for each resolution. In protobuf, the concatenation of two
    encoded messages is one message with the fields of both.
    """

    def __init__(self) -> None:
        self._headers: dict[str, tuple[weakref.ref[Resolution], bytes]] = {}

    def encode(self, outcome: AppendOutcome) -> bytes:
        """Return the encoded response to a committed or refused append."""
        # A new message each time, because a reused one keeps memory of earlier values.
        response, resolution, fragment = pb.AppendResponse(), outcome.resolution, outcome.fragment
        if fragment is None:
            response.status = outcome.status
            response.header.CopyFrom(resolution.header)
            if outcome.status == pb.REGISTER_MISMATCH:
                response.registers.CopyFrom(outcome.registers)
            response.store_health_error = outcome.reason
            return response.SerializeToString()
        commit = response.commit
        digest = commit.sum
        commit.journal = fragment.journal
        commit.begin, commit.end = outcome.begin, outcome.end
        commit.compression_codec = int(fragment.codec)  # type: ignore[assignment]
        digest.part1, digest.part2, digest.part3 = sum_words(outcome.sum)
        response.registers.CopyFrom(outcome.registers)
        response.total_chunks = outcome.total_chunks
        if outcome.delayed_chunks:
            response.delayed_chunks = outcome.delayed_chunks
        found = self._headers.get(fragment.journal)
        if found is None or found[0]() is not resolution:
            found = self._encode_header(fragment.journal, resolution)
        return found[1] + response.SerializeToString() + _encoded(outcome.durability, outcome.stored_end)

    def _encode_header(self, journal: str, resolution: Resolution) -> tuple[weakref.ref[Resolution], bytes]:
        # A weak reference, because a resolution refers to the key space of its time.
        encoded = pb.AppendResponse(header=resolution.header).SerializeToString()
        found = self._headers[journal] = weakref.ref(resolution, partial(self._forget, journal)), encoded
        return found

    def _forget(self, journal: str, resolution: weakref.ref[Resolution]) -> None:
        """Drop the header of a resolution that was collected."""
        found = self._headers.get(journal)
        if found is not None and found[0] is resolution:
            del self._headers[journal]
