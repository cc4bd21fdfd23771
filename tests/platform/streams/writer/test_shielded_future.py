"""Shielded futures: cancelling a wait cancels nothing else."""

from __future__ import annotations

import asyncio

import pytest

from coranto.streams.writer.shielded_future import ShieldedFuture


async def promised() -> tuple[ShieldedFuture[int], list[asyncio.Task[int]]]:
    promise: ShieldedFuture[int] = ShieldedFuture(loop=asyncio.get_running_loop())
    waiting = [asyncio.create_task(promise.outcome()) for _ in range(2)]
    await asyncio.sleep(0)
    return promise, waiting


async def test_all_waiters_get_the_result_even_late_ones() -> None:
    promise, waiting = await promised()
    promise.set_result(7)
    assert await asyncio.gather(*waiting) == [7, 7]
    assert await promise.outcome() == await promise == 7


async def test_all_waiters_get_the_error() -> None:
    promise, waiting = await promised()
    promise.set_exception(ValueError("no"))
    for each in [*waiting, promise.outcome()]:
        with pytest.raises(ValueError, match="no"):
            await each


async def test_cancelling_a_wait_affects_no_other_waiter() -> None:
    promise, (first, second) = await promised()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not promise.done()
    promise.set_result(7)
    assert await second == 7


async def test_cancelling_the_future_cancels_its_waiters() -> None:
    promise, waiting = await promised()
    assert promise.cancel()
    assert not promise.cancel()
    for each in [*waiting, promise.outcome()]:
        with pytest.raises(asyncio.CancelledError):
            await each


async def test_callbacks_run_before_waiters_which_run_in_the_next_iteration() -> None:
    promise, waiting = await promised()
    seen: list[str] = []
    promise.add_done_callback(lambda _: seen.append("callback"))
    waiting[0].add_done_callback(lambda _: seen.append("waited"))
    promise.set_result(7)
    await asyncio.sleep(0)
    assert (seen, waiting[0].done()) == (["callback"], True)
    await asyncio.gather(*waiting)
