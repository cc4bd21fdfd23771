"""The simulated event loop: runs are reproducible, time is virtual, processes die and stall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import Deadlock, SimLoop, simulated
from coranto.testing.sim.timeline import Killed, Process


def trace_of(seed: int) -> list[tuple[float, int]]:
    """Return the order of concurrent tasks that sleep and wait for each other."""
    trace: list[tuple[float, int]] = []

    async def work(loop: SimLoop, number: int, gate: asyncio.Event) -> None:
        for step in range(20):
            await asyncio.sleep(0.5 * (number % 3))
            trace.append((loop.time(), number))
            if step == 10:
                gate.set()
            await (gate.wait() if number % 5 == 0 else asyncio.sleep(0))
            if number % 7 == 0:
                await asyncio.to_thread(trace.append, (loop.time(), -number))

    async def main(loop: SimLoop) -> None:
        gate = asyncio.Event()
        await asyncio.gather(*(work(loop, number, gate) for number in range(30)))

    with simulated(seed) as loop:
        loop.run_until_complete(main(loop))
    return trace


def test_runs_depend_only_on_the_seed() -> None:
    assert trace_of(1) == trace_of(1)
    assert trace_of(1) != trace_of(2)


def test_a_virtual_hour_takes_no_real_time() -> None:
    with simulated(0) as loop:
        loop.run_until_complete(asyncio.sleep(3600))
        assert loop.time() == 3600
        assert loop.steps < 10


def test_timeouts_are_virtual() -> None:
    async def wait() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()

    with simulated(0) as loop:
        loop.run_until_complete(wait())
        assert loop.time() == 100


def test_a_deadlock_is_reported() -> None:
    with simulated(0) as loop, pytest.raises(Deadlock, match="nothing can happen"):
        loop.run_until_complete(asyncio.Event().wait())


def test_sets_of_futures_have_a_reproducible_order() -> None:
    def order() -> list[int]:
        with simulated(0) as loop:
            numbered = {loop.create_future(): number for number in range(50)}
            return [numbered[future] for future in set(numbered)]

    kept = [bytearray(1000) for _ in range(7)]
    first = order()
    kept.append(bytearray(5000))
    assert order() == first


Script = Callable[[SimLoop, Process, list[str]], Coroutine[Any, Any, None]]


async def _killed(loop: SimLoop, process: Process, seen: list[str]) -> None:
    process.on_death.append(lambda: seen.append("socket closed"))
    process.kill()


async def _paused(loop: SimLoop, process: Process, seen: list[str]) -> None:
    process.pause()
    await asyncio.sleep(10)
    seen.append("resumed")
    process.resume()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # Code that unwinds after a kill cannot affect the world: its clock refuses.
        (_killed, ["1.0", "socket closed", "unwound at 1.5", "refused"]),
        (_paused, ["1.0", "resumed", "11.5", "unwound at 11.5", "12.5"]),
    ],
)
def test_processes(script: Script, expected: list[str]) -> None:
    seen: list[str] = []

    async def main(loop: SimLoop) -> None:
        process = Process(loop, "it")
        clock = SimClock(loop, process)

        async def child() -> None:
            try:
                for _ in range(2):
                    await clock.sleep(1)
                    seen.append(str(loop.time()))
            finally:
                seen.append(f"unwound at {loop.time()}")
                try:
                    await clock.sleep(1)
                    seen.append(str(loop.time()))
                except Killed:
                    seen.append("refused")

        async def parent() -> None:
            await asyncio.create_task(child())  # It belongs to its parent's process.

        process.start(parent())
        await asyncio.sleep(1.5)
        await script(loop, process, seen)
        await asyncio.sleep(20)

    with simulated(3) as loop:
        loop.run_until_complete(main(loop))
    assert seen == expected


def test_an_unretrieved_error_of_a_task_is_reported() -> None:
    async def fail() -> None:
        raise ValueError("of nobody's concern?")

    with simulated(0) as loop:
        process = Process(loop, "it")
        process.start(fail(), name="forgotten")
        loop.run_until_complete(asyncio.sleep(1))
        assert loop.unnoticed() == ['forgotten ended unnoticed: ValueError("of nobody\'s concern?")']
        loop.ended.clear()
