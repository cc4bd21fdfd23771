"""Servers are queried in turn, without waiting for silent ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from coranto.checkup.status.first_answer import first_answer
from coranto.errors import CorantoError, Unavailable
from coranto.testing.sim.loop import simulated

T = TypeVar("T")
NO_ANSWER = Unavailable("no broker answered")


def virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a test in virtual time."""
    with simulated(0, shuffle=False) as loop:
        return loop.run_until_complete(main())


class Servers:
    """Servers that answer, fail or are silent. Records the time of each query and the cancelled calls."""

    def __init__(self) -> None:
        self.queried: list[tuple[str, float]] = []
        self.cancelled: list[str] = []

    def server(
        self, name: str, seconds: float, error: CorantoError | None = None
    ) -> Callable[[], Coroutine[Any, Any, str]]:
        async def call() -> str:
            self.queried.append((name, asyncio.get_running_loop().time()))
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            if error is not None:
                raise error
            return name

        return call


def test_a_silent_server_delays_the_next_by_a_second_and_is_cancelled() -> None:
    servers = Servers()
    calls = [servers.server("dead", 1e6), servers.server("alive", 0.5), servers.server("unasked", 0)]

    async def main() -> tuple[str, float]:
        return await first_answer(calls, 8, NO_ANSWER), asyncio.get_running_loop().time()

    assert virtually(main) == ("alive", 1.5)
    assert servers.queried == [("dead", 0), ("alive", 1)]
    assert servers.cancelled == ["dead"]


def test_a_slow_server_may_still_answer_first() -> None:
    servers = Servers()
    assert virtually(lambda: first_answer([servers.server("a", 1.2), servers.server("b", 9)], 8, NO_ANSWER)) == "a"
    assert servers.cancelled == ["b"]


def test_a_failed_server_delays_no_other() -> None:
    servers = Servers()
    calls = [servers.server("a", 0, Unavailable("refused")), servers.server("b", 0)]
    assert virtually(lambda: first_answer(calls, 8, NO_ANSWER)) == "b"
    assert servers.queried == [("a", 0), ("b", 0)]


@pytest.mark.parametrize(
    ("seconds", "message"), [((0, 0), "b refused"), ((2, 0), "a refused"), ((1e6, 1e6), "no broker answered")]
)
def test_the_last_failure_is_raised(seconds: tuple[float, float], message: str) -> None:
    servers = Servers()
    calls = [
        servers.server(name, wait, Unavailable(f"{name} refused")) for name, wait in zip("ab", seconds, strict=True)
    ]

    async def main() -> None:
        with pytest.raises(Unavailable, match=message):
            await first_answer(calls, 8, NO_ANSWER)
        assert asyncio.get_running_loop().time() <= 8

    virtually(main)
