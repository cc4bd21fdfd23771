"""What segments before say of a writer, where brokers that had their registers are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from coranto.client.values import AppendResult
from coranto.streams.keys import KeyRange
from coranto.streams.lineage import Lineage
from coranto.streams.model import HELD_LABEL, Segment, Stream
from coranto.streams.registers import Entry, Identity, stable_producer
from coranto.streams.routing import Routing
from coranto.wire import protocol_pb2 as pb

IDENTITY = Identity("w", stable_producer("w"), 1, True)
HALVES = KeyRange.FULL.split(2)


async def lineage_of(registers: pb.LabelSet, *, sealed_at: int | None, stored: int) -> Lineage:
    """Of the first successor of a segment whose broker, new to it, has these registers and no content of its own."""

    async def barrier(*_: Any) -> AppendResult:
        return AppendResult("a/journal", 0, 0, bytes(20), registers, pb.Header())

    async def head(_: str) -> int:
        return stored

    predecessor = Segment(0, 0, "s/segment/00000000", KeyRange.FULL, sealing=True, sealed_at=sealed_at)
    successors = [Segment(n + 1, 1, f"s/segment/0000000{n + 1}", HALVES[n], frozenset({0})) for n in range(2)]
    stream = Stream("s", {segment.number: segment for segment in [predecessor, *successors]})
    shared = SimpleNamespace(identity=IDENTITY, barrier=barrier, client=SimpleNamespace(head=head))
    writer = SimpleNamespace(segment=successors[0])
    return await Routing(cast(Any, shared), "s", stream).lineage(cast(Any, writer), has_entry=False)


@pytest.mark.parametrize(
    ("sealed_at", "stored", "forgot"), [(100, 0, True), (None, 100, True), (0, 0, False), (None, 0, False)]
)
async def test_registers_are_lost_where_there_is_content_whatever_a_new_broker_has_of_it(
    sealed_at: int | None, stored: int, forgot: bool
) -> None:
    found = await lineage_of(pb.LabelSet(), sealed_at=sealed_at, stored=stored)
    assert found.forgot is forgot
    assert found.sequence_of(0) == -1


async def test_registers_that_are_there_tell() -> None:
    labels = [(HELD_LABEL, "1"), (IDENTITY.label, Entry(1, 7, 20, 0, 0).encode())]
    held = pb.LabelSet(labels=[pb.Label(name=name, value=value) for name, value in sorted(labels)])
    found = await lineage_of(held, sealed_at=100, stored=0)
    assert not found.forgot
    assert found.sequence_of(0) == 7
