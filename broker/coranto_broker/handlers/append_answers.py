"""Responses of appends that commit at once, encoded with little more work than their own fields take."""

from __future__ import annotations

import weakref

from coranto.fragments import sum_words
from coranto.wire import protocol_pb2 as pb
from coranto_broker.at_once import Committed
from coranto_broker.resolver import Resolution


class Answers:
    """Encodes responses, each with the same message: from one to the next little changes.

    Headers, which are most of a response, are encoded once for each resolution. Encoded messages that follow one
    another are one message with the fields of both.
    """

    def __init__(self) -> None:
        self._headers: dict[str, tuple[weakref.ref[Resolution], bytes]] = {}
        self._message = pb.AppendResponse(commit=pb.Fragment(sum=pb.SHA1Sum()))
        self._commit = self._message.commit
        self._sum = self._commit.sum
        self._registers: pb.LabelSet | None = None

    def encode(self, committed: Committed) -> bytes:
        """The response to an append that has committed."""
        commit, digest, fragment, registers = self._commit, self._sum, committed.fragment, committed.registers
        commit.journal = fragment.journal
        commit.begin, commit.end = committed.begin, fragment.end
        commit.compression_codec = int(fragment.codec)  # type: ignore[assignment]
        digest.part1, digest.part2, digest.part3 = sum_words(committed.sum)
        if registers is not self._registers:  # Nobody modifies them in place.
            self._message.registers.CopyFrom(registers)
            self._registers = registers
        self._message.total_chunks = committed.chunks
        found = self._headers.get(fragment.journal)
        if found is None or found[0]() is not committed.resolution:
            found = self._encode_header(fragment.journal, committed.resolution)
        return found[1] + self._message.SerializeToString()

    def _encode_header(self, journal: str, resolution: Resolution) -> tuple[weakref.ref[Resolution], bytes]:
        # A resolution knows the whole key space as it was then.
        encoded = pb.AppendResponse(header=resolution.header).SerializeToString()
        found = self._headers[journal] = weakref.ref(resolution), encoded
        return found
