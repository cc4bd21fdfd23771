"""Writers that end at their first contact with a segment, while other writes wait for contact."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coranto.errors import WriterExpired
from coranto.streams import StreamWriter
from coranto.streams.model.registers import Registers
from coranto.streams.writer import segment_writer
from coranto.streams.writer.handshake import handshake
from coranto.streams.writer.shared import Shared
from tests.platform.streams.stream_world import STREAM, StreamWorld, stream_world


class SlowContact:
    """A delay of the answer to the first contact with a segment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, journal_end: str = "") -> None:
        self.answered, self.released = asyncio.Event(), asyncio.Event()
        self._journal_end = journal_end
        monkeypatch.setattr(segment_writer, "handshake", self._handshake)

    async def _handshake(self, shared: Shared, journal: str) -> tuple[Registers, int]:
        found = await handshake(shared, journal)
        if journal.endswith(self._journal_end) and not self.answered.is_set():
            self.answered.set()
            await self.released.wait()
        return found


async def forget(world: StreamWorld, key: str, writer_id: str) -> None:
    """Make the key's segment forget a writer, in a stream with one entry per segment."""
    async with StreamWriter[Any](world.client, STREAM, writer_id=writer_id) as writer:
        await writer.write_event(key, {"n": 0}, sequence=0)
    async with StreamWriter[Any](world.client, STREAM) as other:
        await other.write_event(key, {"n": 1})


async def test_an_expired_writer_confirms_nothing_from_writes_of_a_later_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stream_world(max_writers=1) as world:
        await forget(world, "key", "importer")
        contact = SlowContact(monkeypatch)
        async with StreamWriter[Any](world.client, STREAM, writer_id="importer") as writer:
            opening = asyncio.ensure_future(writer.transaction("key", sequence=1).__aenter__())
            await contact.answered.wait()
            event = writer.write_event("key", {"n": 2}, sequence=2)
            transaction = writer.write_events("key", [{"n": 3}], sequence=3)
            queried = asyncio.ensure_future(writer.last_sequence("key"))
            # The program continues without these calls.
            async with StreamWriter[Any](world.client, STREAM, writer_id="importer", fresh=True) as later:
                await later.write_event("key", {"n": 4}, sequence=4)
            contact.released.set()
            for each in (opening, event, transaction, queried):
                with pytest.raises(WriterExpired):
                    await each
        assert [each.message["n"] for each in await world.messages() if "n" in each.message] == [0, 1, 4]


async def test_a_writer_that_expired_in_one_segment_enters_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stream_world(segments=2, max_writers=1) as world:
        keys: dict[int, str] = {}
        writer = StreamWriter[Any](world.client, STREAM, writer_id="importer")
        for number in range(64):
            segment = (await world.streams.describe(STREAM)).segment_at(writer.key_hash(f"key {number}"))
            assert segment is not None
            keys.setdefault(segment.number, f"key {number}")
        await forget(world, keys[0], "importer")
        contact = SlowContact(monkeypatch, "00000001")
        async with writer:
            waiting = writer.write_event(keys[1], {"n": 2}, sequence=2)
            await contact.answered.wait()
            with pytest.raises(WriterExpired):
                await writer.write_event(keys[0], {"n": 3}, sequence=3)
            contact.released.set()
            with pytest.raises(WriterExpired):
                await waiting
        assert await world.messages(1) == []
