"""Atomic applications: all messages of a journal under one acknowledgement are consumed in one transaction."""

from __future__ import annotations

import random
from collections.abc import Callable, Container

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.runtime import column_intake, inputs
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.runtime.transaction import DeferToNextTransaction

SHORT = 1e-6
"""The seconds of a transaction. Without `atomic`, each one ends after its first message or batch."""


class Crash(Exception):
    """An error of the application, which ends the shard."""


@pytest.fixture(params=["messages", "batches"])
def in_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Container[str]:
    monkeypatch.setattr(column_intake, "MAX_ROWS", 2)
    return ("in/one", "in/two") if request.param == "batches" else ()


@pytest.fixture
def store_url(new_store: Callable[[str], str]) -> str:
    return new_store("sqlite")


@pytest.fixture
def sums(sums):
    sums.atomic = True
    return sums


def spec(ring_buffer_size: int = 0):
    return shard_spec("shard-sums", ["in/one", "in/two"], max_seconds=SHORT, ring_buffer_size=ring_buffer_size)


async def publish_sets(journals, chosen: random.Random) -> list[set[int]]:
    """Publish interleaved sets of two producers to two journals. Return the sets of each journal."""
    producers, numbers, sets = [journals.producer() for _ in range(2)], iter(range(1, 10_000)), []
    open_sets: list[dict[str, set[int]]] = [{}, {}]
    for _ in range(60):
        at = chosen.randrange(2)
        journal = chosen.choice(["in/one", "in/two"])
        n = next(numbers)
        producers[at].add(journal, {"key": "a", "n": n})
        open_sets[at].setdefault(journal, set()).add(n)
        if chosen.random() < 0.3:
            await journals.flush(producers[at])
        if chosen.random() < 0.15:
            await journals.commit(producers[at])
            sets += open_sets[at].values()
            open_sets[at] = {}
    for producer, left in zip(producers, open_sets, strict=True):
        await journals.commit(producer)
        sets += left.values()
    return sets


@pytest.mark.parametrize("seed", range(12))
async def test_no_transaction_has_a_part_of_a_set_after_any_crash(journals, client, sums, seed):
    chosen = random.Random(seed)
    sets = await publish_sets(journals, chosen)
    heads = {name: journals.head(name) for name in ("in/one", "in/two")}
    left = chosen.randrange(1, 15)

    def crash(message: dict[str, object]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash

    sums.before = crash
    crashes = 0
    while True:
        sums.transactions[-1] = []
        try:
            async with running_shard(sums, spec(chosen.choice([0, 1, 4])), client) as shard:
                await shard.read_through(heads)
                await shard.finish()
        except Crash:
            crashes += 1
            left = chosen.randrange(1, 15) if crashes < 8 else -1
        else:
            break
    assert crashes
    for transaction in sums.transactions:
        for each in sets:
            assert each <= set(transaction) or not each & set(transaction), (each, transaction)
    everything = set().union(*sets)
    assert sums.sums() == {"a": (sum(everything), len(everything))}


async def test_without_atomic_a_long_set_is_split(journals, client, sums):
    sums.atomic = False
    head = await journals.publish("in/one", *({"key": "a", "n": n} for n in range(1, 7)))
    async with running_shard(sums, spec(), client) as shard:
        await shard.read_through({"in/one": head})
    assert len(sums.transactions) > 2


@pytest.mark.parametrize("ring_buffer_size", [0, 1])
async def test_a_set_longer_than_the_limit_ends_the_shard_before_any_of_it(
    journals, client, sums, monkeypatch, ring_buffer_size
):
    monkeypatch.setattr(inputs, "ATOMIC_BYTES", 600)
    first = await journals.publish("in/one", {"key": "a", "n": 1})
    builder = journals.producer()
    for n in range(2, 12):
        builder.add("in/one", {"key": "a", "n": n})
    await journals.commit(builder)
    problem = (
        rf"atomic: producer {bytes(builder.producer).hex()} has committed a set of messages in the \d+ bytes "
        rf"\[{first}, {journals.head('in/one')}\) of journal in/one, and a transaction .* takes 600"
    )
    with pytest.raises(InvalidInput, match=problem):
        async with running_shard(sums, spec(ring_buffer_size), client) as shard:
            await shard.read_through({"in/one": journals.head("in/one")})
    assert sums.sums().get("a", (1, 1)) == (1, 1), "a part of the set was committed"


async def test_only_the_first_message_of_a_set_can_be_deferred(journals, client, sums, in_batches):
    def defer(message: dict[str, object]) -> None:
        if message["n"] == 3 and sums.transactions[-1]:
            raise DeferToNextTransaction

    sums.before = defer
    await journals.publish("in/one", {"key": "a", "n": 1})
    head = await journals.publish("in/one", *({"key": "a", "n": n} for n in range(3, 9)))
    async with running_shard(sums, shard_spec("shard-sums", ["in/one"], max_seconds=600), client) as shard:
        await shard.read_through({"in/one": head})
    assert sums.transactions == [[1], [3, 4, 5, 6, 7, 8], []]
    head = await journals.publish("in/one", *({"key": "a", "n": n} for n in (0, 0, 3, 4)))
    with pytest.raises(InvalidInput, match="deferred a message within a set"):
        async with running_shard(sums, shard_spec("shard-sums", ["in/one"], max_seconds=600), client) as shard:
            await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (34, 7)}
