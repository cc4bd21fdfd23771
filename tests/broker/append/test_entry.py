"""The order of a stream's appends: each waits for earlier ones that are processed elsewhere."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coranto.errors import Unavailable
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import entry
from coranto_broker.append.entry import StreamOrder
from coranto_broker.append.queue import JournalQueue
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.states import State


class Queue(JournalQueue):
    """Records the appends in it."""

    def __init__(self) -> None:
        self.came: list[QueuedAppend] = []

    def enqueue(self, append: QueuedAppend) -> None:
        self.came.append(append)


def resolution(place: Queue | str) -> Any:
    """Return a resolution to a queue, or to the broker of that name."""
    header = pb.Header(process_id=pb.ProcessSpec.ID(suffix=place)) if isinstance(place, str) else None
    return SimpleNamespace(require_replica=SimpleNamespace(queue=place), header=header)


class World:
    """A stream's order, and the resolutions of its appends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        environment: Any = None
        self.order = StreamOrder(environment)
        self.queue, self.other = Queue(), Queue()
        self.resolved: asyncio.Future[Queue | Exception | str] = asyncio.get_running_loop().create_future()
        self.forwarded: list[QueuedAppend] = []
        monkeypatch.setattr(entry, "resolve", self._resolve)

    async def _resolve(self, environment: object, append: QueuedAppend) -> AppendOutcome | None:
        found = await self.resolved
        if isinstance(found, Exception):
            raise found
        append.resolution = resolution(found)
        if not isinstance(found, str):
            return None
        append.state = State.PROXY
        return AppendOutcome(append.resolved)

    def add(self, queue: Queue | None = None) -> QueuedAppend:
        """Add an append. Its resolution is known if a queue is given."""
        append = QueuedAppend(pb.AppendRequest(journal="a/b"), content=b"x")
        append.on_settled = self.forwarded.append
        if queue is not None:
            append.resolution = resolution(queue)
        self.order.add(append)
        return append


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_appends_go_straight_to_the_queue_that_has_the_earlier_ones(world: World) -> None:
    appends = [world.add(world.queue) for _ in range(3)]
    assert world.queue.came == appends
    for _ in appends:
        world.order.ended()
    assert world.order.is_idle
    last = world.add(world.other)
    assert world.other.came == [last]


async def test_appends_wait_for_one_that_is_being_resolved(world: World) -> None:
    first, second = world.add(), world.add(world.queue)
    await turns()
    assert world.queue.came == []
    world.resolved.set_result(world.queue)
    await turns()
    assert world.queue.came == [first, second]


async def test_appends_wait_for_appends_in_the_queue_of_an_earlier_replica(world: World) -> None:
    world.add(world.queue)
    world.resolved.set_result(world.other)
    later = [world.add(world.other), world.add()]
    await turns()
    assert world.other.came == []
    world.order.ended()
    await turns()
    assert world.other.came == later


async def test_appends_wait_for_forwarded_appends(world: World) -> None:
    world.resolved.set_result("primary")
    first, second = world.add(), world.add()
    await turns()
    assert world.forwarded == [first, second], "on the way to another broker, they keep their order"
    world.resolved = asyncio.get_running_loop().create_future()
    world.resolved.set_result(world.queue)
    third = world.add(world.queue)
    await turns()
    assert world.queue.came == []
    world.order.ended()
    world.order.ended()
    await turns()
    assert world.queue.came == [third]


async def test_appends_wait_for_appends_forwarded_to_an_earlier_primary(world: World) -> None:
    # Found by simulation: the earlier primary forwarded them in turn, and they arrived after later appends.
    world.resolved.set_result("primary")
    first = world.add()
    await turns()
    world.resolved = asyncio.get_running_loop().create_future()
    world.resolved.set_result("successor")
    second = world.add()
    await turns()
    assert world.forwarded == [first]
    world.order.ended()
    await turns()
    assert world.forwarded == [first, second]


async def test_an_append_that_cannot_be_resolved_ends_alone(world: World) -> None:
    world.resolved.set_result(Unavailable("no such revision"))
    first = world.add()
    await turns()
    assert isinstance(first.outcome, Unavailable)
    world.order.ended()
    assert world.order.is_idle
    assert world.queue.came == [world.add(world.queue)]


async def test_nothing_is_placed_once_the_client_is_gone(world: World) -> None:
    world.add()
    await turns()
    world.order.close()
    world.resolved = asyncio.get_running_loop().create_future()
    world.resolved.set_result(world.queue)
    await turns()
    assert world.queue.came == []
