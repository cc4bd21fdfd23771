"""PriorityLimiter: it limits concurrent work, keeps the order, and frees every slot."""

from __future__ import annotations

import asyncio

import pytest

from coranto_broker import priority_limiter
from coranto_broker.priority_limiter import PriorityLimiter

WAIT_SECONDS = 60.0


class Works:
    """Jobs that each wait for a slot, and keep it until they are ended."""

    def __init__(self, given: PriorityLimiter) -> None:
        self.given = given
        self.begun: list[int] = []
        self.changed = asyncio.Event()
        self.running: set[int] = set()
        self.most = 0
        self.ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def _work(self, number: int, preferred: bool) -> None:
        async with self.given.slot(str(number), preferred=preferred):
            self.begun.append(number)
            self.changed.set()
            self.running.add(number)
            self.most = max(self.most, len(self.running))
            await self.ends[number].wait()
            self.running.discard(number)

    async def start(self, *numbers: int, preferred: bool = False) -> None:
        for number in numbers:
            self.ends[number] = asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._work(number, preferred))
        await settle()

    async def end(self, number: int) -> None:
        self.ends[number].set()
        await self.tasks[number]
        await settle()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_slots_are_given_in_order_up_to_the_limit() -> None:
    works = Works(PriorityLimiter(2))
    await works.start(*range(5))
    assert works.begun == [0, 1]
    assert works.given.waiting == 3
    await works.end(1)
    await works.end(0)
    assert works.begun == [0, 1, 2, 3]
    for number in (2, 3, 4):
        await works.end(number)
    assert works.begun == [0, 1, 2, 3, 4]
    assert (works.most, works.given.waiting) == (2, 0)


async def test_preferred_work_runs_first() -> None:
    works = Works(PriorityLimiter(1))
    await works.start(*range(5))
    for preferred in ("3", "4", "3", "0", "nobody"):
        works.given.prefer(preferred)
    assert works.given.waiting == 4
    await works.start(5, preferred=True)
    for number in (0, 3, 4, 5, 1, 2):
        assert works.begun[-1] == number
        await works.end(number)
    await works.start(6)
    assert works.begun[-1] == 6, "no slot was lost"
    await works.end(6)


async def test_a_slot_given_to_a_cancelled_taker_is_passed_on() -> None:
    works = Works(PriorityLimiter(1))
    await works.start(0, 1, 2)
    works.ends[0].set()
    await asyncio.sleep(0)  # The first job ends, and the second has its slot, but has not run yet.
    works.tasks[1].cancel()
    await settle()
    assert works.begun == [0, 2]
    await works.end(2)


async def test_long_work_loses_its_slot_once_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority_limiter, "SLOT_SECONDS", 0.01)
    works = Works(PriorityLimiter(1))
    await works.start(0, 1)
    async with asyncio.timeout(WAIT_SECONDS):
        while works.begun != [0, 1]:
            works.changed.clear()
            await works.changed.wait()
    assert works.running == {0, 1}, "the first continues"
    monkeypatch.setattr(priority_limiter, "SLOT_SECONDS", WAIT_SECONDS)
    await works.end(0)
    await works.end(1)
    await works.start(2, 3)
    assert works.begun == [0, 1, 2], "a lost slot is not given back a second time"
    await works.end(2)
    await works.end(3)


async def test_no_slot_is_lost_while_the_maximum_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority_limiter, "SLOT_SECONDS", 0.01)
    works = Works(PriorityLimiter(1, most=3))
    await works.start(*range(6))
    async with asyncio.timeout(WAIT_SECONDS):
        while len(works.begun) < 3:
            works.changed.clear()
            await works.changed.wait()
    paused = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.05, paused.set_result, None)  # The third would have lost its slot.
    await paused
    assert works.begun == [0, 1, 2]
    for number in range(6):
        async with asyncio.timeout(WAIT_SECONDS):
            while number not in works.running:
                works.changed.clear()
                await works.changed.wait()
        await works.end(number)
    assert works.most == 3


async def test_cancelled_and_failed_work_frees_its_slot() -> None:
    works = Works(PriorityLimiter(1))
    await works.start(0, 1, 2)
    works.tasks[1].cancel()
    await settle()
    assert works.given.waiting == 1
    works.tasks[0].cancel()
    await settle()
    assert works.begun == [0, 2]
    with pytest.raises(ZeroDivisionError):
        await fail(works.given, works.end(2))
    await works.start(3)
    assert works.begun == [0, 2, 3]
    await works.end(3)


async def fail(given: PriorityLimiter, before: object) -> None:
    await before  # type: ignore[misc]
    async with given.slot("fails"):
        raise ZeroDivisionError
