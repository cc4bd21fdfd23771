"""Appends of a segment's writer without failures, and the conditions that delay them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace

from coranto.client.append.appender import Appender
from coranto.client.dispatch import ChosenConnection
from coranto.errors import CommitUnknown, IndexHasGreaterOffset, Outcome, WriteError, WriterClosed, WriterFenced
from coranto.labels import label_selector
from coranto.specs.validation import validate
from coranto.streams import JsonEvents, Split, StreamWriter
from coranto.streams.model.registers import Advances, WriterEntry, advance
from tests.platform.streams.stream_world import STREAM, CutPoint, stream_world
from tests.spans import recorded_spans

LABEL = "coranto.dev/writer-010203040506"
NUMBERS = st.integers(0, (1 << 63) - 1)
ENTRIES = st.builds(WriterEntry, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)


class Fragile(JsonEvents):
    """A format that fails to stamp events that contain `fragile`."""

    def stamp(self, encoded: bytes, uuid: UUID) -> bytes:
        if b"fragile" in encoded:
            raise ValueError("broken")
        return super().stamp(encoded, uuid)


async def test_events_that_cannot_be_stamped_are_not_applied_and_the_writer_continues() -> None:
    async with stream_world() as world, StreamWriter(world.client, STREAM, format=Fragile()) as writer:
        await writer.write_event("key", {"n": 0})
        for _ in range(2):
            failing = writer.write_events("key", [{"n": 1}, {"fragile": True}])
            with pytest.raises(WriteError, match=r"could not stamp content for .*broken") as caught:
                await failing
            assert caught.value.outcome is Outcome.NOT_APPLIED
            assert writer.pending_bytes == 0
            await writer.write_events("key", [{"n": 2}])
        assert [each.message["n"] for each in await world.messages() if "n" in each.message] == [0, 2, 2]


async def test_writes_are_traced_to_their_appends_without_content() -> None:
    with recorded_spans() as spans:
        async with stream_world() as world, StreamWriter(world.client, STREAM, format=Fragile()) as writer:
            with trace.get_tracer("user").start_as_current_span("user"):
                written = [await writer.write_event("key", {"n": n}) for n in range(2)]
                await asyncio.gather(*(writer.write_event("key", {"n": n}) for n in range(100)))
            with pytest.raises(WriteError):
                await writer.write_events("key", [{"fragile": True}])
    (user,) = spans.named("user")
    *done, failed = spans.named(f"publish {STREAM}")
    assert {span.parent.span_id for span in done} == {user.context.span_id}
    assert len(done) == 102
    assert [(span.attributes["coranto.begin"], span.attributes["coranto.end"]) for span in done[:2]] == [
        (each.begin, each.end) for each in written
    ]
    appends = [span for each in done for span in spans.within(each)]
    assert {span.name for span in appends} == {f"append {written[0].journal}"}
    assert 2 < len(appends) < 102, "events that wait together share an append, inside the first one's span"
    assert (failed.status.status_code.name, failed.status.description) == ("ERROR", "")
    (refused,) = spans.within(failed)
    assert refused.attributes["coranto.status"] == "rolled back"


async def test_cancelling_a_writer_immediately_leaves_no_open_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    open_call = Appender._open

    def opened(append: Appender, way: ChosenConnection) -> Any:
        calls.append(open_call(append, way))
        return calls[-1]

    async with stream_world(append_streams=False) as world:
        writer = StreamWriter[Any](world.client, STREAM)
        await writer.open()
        await writer.write_events("key", [{"n": 0}])
        monkeypatch.setattr(Appender, "_open", opened)
        begun = writer.write_events("key", [{"n": 1}])
        assert [call.done() for call in calls] == [False]  # The call is open, and nothing is sent yet.
        await writer._ready_routing.route(writer.key_hash("key")).cancel(WriterClosed("in the same turn of the loop"))
        with pytest.raises(CommitUnknown):
            await begun
        assert [call.done() for call in calls] == [True]
        await writer.close()
        assert [each.message["n"] for each in await world.messages() if "n" in each.message] == [0]


async def test_waiting_writes_fail_when_another_segment_fences_the_writer() -> None:
    async with stream_world() as world, StreamWriter[Any](world.client, STREAM, in_flight=1, batch_bytes=1) as writer:
        hear = world.wire.hear

        def fenced_before_the_answer(call: Any, to_server: bool, message: tuple[Any, ...]) -> bool:
            if not to_server and world.wire.contents and writer._ready.dead is None:
                writer._ready.dead = WriterFenced("another process writes in another segment")
            return hear(call, to_server, message)

        world.cluster._world.rpc.on_delivery = fenced_before_the_answer
        first, *rest = [writer.write_events("key", [{"n": n}]) for n in range(3)]
        async with asyncio.timeout(20):
            await first
            for each in rest:
                with pytest.raises(WriterFenced):
                    await each
        assert [each.message["n"] for each in await world.messages() if "n" in each.message] == [0]


@given(ENTRIES, ENTRIES)
def test_append_parameters_equal_an_advances_parameters(before: WriterEntry, after: WriterEntry) -> None:
    advances = Advances("some/journal", LABEL)
    for first, second in ((before, after), (after, before)):  # The second has nothing left of the first.
        found = advances.parameters(first.encode(), second.encode())
        assert found == advance(LABEL, first.encode(), second.encode()).parameters("some/journal")
        validate(found)


@pytest.mark.parametrize("known", [True, False], ids=["it had content before", "its first append"])
async def test_a_write_stays_in_doubt_if_the_state_of_a_sealed_segment_is_lost(known: bool) -> None:
    async with stream_world(2) as world, StreamWriter[Any](world.client, STREAM) as writer:
        (segment,) = (await world.streams.describe(STREAM)).active()
        listing = await world.client.list(label_selector(include={"name": segment.journal}))
        route = listing.journals[0].route
        if known:
            await writer.write_event("key", {"n": 0})
        else:
            assert await writer.last_sequence("key") == -1
        applied = asyncio.Event()
        world.wire.cut(CutPoint.ANSWER, then=applied.set)
        doubtful = writer.write_events("key", [{"n": 1}])
        await applied.wait()
        await world.cluster.kill(int(route.members[route.primary].suffix.rpartition("-")[2]), expire=True)
        with contextlib.suppress(IndexHasGreaterOffset):  # Its end is unknown, but it accepts no more appends.
            await world.streams.scale(STREAM, [Split(segment.number, 2)])
        with pytest.raises(CommitUnknown):
            await doubtful


@pytest.mark.parametrize("opened", ["before it is sealed", "later"])
async def test_nothing_is_rewritten_after_a_sealed_segment_whose_broker_is_down(opened: str) -> None:
    """Only that broker has the segment's content. Nothing of it is stored."""
    async with stream_world(2) as world:
        async with StreamWriter[Any](world.client, STREAM, writer_id="importer") as earlier:
            first = await earlier.write_events("key", [{"n": 0}], sequence=7)
        (segment,) = (await world.streams.describe(STREAM)).active()
        route = (await world.client.list(label_selector(include={"name": segment.journal}))).journals[0].route
        holder = int(route.members[route.primary].suffix.rpartition("-")[2])
        writer = StreamWriter[Any](world.client, STREAM, writer_id="importer")
        if opened != "later":
            await writer.open()
        await world.cluster.kill(holder, expire=True)
        with contextlib.suppress(IndexHasGreaterOffset):
            await world.streams.scale(STREAM, [Split(segment.number, 2)])
        if opened == "later":
            await writer.open()
        with pytest.raises(IndexHasGreaterOffset):
            await writer.last_sequence("key")
        with pytest.raises(IndexHasGreaterOffset):
            await writer.write_events("key", [{"n": 0}], sequence=7)
        await world.cluster.start(holder)
        async with asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(IndexHasGreaterOffset):  # Until that broker has recovered the segment.
                    again = await writer.write_events("key", [{"n": 0}], sequence=7)
                    break
        assert (again.deduplicated, again.begin, again.end) == (True, first.begin, first.end)
        assert await writer.last_sequence("key") == 7
        await writer.close()
        successors = (await world.streams.describe(STREAM)).active()
        assert segment.number not in [each.number for each in successors]
        assert [await world.client.head(each.journal) for each in successors] == [0, 0]
