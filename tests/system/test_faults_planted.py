"""The checker of histories finds each planted fault in the history of a real journal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from coranto.labels import label_set
from coranto.testing import Cluster
from coranto.testing.histories import History, RecordedClient
from coranto.wire import protocol_pb2 as pb
from tests.faults.planted import PLANTS, Journal, plant
from tests.simulation.kit.checker import FinalJournal, check

JOURNAL = "planted/one"


async def recorded() -> tuple[History, bytes]:
    """Return the history of some clients, and the final content."""
    history, rng = History(), random.Random(3)

    async def work(client: RecordedClient) -> None:
        for _ in range(30):
            owners = [label_set(owner=rng.choice(("ada", "bob"))) for _ in range(2)]
            check = pb.LabelSelector(include=owners[0]) if rng.random() < 0.5 else None
            await client.append(
                JOURNAL, rng.randbytes(8).hex().encode(), check_registers=check, union_registers=owners[1]
            )
            if rng.random() < 0.2:
                await client.read(JOURNAL)

    async with Cluster(brokers=3) as cluster:
        await cluster.create(JOURNAL)
        await asyncio.gather(*(work(RecordedClient(cluster.client(), history, f"client-{n}")) for n in range(3)))
        last = await RecordedClient(cluster.client(), history, "last").read(JOURNAL)
    return history, last.content


async def test_the_checker_accepts_the_history_and_finds_each_planted_fault() -> None:
    history, content = await recorded()
    assert check(history, {JOURNAL: FinalJournal(content)}) == []
    expected: dict[Callable[[Journal], None], set[str]] = dict(
        zip(
            PLANTS,
            (
                {"lost-write"},
                {"duplicate"},
                {"not-linearizable", "register-drift", "unchecked-registers"},
                {"aborted-read"},
                {"unchecked-registers"},
                {"not-linearizable"},
                {"inconsistent-offsets"},
            ),
            strict=True,
        )
    )
    for fault, names in expected.items():
        changed, other = plant(fault, history, JOURNAL, content, 1)
        found = {each.name for each in check(changed, {JOURNAL: FinalJournal(other)})}
        assert found & names, f"{fault.__name__}: {found}"


@pytest.mark.parametrize("fault", PLANTS)
async def test_planting_a_fault_does_not_change_the_given_history(fault: Callable[[Journal], None]) -> None:
    history, content = await recorded()
    plant(fault, history, JOURNAL, content, 1)
    assert check(history, {JOURNAL: FinalJournal(content)}) == []
