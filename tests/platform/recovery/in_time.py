"""Damage tables in virtual time: a plan does not depend on the time it is made, and its advice is followed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from coranto.recovery import Plan, Recovery, StepKind
from coranto.testing.sim.loop import SimLoop, simulated

HOUR = 3600.0


def kinds_of(plan: Plan) -> tuple[list[StepKind], list[str]]:
    """Return the kinds of a plan's steps and losses."""
    return [step.kind for step in plan.steps], [loss.kind for loss in plan.losses]


async def plans_at_all_times(
    plan: Callable[[], Awaitable[Plan]],
    expected: tuple[list[StepKind], list[str]],
    *,
    listed: float,
    before_each: Callable[[], Awaitable[object]],
) -> Plan:
    """Plan immediately, after brokers have listed their stores again, and an hour later. Return the first plan.

    All plans must be equal and have the same hash. Stores are listed within `listed` seconds. `before_each` runs before
    each later plan.
    """
    immediate = await plan()
    assert kinds_of(immediate) == expected, immediate
    for wait in (listed, HOUR):
        await asyncio.sleep(wait)
        await before_each()
        later = await plan()
        assert kinds_of(later) == expected, later
        assert later.hash == immediate.hash, (later, immediate)
    return immediate


def assert_succeeded(done: Recovery) -> None:
    """Assert that a recovery has completed all steps, and left a sound state."""
    left = [result.problem for result in done.results], done.remaining.steps, done.report and done.report.errors
    assert done.succeeded, left


def play(story: Coroutine[Any, Any, None]) -> None:
    """Run a story in virtual time."""
    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(story)
        assert isinstance(loop, SimLoop)
        assert not loop.problems
