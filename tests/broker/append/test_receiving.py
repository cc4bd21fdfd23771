"""Receiving from clients: one timer checks all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from coranto.effects import SystemClock
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import receiving
from coranto_broker.append.overload import ReceiveBudget
from coranto_broker.append.queued_append import QueuedAppend
from coranto_broker.append.receiving import Arrivals, Inbox, MinRateGuard
from coranto_broker.replication.flow_control import BURST_SECONDS
from coranto_broker.rpc.content import ContentMessage
from coranto_broker.rpc.rolled_back import AppendUnderflow
from tests.broker.virtual import virtually

EOF = object()


class Client:
    """Sends messages; after the last, it stays silent."""

    def __init__(self, *messages: object) -> None:
        self._messages = deque(messages)
        self.silent = asyncio.Event()

    async def read(self) -> Any:
        if not self._messages:
            self.silent.set()
            await asyncio.Event().wait()
        return self._messages.popleft()


def test_a_silent_client_is_cut_off_and_its_messages_are_replayed() -> None:
    async def main(loop: SimLoop) -> None:
        budget, arrivals = ReceiveBudget(100), Arrivals([])
        client = Client(ContentMessage(b"some"))
        inbox = Inbox(client, budget, 1 << 20, SimClock(loop))
        append = QueuedAppend(pb.AppendRequest())
        waiting = asyncio.create_task(inbox.receive(append, arrivals))
        await client.silent.wait()
        assert arrivals.coming == 1
        await waiting
        assert append.content is None
        assert loop.time() == pytest.approx(BURST_SECONDS)
        assert arrivals.coming == 0
        first = await inbox.read()
        assert first is not None
        assert first.content == b"some"
        with pytest.raises(AppendUnderflow, match="1048576 bytes per second"):
            await inbox.read()

    virtually(main)


async def test_each_message_is_replayed_once_whatever_its_kind() -> None:
    budget, arrivals = ReceiveBudget(100), Arrivals([])
    sent = [ContentMessage(b"some"), pb.AppendRequest(content=b"more"), pb.AppendRequest(), pb.AppendRequest(offset=7)]
    inbox = Inbox(Client(*sent, EOF), budget, 0, SystemClock())
    append = QueuedAppend(pb.AppendRequest())
    await inbox.receive(append, arrivals)
    assert append.content is None  # A message follows the commit.
    assert [await inbox.read() for _ in sent] == sent
    assert await inbox.read() is None


async def test_a_small_append_is_whole() -> None:
    budget, arrivals = ReceiveBudget(100), Arrivals([])
    sent = [ContentMessage(b"some"), pb.AppendRequest(content=b"more"), ContentMessage(b""), EOF]
    inbox = Inbox(Client(*sent), budget, 0, SystemClock())
    append = QueuedAppend(pb.AppendRequest())
    await inbox.receive(append, arrivals)
    assert (append.content, append.total_chunks, arrivals.coming) == (b"somemore", 2, 0)


class Sometimes(Client):
    """Sends each message some seconds after it is awaited."""

    async def read(self) -> Any:
        await asyncio.sleep(self._messages.popleft())  # type: ignore[arg-type]
        return await super().read()


def test_only_the_time_of_reads_is_charged() -> None:
    async def main(loop: SimLoop) -> None:
        client = Sometimes(0.4, ContentMessage(b"some"), 0.4, ContentMessage(b"more"), 0.4, EOF)
        guard = MinRateGuard(Inbox(client, ReceiveBudget(100), 1 << 20, SimClock(loop)))
        for content in (b"some", b"more"):
            message = await guard.read()
            assert message is not None
            assert message.content == content
            await asyncio.sleep(5)  # For example for slow replicas.
        with pytest.raises(AppendUnderflow):
            await guard.read()
        assert loop.time() == pytest.approx(10 + BURST_SECONDS)

    virtually(main)


def test_a_client_earns_credit_by_its_bytes() -> None:
    async def main(loop: SimLoop) -> None:
        messages: list[object] = []
        for _ in range(8):
            messages += [0.6, ContentMessage(b"x" * 60)]
        guard = MinRateGuard(Inbox(Sometimes(*messages, 1.5, EOF), ReceiveBudget(100), 100, SimClock(loop)))
        for _ in range(8):
            assert await guard.read() is not None
        with pytest.raises(AppendUnderflow):
            await guard.read()
        assert loop.time() == pytest.approx(8 * 0.6 + BURST_SECONDS, abs=0.01)

    virtually(main)


async def test_a_client_is_not_charged_for_time_without_a_check() -> None:
    guard = MinRateGuard(Inbox(Client(ContentMessage(b"some"), EOF), ReceiveBudget(100), 1 << 20, SystemClock()))
    guard.due -= 3  # As if the broker, or its machine, had stalled since.
    guard._begun -= 3
    guard.check()
    assert await guard.read() is not None
    assert await guard.read() is None
    guard.close()


class Waiting:
    def __init__(self) -> None:
        self.length = 0

    def __len__(self) -> int:
        return self.length


async def test_a_proposal_waits_for_appends_that_are_being_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "GATHER_SECONDS", 600.0)
    queue = Waiting()
    arrivals = Arrivals(queue)
    arrivals.expect()
    arrivals.expect()
    gathering = asyncio.create_task(arrivals.wait_for_arrivals())
    await asyncio.sleep(0)
    arrivals.arrived()
    queue.length = 1
    arrivals.arrived()
    await asyncio.wait_for(gathering, 60)
    assert arrivals._skips == 0


async def test_proposals_wait_for_slow_clients_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "GATHER_SECONDS", 0.0)
    arrivals = Arrivals(Waiting())
    waits = 0

    async def propose() -> bool:
        task = asyncio.create_task(arrivals.wait_for_arrivals())
        await asyncio.sleep(0)
        waited = not task.done()
        await asyncio.wait_for(task, 60)
        return waited

    assert not await propose()  # No append is expected.
    arrivals.expect()
    for _ in range(200):
        waits += await propose()
    assert waits == 8  # After 1, 3, 7, 15, 31, 63 and 63 others.
