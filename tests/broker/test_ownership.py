"""Slots and signals: one owner at a time, in order, despite cancellation and invalidation."""

from __future__ import annotations

import asyncio

import pytest

from coranto_broker.ownership import Invalidated, Signal, Slot


async def started(*works: object) -> list[asyncio.Task[object]]:
    tasks = [asyncio.ensure_future(work) for work in works]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return tasks


async def test_takers_are_served_in_order() -> None:
    slot: Slot[str] = Slot()
    slot.put("thing")
    assert await slot.take() == "thing"
    first, second = await started(slot.take(), slot.take())
    slot.put("thing")
    assert await first == "thing"
    assert not second.done()
    slot.put("thing")
    assert await second == "thing"


async def test_a_signal_ends_only_the_waits_that_use_it() -> None:
    slot: Slot[str] = Slot()
    signal = Signal()
    patient, impatient = await started(slot.take(), slot.take(signal))
    signal.fire()
    with pytest.raises(Invalidated):
        await impatient
    slot.put("thing")
    assert await patient == "thing"
    slot.put("thing")
    with pytest.raises(Invalidated):
        await slot.take(signal)
    assert await slot.take() == "thing"


async def test_a_cancelled_taker_passes_the_value_on() -> None:
    slot: Slot[str] = Slot()
    first, second = await started(slot.take(), slot.take())
    slot.put("thing")  # Given to the first, which has not run yet.
    first.cancel()
    assert await asyncio.wait_for(second, 60) == "thing"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_cancelled_waiter_is_skipped() -> None:
    slot: Slot[str] = Slot()
    first, second = await started(slot.take(), slot.take())
    first.cancel()
    await asyncio.sleep(0)
    slot.put("thing")
    assert await asyncio.wait_for(second, 60) == "thing"


async def test_a_value_given_as_the_signal_fires_is_not_lost() -> None:
    slot: Slot[str] = Slot()
    signal = Signal()
    (taker,) = await started(slot.take(signal))
    slot.put("thing")
    signal.fire()
    assert await taker == "thing"


async def test_waiting_for_a_signal() -> None:
    signal = Signal()
    (waiter,) = await started(signal.wait())
    assert not waiter.done()
    signal.fire()
    await waiter
    await signal.wait()
