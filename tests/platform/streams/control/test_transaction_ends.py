"""The ends of multi-key transactions: each is applied once, and ends no other transaction of its producer id."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import Unavailable
from coranto.streams.control.decisions import Decided, Decisions, Gate
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.transaction_ends import LaneEnd, end_transactions, open_lanes
from coranto.streams.model.lanes import lanes_in
from coranto.streams.model.registers import Registers
from coranto.streams.model.stream import segment_journal
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.multi_key.writer import MultiKeyWriter
from coranto.testing.cluster import STORE_URL, Cluster

TEMPLATE = default_template(stores=[STORE_URL])
SEGMENT = segment_journal("orders", 0)


class Watched:
    """A client that calls `before_decision` before each append of a decision."""

    def __init__(self, client: JournalClient, before_decision: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._before_decision = before_decision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, journal: str, content: Any, **options: Any) -> Any:
        if b'"decided"' in (content if isinstance(content, bytes) else b"".join(content)):
            await self._before_decision()
        return await self._client.append(journal, content, **options)


async def decided(client: JournalClient) -> list[Decided]:
    decisions = Decisions(client, "orders", lambda size: bytes(size))
    return list((await decisions.read(0, await client.head(decisions.journal))).decided.values())


async def write(writer: MultiKeyWriter[Any], number: int) -> None:
    async with writer.transaction() as txn:
        for at, key in enumerate(("a", "customer-1")):
            txn.write(key, {"txn": number, "at": at})


async def committed(client: JournalClient) -> Counter[int]:
    async with StreamReader[Any](client, "orders") as reader:
        return Counter([event.data["txn"] async for event in reader])


async def test_late_ends_end_no_other_transaction(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 1, template=TEMPLATE)

    async def late() -> None:  # A process that recovers the stream and stalled after reading the decisions.
        for each in await decided(client):
            assert each.use is not None
            await end_transactions(client, SEGMENT, [LaneEnd(each.use, each.acks[SEGMENT])])

    watched: Any = Watched(client, late)
    async with MultiKeyWriter[Any](watched, "orders") as writer:
        for number in range(8):
            await write(writer, number)
    found = await decided(client)
    producers = Counter(each.use.producer for each in found if each.use is not None)
    assert max(producers.values()) > 2, "lanes are reused"
    assert await committed(client) == dict.fromkeys(range(8), 2)
    content = await client.read_all(SEGMENT, 0, await client.head(SEGMENT))
    assert content.count(b"\n") == 8 * 3 + 1, "each end appears once; one no-op holds the registers"


async def test_reader_state_does_not_grow_with_the_number_of_transactions(
    streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    async with MultiKeyWriter[Any](client, "orders") as writer:
        for number in range(60):
            await write(writer, number)
        assert len({each.use.producer for each in await decided(client) if each.use is not None}) <= 3
        for begin in range(60, 180, 40):
            await asyncio.gather(*(write(writer, begin + number) for number in range(40)))
    producers = {each.use.producer for each in await decided(client) if each.use is not None}
    assert len(producers) <= 2 * 32
    async with StreamReader[Any](client, "orders") as reader:
        count = len([event async for event in reader])
    assert count == 360
    for number in (0, 1):
        barrier = await client.append(segment_journal("orders", number), b"")
        assert lanes_in(barrier.registers) == (), "all have ended"


async def test_dropping_lanes_keeps_transactions_that_began_since_the_check(
    streams: Streams, client: JournalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    began, dropped, writing = asyncio.Event(), asyncio.Event(), list[asyncio.Task[None]]()

    async def hold() -> None:
        began.set()
        await dropped.wait()

    async def finish(self: Decisions, gate: Gate) -> int:
        monkeypatch.setattr(Decisions, "finish", right)
        done = await right(self, gate)
        # This process stalls so long that another one opens the gate.
        await Streams(client).resume("orders")

        async def other() -> None:
            watched: Any = Watched(client, hold)
            async with MultiKeyWriter[Any](watched, "orders") as writer:
                await write(writer, 1)

        writing.append(asyncio.create_task(other()))
        await began.wait()
        return done

    async with MultiKeyWriter[Any](client, "orders") as writer:
        await write(writer, 0)
    right = Decisions.finish
    monkeypatch.setattr(Decisions, "finish", finish)
    assert await streams.drop_lanes("orders") == 0
    dropped.set()
    await writing[0]
    assert await committed(client) == {0: 2, 1: 2}


async def test_a_commit_succeeds_if_earlier_ones_cannot_be_recorded_as_done(
    streams: Streams, client: JournalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise Unavailable("no broker answers")

    await streams.create("orders", 1, template=TEMPLATE)
    monkeypatch.setattr("coranto.streams.writer.multi_key.writer._FINISH_EVERY", 1)
    async with MultiKeyWriter[Any](client, "orders") as writer:
        monkeypatch.setattr(Decisions, "finish", fail)
        monkeypatch.setattr(Decisions, "done", fail)
        await write(writer, 0)
    assert await committed(client) == {0: 2}


async def test_after_a_loss_of_registers_only_unfinished_transactions_are_ended_again(
    streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    async with MultiKeyWriter[Any](client, "orders") as writer:
        await write(writer, 0)
    (each,) = await decided(client)
    end = LaneEnd(each.use, each.acks[SEGMENT])
    noop = b'{"_meta":{"uuid":"00000000-0000-0000-0000-000000000000"},"txn":-1}\n'
    registers = (await client.append(SEGMENT, b"")).registers
    lost = (await client.append(SEGMENT, noop, subtract_registers=registers)).end
    asked: list[str] = []

    async def done(txn: str) -> bool:
        asked.append(txn)
        return True

    async def not_done(txn: str) -> bool:
        asked.append(txn)
        if len(asked) == 2:  # An append between the query and the end.
            await client.append(SEGMENT, noop)
        return False

    await end_transactions(client, SEGMENT, [end], is_done=done)
    assert await client.head(SEGMENT) == lost, "its lane may have been reused"
    await end_transactions(client, SEGMENT, [end], is_done=not_done)
    assert await client.head(SEGMENT) == lost + len(noop) + len(end.ack)
    assert asked == [each.txn] * 3


@pytest.mark.parametrize("restored", [False, True])
async def test_decided_transactions_end_after_a_loss_of_all_registers(
    restored: bool, streams: Streams, client: JournalClient, cluster: Cluster
) -> None:
    await streams.create("orders", 1, template=TEMPLATE)

    class Dying:
        """A client that loses its connection just before it ends a transaction."""

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        async def append(self, journal: str, content: Any, **options: Any) -> Any:
            if journal == SEGMENT and options.get("subtract_registers") is not None:
                raise Unavailable("no broker answers")
            return await client.append(journal, content, **options)

    dying: Any = Dying()
    writer: MultiKeyWriter[Any] = MultiKeyWriter(dying, "orders")
    await writer.open()
    await write(writer, 0)
    registers = (await client.append(SEGMENT, b"")).registers
    assert len(lanes_in(registers)) == 1
    left = labels.label_set({"coranto.dev/held": "1", "coranto.dev/restored": "1"}) if restored else None
    noop = b'{"_meta":{"uuid":"00000000-0000-0000-0000-000000000000"},"txn":-1}\n'
    await client.append(SEGMENT, noop, subtract_registers=registers, union_registers=left)
    assert (await committed(client))[0] == 0
    await streams.resume("orders")
    assert (await committed(client))[0] == 2
    async with MultiKeyWriter[Any](client, "orders") as another:
        await write(another, 1)
    assert (await committed(client))[1] == 2
    assert Registers.of((await client.append(SEGMENT, b"")).registers).held


async def test_lanes_of_dead_writers_are_dropped_above_a_limit_per_segment(
    streams: Streams, client: JournalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await streams.create("orders", 1, template=TEMPLATE)

    async def die() -> None:
        raise Unavailable("the process is killed")

    killed: Any = Watched(client, die)

    class Deserted(MultiKeyWriter[Any]):
        async def _roll_back(self, parts: Any) -> None:
            """Do nothing, like a dead process."""

    for number in range(3):
        async with Deserted(killed, "orders", retry_timeout=0.1) as writer:
            with pytest.raises(Unavailable):
                await write(writer, number)
    assert len(lanes_in((await client.append(SEGMENT, b"")).registers)) == 3
    async with MultiKeyWriter[Any](client, "orders") as writer:
        await write(writer, 10)
        assert len(lanes_in((await client.append(SEGMENT, b"")).registers)) == 3
    monkeypatch.setattr("coranto.streams.writer.multi_key.writer.CROWDED_LANES", 3)
    async with MultiKeyWriter[Any](client, "orders") as writer:
        await write(writer, 12)
    assert len(await open_lanes(client, SEGMENT)) == 3, "their writers may still be active"
    monkeypatch.setattr("coranto.streams.model.lanes._ABANDONED", 0)
    async with MultiKeyWriter[Any](client, "orders") as writer:
        await write(writer, 11)
    assert lanes_in((await client.append(SEGMENT, b"")).registers) == ()
    assert await committed(client) == {10: 2, 11: 2, 12: 2}
    assert await streams.drop_lanes("orders") == 0
