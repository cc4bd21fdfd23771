"""What is sent by a segment's writer while all is well, and what keeps it from being sent."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.client.appender import Appender
from coranto.client.dispatch import Way
from coranto.errors import CommitUnknown, Outcome, WriteError, WriterClosed
from coranto.specs import validate
from coranto.streams import JsonEvents, StreamWriter
from coranto.streams.registers import Advances, Entry, advance
from coranto.testing.stream_world import STREAM, stream_world

LABEL = "coranto.dev/writer-010203040506"
NUMBERS = st.integers(0, (1 << 63) - 1)
ENTRIES = st.builds(Entry, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)


class Fragile(JsonEvents):
    """Cannot stamp events that say so."""

    def stamp(self, encoded: bytes, uuid: UUID) -> bytes:
        if b"fragile" in encoded:
            raise ValueError("broken")
        return super().stamp(encoded, uuid)


async def test_what_cannot_be_stamped_is_not_applied_and_the_writer_goes_on() -> None:
    async with stream_world() as world, StreamWriter(world.client, STREAM, format=Fragile()) as writer:
        await writer.write_event("key", {"n": 0})
        for _ in range(2):
            failing = writer.write_events("key", [{"n": 1}, {"fragile": True}])
            with pytest.raises(WriteError, match=r"could not stamp what goes to .*broken") as caught:
                await failing
            assert caught.value.outcome is Outcome.NOT_APPLIED
            assert writer.pending_bytes == 0
            await writer.write_events("key", [{"n": 2}])
        assert [each.message["n"] for each in await world.messages() if "n" in each.message] == [0, 2, 2]


async def test_a_writer_that_is_cancelled_at_once_leaves_no_call_open(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    open_call = Appender._open

    def opened(append: Appender, way: Way) -> Any:
        calls.append(open_call(append, way))
        return calls[-1]

    async with stream_world() as world:
        writer = StreamWriter[Any](world.client, STREAM)
        await writer.open()
        await writer.write_events("key", [{"n": 0}])
        monkeypatch.setattr(Appender, "_open", opened)
        begun = writer.write_events("key", [{"n": 1}])
        assert [call.done() for call in calls] == [False]  # It is opened, and nothing was sent yet.
        await writer._ready_routing.route(writer.place("key")).cancel(WriterClosed("in the same turn of the loop"))
        with pytest.raises(CommitUnknown):
            await begun
        assert [call.done() for call in calls] == [True]
        await writer.close()
        assert [each.message["n"] for each in await world.messages() if "n" in each.message] == [0]


@given(ENTRIES, ENTRIES)
def test_the_parameters_of_appends_are_those_of_an_advance(before: Entry, after: Entry) -> None:
    advances = Advances("some/journal", LABEL)
    for first, second in ((before, after), (after, before)):  # Nothing is left of the one before.
        found = advances.parameters(first.encode(), second.encode())
        assert found == advance(LABEL, first.encode(), second.encode()).parameters("some/journal")
        validate(found)
