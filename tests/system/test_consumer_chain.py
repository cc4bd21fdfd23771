"""Three consumers in a chain of real processes have exact sums although the processes are killed all the time.

`python -m tests.chain --minutes 30` runs it for a longer time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chain.chain import ChainOptions
from tests.chain.model import ExpectedStream, of_stream
from tests.chain.nemesis import HANDS
from tests.chain.run import run_chain
from tests.chain.verdict import differences

SECONDS = 2
KILLS = 2
"""Kills of brokers, and of consumers. Harm continues until then, and until each kind of harm has happened."""
ALERTS = 10


@pytest.mark.timeout(900)
async def test_sums_are_exact_after_kills_of_all_kinds(tmp_path: Path) -> None:
    outcome = await run_chain(tmp_path, ChainOptions(seed=7), SECONDS, kills=KILLS, alerts=ALERTS)
    assert outcome.problems == []
    assert outcome.harm.keys() == {harm.__name__ for hand in HANDS.values() for harm in hand}
    assert min(outcome.kills.values()) >= KILLS
    verdict = outcome.verdict
    assert min(verdict.transactions.values()) > 0
    assert verdict.numbers > 500
    assert verdict.alerts > ALERTS


def expected(*numbers: int) -> ExpectedStream:
    made = ExpectedStream("s")
    for n in numbers:
        made.number(n, last=False)
    return made


@pytest.mark.parametrize(
    "found",
    [
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10],
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 9],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 11],
    ],
    ids=["lost", "twice", "out of order", "another"],
)
def test_the_verdict_reports_a_wrong_stream(found: list[int]) -> None:
    right, wrong = expected(*range(1, 11)), expected(*found)
    assert differences("clean", of_stream(right.cleaned), of_stream(right.cleaned)) == []
    (line,) = differences("clean", of_stream(right.cleaned), of_stream(wrong.cleaned))
    assert line.startswith("clean: s: ")
    assert right.digest != wrong.digest


def test_the_verdict_names_missing_streams() -> None:
    lines = differences("store", {f"s{n}": [n] for n in range(5)}, {"s9": [1]})
    assert lines == [
        "store: s0: 1 expected, 0 found",
        "store: s1: 1 expected, 0 found",
        "store: s2: 1 expected, 0 found",
        "store: 3 more streams differ",
    ]
