"""Forks in the simulated world: seeds are sound and cover the interesting paths, and planted bugs are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from coranto.forks import choosing
from coranto.fragments.forks import Share
from coranto.fragments.fragment import MAX_OFFSET
from tests.simulation.broker.forks import options_for, run

SEEDS = 6
INTERESTING = {
    "a fork was complete",
    "a fork of a fork was complete",
    "a fork shares fragments",
    "a fork begins later than its source",
    "a fork was dropped",
    "fork: RpcFailed",
    "making a fork was given up midway",
    "retention has removed content of the source",
}
Patches = Callable[[ExitStack], None]


def test_forks_have_the_content_of_their_sources_under_faults() -> None:
    coverage: Counter[str] = Counter()
    for seed in range(4):
        report = run(options_for(seed))
        assert report.sound, str(report)
        coverage += report.coverage
    assert not {what for what in INTERESTING if not coverage[what]}


def _retention_ignores_holds(stack: ExitStack) -> None:
    stack.enter_context(patch("coranto_broker.fragments.retention.held_from", lambda spec: MAX_OFFSET))


def _forks_list_beyond_the_shared_end(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Share, "contains", lambda self, fragment: self.begin <= fragment.begin))


def _heads_are_below_the_shared_end(stack: ExitStack) -> None:
    stack.enter_context(patch("coranto_broker.replication.replica.fork_of", lambda spec: None))
    stack.enter_context(patch("coranto_broker.specs.forks._check_new", lambda *_: None))

    def without_offset(*args: Any, **options: Any) -> Any:
        spec = choosing.new_spec(*args, **options)
        spec.suspend.offset = 0
        return spec

    stack.enter_context(patch("coranto.forks.creating.new_spec", without_offset))


def _sources_may_be_deleted(stack: ExitStack) -> None:
    stack.enter_context(patch("coranto_broker.handlers.apply.fork_guards", lambda *_: []))


@pytest.mark.parametrize(
    "plant",
    [
        _retention_ignores_holds,
        _forks_list_beyond_the_shared_end,
        _heads_are_below_the_shared_end,
        _sources_may_be_deleted,
    ],
)
def test_planted_bugs_are_found(plant: Patches) -> None:
    with ExitStack() as stack:
        plant(stack)
        assert any(not run(options_for(seed)).sound for seed in range(SEEDS))
