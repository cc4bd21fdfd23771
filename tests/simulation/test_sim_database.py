"""The simulated database behaves as servers do, in locks, fences, and commits whose answer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from coranto.errors import Fenced, SqlStoreError
from coranto.messages import Checkpoint, Source
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.network import Network
from coranto.testing.sim.timeline import Process
from tests.simulation.consumers.database import IDLE_SECONDS, NODE, DatabaseFaults, SimDatabase, SimSqlStore
from tests.simulation.consumers.history import Entry

SHARD = "sql-0"


class Setting:
    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.network = Network(loop, loop.rng)
        self.database = SimDatabase(loop, self.network)
        self.steps: list[str] = []
        self.on_step: Callable[[str], None] = self.steps.append

    def owner(self, name: str) -> tuple[SimSqlStore, Process]:
        process = Process(self.loop, name)
        clock = SimClock(self.loop, process)
        return SimSqlStore(self.database, name, process, clock, lambda step: self.on_step(step)), process

    async def restored(self, name: str) -> tuple[SimSqlStore, Process]:
        store, process = self.owner(name)
        await store.restore_checkpoint(SHARD)
        return store, process

    @property
    def tokens(self) -> list[str]:
        return self.database.row(SHARD).book.tokens


def checkpoint(token: str) -> Checkpoint:
    return Checkpoint({"in/0": Source(100)}, {"out/0": token.encode()})


async def commit(store: SimSqlStore, token: str) -> None:
    store.record(Entry(f"m-{token}", "in/0", "01", 1, "ant", 5, token))
    store.end_transaction(token)
    await (await store.start_commit(SHARD, checkpoint(token), ()))


def run(scenario: Callable[[Setting], Awaitable[None]], seeds: int = 5) -> None:
    async def main(loop: SimLoop) -> None:
        await scenario(Setting(loop))

    for seed in range(seeds):
        with simulated(seed) as loop:
            loop.run_until_complete(main(loop))


def test_committed_state_is_restored() -> None:
    async def scenario(setting: Setting) -> None:
        store, _ = await setting.restored("one")
        await commit(store, "0.0")
        other, _ = setting.owner("other")
        assert await other.restore_checkpoint(SHARD) == checkpoint("0.0")
        assert (other.book.tokens, other.book.sums) == (["0.0"], {"ant": [1, 5]})
        assert setting.steps == ["fence", "update", "commit", "fence"]

    run(scenario)


def test_a_former_owner_cannot_commit() -> None:
    async def scenario(setting: Setting) -> None:
        old, _ = await setting.restored("old")
        await setting.restored("new")
        with pytest.raises(Fenced):
            await commit(old, "0.0")
        assert setting.tokens == []

    run(scenario)


def test_a_commit_with_a_lost_answer_is_found_applied() -> None:
    async def scenario(setting: Setting) -> None:
        store, _ = await setting.restored("one")

        def lose(step: str) -> None:
            setting.database.faults = DatabaseFaults(lose_answer=float(step == "commit"))
            if step == "commit":
                setting.loop.later(1.0, setattr, setting.database, "faults", DatabaseFaults())

        setting.on_step = lose
        await commit(store, "0.0")
        assert setting.tokens == ["0.0"]

    run(scenario)


def test_a_commit_with_a_lost_request_is_found_unapplied() -> None:
    async def scenario(setting: Setting) -> None:
        store, _ = await setting.restored("one")

        def lose(step: str) -> None:
            setting.database.faults = DatabaseFaults(lose_request=float(step == "commit"))
            if step == "commit":
                setting.loop.later(1.0, setattr, setting.database, "faults", DatabaseFaults())

        setting.on_step = lose
        with pytest.raises(SqlStoreError, match="was not applied"):
            await commit(store, "0.0")
        assert setting.tokens == []

    run(scenario)


def test_a_paused_lock_holder_blocks_the_next_owner_until_its_session_ends() -> None:
    async def scenario(setting: Setting) -> None:
        old, process = await setting.restored("old")
        setting.on_step = lambda step: process.pause() if step == "update" else None
        hanging = process.start(commit(old, "0.0"))
        await asyncio.sleep(1.0)
        began = setting.loop.time()
        while True:
            try:
                new, _ = await setting.restored("new")
                break
            except SqlStoreError:
                assert setting.loop.time() < began + 2 * IDLE_SECONDS
        assert setting.loop.time() > began + IDLE_SECONDS / 2
        await commit(new, "1.0")
        setting.on_step = setting.steps.append
        process.resume()
        with pytest.raises((Fenced, SqlStoreError)):
            await hanging
        assert setting.tokens == ["1.0"]

    run(scenario)


def test_a_late_commit_is_applied_only_before_another_owner_restores() -> None:
    outcomes = set()

    async def scenario(setting: Setting) -> None:
        old, _ = await setting.restored("old")

        def cut(step: str) -> None:
            if step == "commit":
                setting.loop.later(7.0, setting.network.cut("old", NODE))  # Cut now, for 7 s.

        setting.on_step = cut
        committing = asyncio.ensure_future(commit(old, "0.0"))
        await asyncio.sleep(6.0)
        setting.on_step = setting.steps.append
        while True:
            try:
                new, _ = await setting.restored("new")
                break
            except SqlStoreError:
                await asyncio.sleep(0.1)
        found = list(new.book.tokens)
        await asyncio.gather(committing, return_exceptions=True)
        await asyncio.sleep(30.0)
        assert setting.tokens == found
        outcomes.add(bool(found))

    run(scenario, seeds=40)
    assert outcomes == {True, False}
