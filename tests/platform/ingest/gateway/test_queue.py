"""Waiting requests: duplicates, attempts of unknown outcome, callers that leave, and the count of bytes."""

from __future__ import annotations

import asyncio

import pytest

from coranto.ingest.gateway.queue import Committed, GatewayEnded, KeyUsed, Request, RequestQueue
from coranto.ingest.webhook.keys import ANY_BODY, DeduplicationWindow, pack


def request(name: str, digest: bytes | None = b"d" * 8, size: int = 10) -> Request:
    return Request(name.encode().ljust(16), digest, [], [], [], size)


def known(*requests: Request) -> DeduplicationWindow:
    window = DeduplicationWindow(10.0)
    window.add(1.0, pack((each.id, each.digest or b"") for each in requests))
    return window


async def test_attempts_of_unknown_outcome_are_repeated_with_the_same_numbers() -> None:
    queue, none = RequestQueue(lambda size: None), DeduplicationWindow(10.0)
    first, second, third = (queue.put(request(name, None)) for name in "abc")
    assert queue.take(20, none) == [first, second]
    assert queue.take(20, none) == [first, second]
    assert [each.number for each in (first, second, third)] == [1, 2, 0]
    queue.resolve_committed(1, none)
    assert first.done.result() == Committed(False)
    assert queue.take(20, none) == [second, third]
    queue.resolve_committed(3, none)
    assert len(queue) == 0


async def test_known_keys_are_answered() -> None:
    released: list[int] = []
    queue = RequestQueue(released.append)
    taken, waiting = queue.put(request("a")), queue.put(request("b"))
    other = queue.put(request("c", b"e" * 8))
    assert queue.take(10, DeduplicationWindow(10.0)) == [taken]
    window = known(request("a"), request("b"), request("c"))
    queue.resolve_committed(0, window)
    assert taken.done.result() == Committed(True)
    assert queue.take(10, window) == []
    assert waiting.done.result() == Committed(True)
    assert isinstance(other.done.exception(), KeyUsed)
    assert (released, len(queue), queue.keys) == ([10, 10, 10], 0, 0)
    assert not queue.grown.is_set()


async def test_a_waiting_key_is_queued_once() -> None:
    released: list[int] = []
    queue = RequestQueue(released.append)
    first = queue.put(request("a"))
    assert queue.put(request("a", size=3)) is first
    assert queue.put(request("a", ANY_BODY)) is first
    with pytest.raises(KeyUsed):
        queue.put(request("a", b"e" * 8))
    assert released == [3, 10, 10]
    assert queue.keys == 1


async def test_a_request_without_callers_is_dropped_unless_it_was_taken() -> None:
    released: list[int] = []
    queue = RequestQueue(released.append)
    taken, dropped = queue.put(request("a", size=1)), queue.put(request("b", size=2))
    assert queue.take(1, DeduplicationWindow(10.0)) == [taken]
    taken.waiting, dropped.waiting = 1, 2
    queue.remove_waiter(dropped)
    assert len(queue) == 2
    queue.remove_waiter(dropped)
    queue.remove_waiter(taken)
    assert (released, len(queue)) == ([2], 1)
    queue.fail()
    assert isinstance(taken.done.exception(), GatewayEnded)
    assert (released, len(queue), queue.keys) == ([2, 1], 0, 0)
    await asyncio.sleep(0)
