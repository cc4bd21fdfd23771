"""The backlog: journals held back because of unstored content, and their release."""

from __future__ import annotations

import asyncio

import pytest

from coranto_broker.fragments.backlog import FAILING_ATTEMPTS, TIMEOUT_SECONDS, Backlog
from coranto_broker.ownership import Invalidated, Signal
from tests.broker.running import ManualClock

A, B, C = "journal/a", "journal/b", "journal/c"
URL, OTHER = "s3://bucket/", "s3://other/"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def backlog(clock: ManualClock) -> Backlog:
    return Backlog(clock, journal_bytes=100, broker_bytes=200)


def is_held(backlog: Backlog, journal: str) -> bool:
    return backlog.problem(journal, URL) != ""


def test_a_journal_is_held_above_its_bound_and_released_well_below_it(backlog: Backlog) -> None:
    seen = []
    for size in (60, 40, 1, -1, -24, -1, 20, 5, 1):
        (backlog.add if size > 0 else backlog.remove)(A, abs(size))
        seen.append(is_held(backlog, A))
    #               60     100    101   100   76    75     95     100    101
    assert seen == [False, False, True, True, True, False, False, False, True]
    assert not is_held(backlog, B)
    assert backlog.held == 1
    problem = backlog.problem(A, URL)
    assert all(part in problem for part in ("101 bytes", A, URL, "max_unpersisted_journal_bytes is 100", "75"))


def test_a_journal_is_held_until_a_fragment_larger_than_the_bound_is_stored(backlog: Backlog) -> None:
    backlog.add(A, 1000)
    assert is_held(backlog, A)
    backlog.remove(A, 1000)
    assert (is_held(backlog, A), backlog.total, backlog.held) == (False, 0, 0)


def test_the_brokers_bound_holds_only_journals_with_a_backlog(backlog: Backlog) -> None:
    for journal in (A, B):
        backlog.add(journal, 90)
    assert backlog.held == 0
    backlog.add(C, 21)
    assert [is_held(backlog, journal) for journal in (A, B, C, "journal/d")] == [True, True, True, False]
    assert "max_unpersisted_bytes is 200" in backlog.problem(C, URL)
    # A journal continues as soon as it has no backlog, and is held again as soon as it has.
    backlog.remove(C, 21)
    assert not is_held(backlog, C)
    backlog.add(C, 1)
    assert is_held(backlog, C)
    backlog.remove(C, 1)
    backlog.remove(B, 29)  # 151 are left.
    assert is_held(backlog, A)
    backlog.remove(B, 1)
    assert backlog.held == 0


def test_without_bounds_nothing_is_held(clock: ManualClock) -> None:
    backlog = Backlog(clock)
    backlog.add(A, 1 << 60)
    assert not is_held(backlog, A)


def test_a_journal_is_held_while_its_store_keeps_refusing_its_fragments(clock: ManualClock) -> None:
    seen: list[str] = []
    backlog = Backlog(clock, on_store=seen.append)
    backlog.add(A, 10)
    for attempt in range(1, FAILING_ATTEMPTS):
        backlog.failed(A, URL, attempt, "403: no")
    assert (is_held(backlog, A), backlog.refused_by(URL), seen) == (False, 0, [])
    backlog.failed(A, URL, FAILING_ATTEMPTS, "403: no")
    assert (backlog.refused_by(URL), backlog.refused_by(OTHER), seen) == (1, 0, [URL])
    assert "403: no" in backlog.problem(A, URL)
    assert "10 bytes" in backlog.problem(A, URL)
    # Other journals, and another store of this journal, are not affected.
    assert not is_held(backlog, B)
    assert backlog.problem(A, OTHER) == ""
    assert backlog.holds(A)
    backlog.stored(A)
    assert (is_held(backlog, A), backlog.refused_by(URL), seen, backlog.holds(A)) == (False, 0, [URL, URL], False)


def test_a_journal_whose_backlog_is_gone_is_released(backlog: Backlog) -> None:
    """For example because it was deleted, or other brokers stored the fragments."""
    backlog.add(A, 10)
    backlog.failed(A, URL, FAILING_ATTEMPTS, "403: no")
    backlog.remove(A, 10)
    assert (backlog.held, backlog.refused_by(URL)) == (0, 0)


async def test_an_append_waits_for_a_limited_time_for_the_backlog_to_shrink(
    backlog: Backlog, clock: ManualClock
) -> None:
    assert await backlog.wait_for_capacity(A, URL) == ""
    backlog.add(A, 101)
    waiting = asyncio.create_task(backlog.wait_for_capacity(A, URL))
    await asyncio.sleep(0)
    backlog.remove(A, 10)
    await asyncio.sleep(0)
    assert not waiting.done()
    backlog.remove(A, 20)
    assert await waiting == ""

    backlog.add(A, 30)
    clock.advance(TIMEOUT_SECONDS)
    assert "101 bytes" in await backlog.wait_for_capacity(A, URL), "later appends do not wait again"


async def test_a_changed_route_ends_the_wait(backlog: Backlog) -> None:
    backlog.add(A, 101)
    signal = Signal()
    waiting = asyncio.create_task(backlog.wait_for_capacity(A, URL, signal))
    await asyncio.sleep(0)
    signal.fire()
    with pytest.raises(Invalidated):
        await waiting
    with pytest.raises(Invalidated):
        await backlog.wait_for_capacity(A, URL, signal)
    assert not backlog._waiters
