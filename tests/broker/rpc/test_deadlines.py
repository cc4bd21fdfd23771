"""Deadlines of many clients, checked by one timer."""

from __future__ import annotations

import asyncio

import pytest

from coranto.testing.sim.loop import SimLoop
from coranto_broker.rpc.deadlines import DeadlineQueue
from tests.broker.virtual import virtually


class Checked:
    """Records the check of its client, due after a given time."""

    def __init__(self, after: float, deadlines: DeadlineQueue) -> None:
        self.check_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.due = asyncio.get_running_loop().time() + after
        self.closed = False
        deadlines.add(self)

    def close(self) -> None:
        self.closed = True

    def check(self) -> None:
        self.check_done.set_result(None)


def test_each_client_is_checked_when_due_unless_it_is_closed() -> None:
    async def main(loop: SimLoop) -> None:
        deadlines = DeadlineQueue()
        first, done, last = Checked(0.01, deadlines), Checked(0.02, deadlines), Checked(0.03, deadlines)
        done.close()
        await first.check_done
        assert loop.time() == pytest.approx(0.01)
        assert not last.check_done.done()
        await last.check_done
        assert loop.time() == pytest.approx(0.03)
        assert not done.check_done.done()
        again = Checked(0.01, deadlines)  # The timer had no client left.
        await again.check_done

    virtually(main)


async def test_closed_clients_are_forgotten_without_a_timer() -> None:
    deadlines = DeadlineQueue()
    for _ in range(100):
        Checked(60, deadlines).close()
    assert len(deadlines._waiting) == 1
