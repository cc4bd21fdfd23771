"""Deferred writes are done in order and once, by a worker thread or by a caller that cannot wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from coranto_broker.spool.write_worker import MAX_BEHIND_BYTES, WriteQueue


def _fail() -> None:
    raise OSError("the disk is full")


async def test_jobs_are_done_in_order_by_one_thread_at_a_time() -> None:
    aside, done = WriteQueue(), list[int]()
    for number in range(200):
        aside.add(partial(done.append, number), 1)
        if number % 50 == 0:
            await asyncio.sleep(0)
    await aside.done()
    assert done == list(range(200))
    assert aside.idle


async def test_a_caller_that_cannot_wait_for_the_thread_does_the_rest() -> None:
    aside, done, proceed, begun = WriteQueue(), list[str](), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert proceed.wait(60)
        done.append("first")

    aside.add(first, 1)
    aside.add(partial(done.append, "second"), 1)
    assert await asyncio.to_thread(begun.wait, 60)
    timer = threading.Timer(0.02, proceed.set)
    timer.start()
    aside.join()
    assert done == ["first", "second"]
    timer.join()
    await aside.done()
    assert aside.idle


async def test_abandoned_jobs_are_not_done_later() -> None:
    aside, done, proceed, begun = WriteQueue(), list[str](), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert proceed.wait(60)
        done.append("first")

    aside.add(first, 1)
    aside.add(partial(done.append, "second"), 1)
    assert await asyncio.to_thread(begun.wait, 60)

    def once_forgotten() -> None:
        until = time.monotonic() + 30
        while aside._jobs and time.monotonic() < until:
            time.sleep(0.001)
        proceed.set()

    other = threading.Thread(target=once_forgotten)
    other.start()
    aside.abandon()  # The running job is waited for.
    assert done == ["first"]
    other.join()
    aside.add(partial(done.append, "third"), 1)
    await aside.done()
    assert done == ["first", "third"]


async def test_a_failure_is_raised_once_and_later_jobs_are_not_done() -> None:
    aside, done = WriteQueue(), list[str]()
    aside.add(_fail, 1)
    aside.add(partial(done.append, "after it"), 1)
    with pytest.raises(OSError, match="the disk is full"):
        await aside.done()
    assert aside.idle
    assert not done
    aside.add(_fail, 1)
    aside.abandon()
    aside.add(partial(done.append, "anew"), 1)
    await aside.done()
    assert done == ["anew"]


async def test_waiting_content_is_bounded() -> None:
    aside, proceed = WriteQueue(), threading.Event()
    aside.add(lambda: proceed.wait(60), MAX_BEHIND_BYTES)
    async with asyncio.timeout(30):
        await aside.wait_for_capacity()
    for _ in range(3):
        aside.add(lambda: None, MAX_BEHIND_BYTES // 2)
    waiting = asyncio.create_task(aside.wait_for_capacity())
    await asyncio.sleep(0)
    assert not waiting.done()
    proceed.set()
    async with asyncio.timeout(30):
        await waiting
    await aside.done()


async def test_all_owners_get_their_turn_despite_a_busy_one() -> None:
    stopped, turns = threading.Event(), list[int]()
    greedy = [WriteQueue() for _ in range(8)]

    def more(aside: WriteQueue) -> None:
        if not stopped.is_set():
            aside._jobs.append((partial(more, aside), MAX_BEHIND_BYTES))  # As if content arrived all the time.
            aside._jobs_added += 1
            aside._added += MAX_BEHIND_BYTES

    for aside in greedy:
        aside.add(partial(more, aside), MAX_BEHIND_BYTES)
    late = WriteQueue()
    late.add(partial(turns.append, 1), 1)
    async with asyncio.timeout(30):
        await late.done()
    assert turns == [1]
    stopped.set()
    for aside in greedy:
        await aside.done()
