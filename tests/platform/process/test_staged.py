"""Contexts that start in steps: completed steps are undone, even after a failure."""

from __future__ import annotations

import pytest

from coranto.process.staged import StagedContext


class Steps(StagedContext):
    """Takes three steps, and fails at `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.done: list[str] = []

    async def _start(self) -> None:
        for number in range(3):
            if number == self.fails_at:
                raise KeyboardInterrupt
            self.done.append(f"begin {number}")
            self._exits.callback(self.done.append, f"end {number}")


async def test_steps_are_undone_in_reverse_order_at_the_end_of_the_context() -> None:
    steps = Steps()
    async with steps:
        assert steps.done == ["begin 0", "begin 1", "begin 2"]
    assert steps.done[3:] == ["end 2", "end 1", "end 0"]


@pytest.mark.parametrize("fails_at", [0, 1, 2])
async def test_a_failed_step_undoes_the_previous_steps(fails_at: int) -> None:
    steps = Steps(fails_at)
    with pytest.raises(KeyboardInterrupt):
        async with steps:
            raise AssertionError("the context started")
    assert steps.done[fails_at:] == [f"end {number}" for number in reversed(range(fails_at))]
