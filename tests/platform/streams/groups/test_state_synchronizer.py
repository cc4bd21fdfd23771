"""State shared by compare-and-append, under concurrency, lost answers, lost registers and lost history."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter

from coranto import labels
from coranto.client import JournalClient
from coranto.client.values import AppendResult
from coranto.errors import AppendOutcomeUnknown, CorruptData, InvalidInput, OffsetJump, StreamNotFound
from coranto.streams.groups.state_synchronizer import REVISION_LABEL, SNAPSHOT_LABEL, StateSynchronizer
from coranto.streams.model.stream import HELD_LABEL
from coranto.testing import Cluster
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from tests.platform.streams.stream_world import lose_records

JOURNAL = "s/readers/group"


@dataclass(frozen=True)
class Words:
    words: tuple[str, ...] = ()


class Model:
    states = TypeAdapter(Words)
    updates = TypeAdapter(str)

    def apply(self, state: Words, update: str) -> Words:
        if update in state.words:
            raise InvalidInput(f"{update} is there already")
        return Words((*state.words, update))


class Faulty:
    """A client that loses some of its appends, before or after they are applied."""

    def __init__(self, client: JournalClient, faults: Callable[[], str]) -> None:
        self._client = client
        self._faults = faults
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, journal: str, content: bytes | Sequence[bytes], **options: Any) -> AppendResult:
        fault = self._faults()
        if fault != "before":
            result = await self._client.append(journal, content, **options)
        if fault:
            self.lost += 1
            raise AppendOutcomeUnknown(f"append to {journal}")
        return result


def synchronizer(loop: SimLoop, client: Any, *, snapshot_every: int = 1000) -> StateSynchronizer[Words, str]:
    return StateSynchronizer(
        client, JOURNAL, Model(), snapshot_every=snapshot_every, clock=SimClock(loop), entropy=loop.rng.randbytes
    )


def run(main: Callable[[SimLoop, Cluster], Coroutine[Any, Any, None]], *, brokers: int = 1, seed: int = 0) -> None:
    """Run in virtual time, with a journal for the state."""

    async def whole(loop: SimLoop) -> None:
        async with Cluster(brokers=brokers) as cluster:
            await cluster.create(JOURNAL)
            await main(loop, cluster)

    with simulated(seed) as loop:
        loop.run_until_complete(whole(loop))
        assert not loop.unnoticed()


def add(word: str) -> Callable[[Words], str | None]:
    return lambda state: None if word in state.words else word


@pytest.mark.parametrize("seed", range(3))
def test_concurrent_initializations_and_updates_agree(seed: int) -> None:
    async def main(loop: SimLoop, cluster: Cluster) -> None:
        rng = random.Random(seed)
        faulty = [
            Faulty(cluster.client(name=f"c{n}"), lambda: rng.choice(["", "", "", "before", "after"])) for n in range(4)
        ]
        each = [synchronizer(loop, client, snapshot_every=7) for client in faulty]
        begun = await asyncio.gather(*(one.initialize(Words((f"begin{n}",))) for n, one in enumerate(each)))
        assert len(set(begun)) == 1, "all must find the same initial state"

        async def change(number: int) -> None:
            for turn in range(6):
                await each[number].update(add(f"{number}.{turn}"))

        await asyncio.gather(*map(change, range(4)))
        states = [await one.fetch() for one in each]
        assert len(set(states)) == 1
        words = states[0].words
        assert words[0] == begun[0].words[0]
        assert sorted(words[1:]) == sorted(f"{n}.{turn}" for n in range(4) for turn in range(6))
        for n in range(4):
            assert [word for word in words if word.startswith(f"{n}.")] == [f"{n}.{turn}" for turn in range(6)]
        assert sum(client.lost for client in faulty) > 5
        late = synchronizer(loop, cluster.client())
        assert await late.load() == states[0]

    run(main, seed=seed)


def test_an_update_sees_the_newest_state_and_may_be_refused_by_it() -> None:
    async def main(loop: SimLoop, cluster: Cluster) -> None:
        one, other = (synchronizer(loop, cluster.client()) for _ in range(2))
        await one.initialize(Words())
        await other.load()
        await one.update(add("word"))
        seen: list[Words] = []

        def decide(state: Words) -> str:
            seen.append(state)
            return "word"

        with pytest.raises(InvalidInput, match="already"):
            await other.update(decide)
        assert seen[-1] == Words(("word",))
        assert (await other.update(lambda state: None)).words == ("word",)

    run(main)


def test_states_yields_each_state() -> None:
    async def main(loop: SimLoop, cluster: Cluster) -> None:
        one, other = (synchronizer(loop, cluster.client()) for _ in range(2))
        await one.initialize(Words())
        await other.load()
        states = other.states()
        assert await anext(states) == Words()
        for n in range(3):
            await one.update(add(str(n)))
            async with asyncio.timeout(10):
                assert (await anext(states)).words[-1] == str(n)
        await other.update(add("own"))
        assert (await anext(states)).words[-1] == "own"
        await states.aclose()

    run(main)


def test_a_snapshot_replaces_earlier_content() -> None:
    async def main(loop: SimLoop, cluster: Cluster) -> None:
        client = cluster.client()
        one = synchronizer(loop, client, snapshot_every=3)
        await one.initialize(Words())
        for n in range(7):
            await one.update(add(str(n)))
        (info,) = (await client.list(f"name={JOURNAL}")).journals
        mark = int(labels.value_of(info.spec.labels, SNAPSHOT_LABEL))
        content = await client.read_all(JOURNAL, mark, await client.head(JOURNAL))
        assert content.count(b"\n") == 2, "a snapshot after the sixth update, and the seventh"
        late = synchronizer(loop, client)
        read: list[int] = []
        real = client.read

        def noting(journal: str, offset: int = 0, **options: Any) -> Any:
            read.append(offset)
            return real(journal, offset, **options)

        client.read = noting  # type: ignore[method-assign]
        assert await late.load() == one.state
        assert read == [mark]

    run(main)


def test_content_older_than_the_snapshot_may_be_removed() -> None:
    async def main(loop: SimLoop, cluster: Cluster) -> None:
        client = cluster.client()
        one, behind = synchronizer(loop, client), synchronizer(loop, client)
        await one.initialize(Words())
        await behind.load()
        for n in range(3):
            await one.update(add(str(n)))
        await one.compact()
        (info,) = (await client.list(f"name={JOURNAL}")).journals
        mark = int(labels.value_of(info.spec.labels, SNAPSHOT_LABEL))
        real = client.read

        def truncated(journal: str, offset: int = 0, **options: Any) -> Any:
            # Simulates that all fragments below the snapshot are removed.
            if offset < mark:
                raise OffsetJump(journal, offset, mark)
            return real(journal, offset, **options)

        client.read = truncated  # type: ignore[method-assign]
        assert await behind.fetch() == one.state
        assert (await behind.update(add("more"))).words == ("0", "1", "2", "more")

    run(main)


def test_after_a_loss_of_registers_no_earlier_decision_is_applied() -> None:
    async def main(loop: SimLoop, cluster: Cluster) -> None:
        client = cluster.client()
        one, other = synchronizer(loop, client), synchronizer(loop, client)
        await one.initialize(Words())
        await one.update(add("before"))
        await other.load()
        outdated = (await client.append(JOURNAL, b"")).registers
        for number in range(2):
            await cluster.stop(number)
        # They stored everything and noted the registers in etcd, which is lost, too.
        lose_records(cluster, JOURNAL)
        for number in range(2):
            await cluster.start(number)
        await cluster.ready(JOURNAL)
        head = await client.head(JOURNAL)
        assert not (await client.append(JOURNAL, b"", offset=head)).registers.labels, "an operator resets the head"

        assert (await one.update(add("after"))).words == ("before", "after")
        registers = (await client.append(JOURNAL, b"")).registers
        assert labels.value_of(registers, HELD_LABEL) == "true"
        assert labels.value_of(registers, REVISION_LABEL) != labels.value_of(outdated, REVISION_LABEL)
        # The other one still uses the old register.
        assert (await other.update(add("other"))).words == ("before", "after", "other")
        assert await synchronizer(loop, client).load() == other.state

    run(main, brokers=2)


def test_content_that_is_not_a_record_is_corrupt() -> None:
    async def main(loop: SimLoop, cluster: Cluster) -> None:
        client = cluster.client()
        one = synchronizer(loop, client)
        with pytest.raises(StreamNotFound):
            await one.load()
        with pytest.raises(InvalidInput, match="not loaded"):
            _ = one.state
        await one.initialize(Words())
        await client.append(JOURNAL, b'{"revision":"x","after":"y","update":"word"}\n')
        with pytest.raises(CorruptData, match="based on 'y'"):
            await one.fetch()

    run(main)
