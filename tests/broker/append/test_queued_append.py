"""A queued append: one outcome, and a client that disconnects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coranto.errors import Unavailable
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.states import AppendEvent, State

NOTHING: Any = None


def append() -> QueuedAppend:
    return QueuedAppend(pb.AppendRequest(journal="a/b"))


async def test_the_first_outcome_counts() -> None:
    settled: list[QueuedAppend] = []
    made = append()
    made.on_settled = settled.append
    waiting = asyncio.create_task(made.settled())
    await asyncio.sleep(0)
    made.state = State.PROXY
    made.settle(AppendOutcome(NOTHING))
    made.settle(Unavailable("too late"))
    assert await waiting is made.outcome
    assert made.state is State.PROXY
    assert settled == [made]
    assert await made.settled() is made.outcome


async def test_an_error_is_raised_to_all_waiters() -> None:
    made = append()
    waiting = asyncio.create_task(made.settled())
    await asyncio.sleep(0)
    made.settle(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await waiting
    assert made.state is State.ERROR


def test_only_events_of_the_table_change_its_state() -> None:
    made = append()
    made.transition(AppendEvent.PRIMARY_IS_HERE)
    assert made.state is State.ACQUIRE_PIPELINE
    with pytest.raises(RuntimeError, match="COMMITTED must not occur in state ACQUIRE_PIPELINE"):
        made.transition(AppendEvent.COMMITTED)


def test_a_disconnected_client_removes_its_append_only_before_an_outcome() -> None:
    class Queue:
        def __init__(self) -> None:
            self.discarded: list[QueuedAppend] = []

        def discard(self, append: QueuedAppend) -> None:
            self.discarded.append(append)

    queue: Any = Queue()
    first, second, third = append(), append(), append()
    first.queue = second.queue = queue
    second.settle(Unavailable("gone"))
    for each in (first, second, third):
        each.leave()
        assert each.has_left
    assert queue.discarded == [first]
