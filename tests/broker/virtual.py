"""Virtual time for unit tests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from coranto.testing.sim.loop import SimLoop, simulated


def virtually(main: Callable[[SimLoop], Coroutine[Any, Any, None]]) -> None:
    """Run in virtual time, where only waiting takes time."""
    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(main(loop))
        assert not loop.problems
