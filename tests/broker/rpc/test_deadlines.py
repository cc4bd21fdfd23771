"""Deadlines of many clients, looked at together."""

from __future__ import annotations

import asyncio

import pytest

from coranto.testing.sim.loop import SimLoop
from coranto_broker.rpc.deadlines import DeadlineQueue
from tests.broker.virtual import virtually


class Checked:
    """Looks at its client at a time of the test's choice, and says that it did."""

    def __init__(self, after: float, deadlines: DeadlineQueue) -> None:
        self.looks: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.due = asyncio.get_running_loop().time() + after
        self.closed = False
        deadlines.add(self)

    def close(self) -> None:
        self.closed = True

    def check(self) -> None:
        self.looks.set_result(None)


def test_each_client_is_looked_at_in_its_time_unless_it_is_done_by_then() -> None:
    async def main(loop: SimLoop) -> None:
        deadlines = DeadlineQueue()
        first, done, last = Checked(0.01, deadlines), Checked(0.02, deadlines), Checked(0.03, deadlines)
        done.close()
        await first.looks
        assert loop.time() == pytest.approx(0.01)
        assert not last.looks.done()
        await last.looks
        assert loop.time() == pytest.approx(0.03)
        assert not done.looks.done()
        again = Checked(0.01, deadlines)  # The timer had nobody left to look at.
        await again.looks

    virtually(main)


async def test_those_that_are_done_are_forgotten_without_a_timer() -> None:
    deadlines = DeadlineQueue()
    for _ in range(100):
        Checked(60, deadlines).close()
    assert len(deadlines._waiting) == 1
