"""Admission of appends: the limit, and the log entries of refusals."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from coranto_broker.append.overload import LOG_SECONDS, Admission
from coranto_broker.fast_counters import FastCounter
from coranto_broker.metrics import UnderWay
from coranto_broker.rpc.rolled_back import TooManyAppends
from tests.broker.running import ManualClock


def counter() -> FastCounter:
    return FastCounter("appends", "Appends.", CollectorRegistry())


def refuse(admission: Admission) -> None:
    with pytest.raises(TooManyAppends):
        admission.enter()


def test_refusals_of_an_interval_share_one_log_entry() -> None:
    clock, under_way, refused = ManualClock(), UnderWay(), counter()
    admission = Admission(1, under_way, refused, counter(), clock)
    admission.enter()
    with capture_logs() as logs:
        for _ in range(3):
            refuse(admission)
        clock.advance(LOG_SECONDS)
        refuse(admission)
    assert [log["refused"] for log in logs] == [1, 3]
    assert (refused.value, under_way.count) == (4, 1)
    admission.leave()
    admission.enter()  # Capacity is available again.
    assert under_way.count == 1


def test_zero_means_unlimited() -> None:
    under_way = UnderWay()
    admission = Admission(0, under_way, counter(), counter(), ManualClock())
    for _ in range(1000):
        admission.enter()
    assert under_way.count == 1000


def test_a_stream_may_enter_at_the_limit_and_counts() -> None:
    under_way = UnderWay()
    admission = Admission(1, under_way, counter(), counter(), ManualClock())
    assert not admission.is_full
    admission.enter()
    assert admission.is_full
    admission.enter_in_turn()  # The first append of a stream.
    assert under_way.count == 2
    admission.leave()
    refuse(admission)
    admission.leave()
    assert not admission.is_full


async def test_streams_get_free_capacity_in_fifo_order() -> None:
    waits = counter()
    admission = Admission(2, UnderWay(), counter(), waits, ManualClock())
    admission.enter()
    admission.enter()
    entered: list[int] = []

    async def stream(number: int) -> None:
        room = asyncio.Event()
        with admission.waiting(room):
            while admission.is_full:
                room.clear()
                await room.wait()
        admission.enter_in_turn()
        entered.append(number)

    streams = [asyncio.create_task(stream(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert waits.value == 5
    admission.leave()
    admission.enter()  # A call is faster than the notified stream. That stream keeps its place.
    await asyncio.sleep(0)
    assert entered == []
    streams[1].cancel()  # The client has closed its stream.
    admission.leave()
    admission.leave()  # The first stream is notified once, and passes the second of two free places to the next.
    await asyncio.wait((streams[0], streams[2]))
    assert entered == [0, 2]
    for _ in range(2):
        admission.leave()
    await asyncio.wait((streams[3], streams[4]))
    assert entered == [0, 2, 3, 4]
