"""A shard at work over a broker and a store: what it consumes counts once, whatever happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from sqlalchemy import BigInteger, Column, MetaData, String, Table

from coranto.errors import CorruptMessage, Fenced, JournalNotFound
from coranto.messages import Checkpoint, Envelope
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.runtime.transaction import DeferToNextTransaction, EmptyTransactionDeferred
from coranto_consumers.stores import SqlShardStore
from coranto_consumers.stores.base import Store

SUMS = Table(
    "sums",
    MetaData(),
    Column("key", String(50), primary_key=True),
    Column("total", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
)
SPEC = shard_spec("shard-sums", ["in/one"], max_seconds=600)
"""Its transactions end when there is nothing more to read, whatever time passes meanwhile."""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def store_url(request: pytest.FixtureRequest, new_store: Callable[[str], str]) -> str:
    """On MariaDB the runtime is held to more by the crash matrix."""
    return new_store(request.param)


async def test_messages_are_summed_published_and_checkpointed(journals, client, sums):
    async with running_shard(sums, SPEC, client) as shard:
        head = await journals.publish("in/one", {"key": "a", "n": 1}, {"key": "b", "n": 2}, {"key": "a", "n": 3})
        await shard.read_through({"in/one": head})

        assert sums.sums() == {"a": (4, 2), "b": (2, 1)}
        assert shard.progress.publish_at == {"out/one": journals.head("out/one")}
    assert journals.committed("out/one") == [{"key": "a", "n": 1}, {"key": "b", "n": 2}, {"key": "a", "n": 3}]
    checkpoint = sums.database.read("shard-sums").checkpoint
    assert checkpoint.sources["in/one"].read_through == head
    assert set(checkpoint.ack_intents) == {"out/one"}


async def test_a_shard_goes_on_from_its_checkpoint(journals, client, sums):
    for n in range(3):
        head = await journals.publish("in/one", {"key": "a", "n": n})
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": head})

    assert sums.sums() == {"a": (3, 3)}
    assert [each["n"] for each in journals.committed("out/one")] == [0, 1, 2]
    assert sums.database.read("shard-sums").fence == 3


async def test_several_sources_are_consumed_together(journals, client, sums):
    first = await journals.publish("in/one", {"key": "a", "n": 1})
    second = await journals.publish("in/two", {"key": "a", "n": 2})

    async with running_shard(sums, shard_spec("shard-sums", ["in/one", "in/two"]), client) as shard:
        await shard.read_through({"in/one": first, "in/two": second})
    assert sums.sums() == {"a": (3, 2)}


async def test_min_offset_skips_what_lies_before(journals, client, sums):
    skipped = await journals.publish("in/one", {"key": "a", "n": 1})
    head = await journals.publish("in/one", {"key": "a", "n": 2})
    spec = shard_spec("shard-sums", ["in/one"])
    spec.sources[0].min_offset = skipped

    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (2, 1)}


async def test_pending_and_rolled_back_messages_are_not_consumed(journals, client, sums):
    abandoned = journals.producer()
    abandoned.add("in/one", {"key": "a", "n": 100})
    await journals.flush(abandoned)
    for journal, content in abandoned.rollback_intents().items():
        await journals.fake.write(journal, content)
    pending = journals.producer()
    pending.add("in/one", {"key": "a", "n": 1000})
    await journals.flush(pending)
    head = await journals.publish("in/one", {"key": "a", "n": 1})

    async with running_shard(sums, shard_spec("shard-sums", ["in/one"], disable_wait_for_ack=True), client) as shard:
        await shard.read_through({"in/one": head})
        assert sums.sums() == {"a": (1, 1)}
        await journals.commit(pending)
        await shard.read_through({"in/one": journals.head("in/one")})
    assert sums.sums() == {"a": (1001, 2)}


async def test_the_acknowledged_messages_of_a_journal_make_one_transaction(journals, client, sums):
    """The transaction stays open for the acknowledgement of what it has begun to read."""
    first, second = journals.producer(), journals.producer()
    async with running_shard(sums, shard_spec("shard-sums", ["in/one"], max_seconds=600), client) as shard:
        second.add("in/one", {"key": "a", "n": 2})
        await journals.flush(second)
        first.add("in/one", {"key": "a", "n": 1})
        await journals.commit(first)
        second.add("in/one", {"key": "a", "n": 3})
        await journals.commit(second)
        await shard.read_through({"in/one": journals.head("in/one")})

    assert sums.transactions == [[1, 2, 3], []]


async def test_transactions_larger_than_the_ring_are_replayed(journals, client, sums):
    spec = shard_spec("shard-sums", ["in/one"], ring_buffer_size=3)
    head = await journals.publish("in/one", *({"key": str(n % 7), "n": n} for n in range(50)))

    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": head})
    assert [each["n"] for each in journals.committed("out/one")] == list(range(50))
    assert sum(total for total, _ in sums.sums().values()) == sum(range(50))


@pytest.mark.parametrize("ring_buffer_size", [2, 100])
async def test_a_deferred_message_begins_the_next_transaction(journals, client, sums, ring_buffer_size):
    def defer_fours(message: dict) -> None:
        if message["n"] % 4 == 0 and sums.transactions[-1]:
            raise DeferToNextTransaction

    sums.before = defer_fours
    spec = shard_spec("shard-sums", ["in/one"], min_seconds=1, max_seconds=600, ring_buffer_size=ring_buffer_size)
    head = await journals.publish("in/one", *({"key": "a", "n": n} for n in range(1, 11)))
    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": head})

    assert sums.transactions == [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10], []]
    assert sums.sums() == {"a": (55, 10)}


async def test_deferring_the_first_message_is_an_error(journals, client, sums):
    def defer(message: dict) -> None:
        raise DeferToNextTransaction

    sums.before = defer
    await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(EmptyTransactionDeferred):
            await shard.task


async def test_an_error_of_the_application_ends_the_shard_and_rolls_back(journals, client, sums):
    def fail(message: dict) -> None:
        if message["n"] == 2:
            raise ZeroDivisionError("boom")

    head = await journals.publish("in/one", {"key": "a", "n": 1}, {"key": "a", "n": 2})
    sums.before = fail
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(ZeroDivisionError):
            await shard.task
    assert sums.sums() == {}
    assert journals.committed("out/one") == []

    sums.before = lambda message: None
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (3, 2)}
    assert [each["n"] for each in journals.committed("out/one")] == [1, 2]


async def test_a_message_that_is_none_ends_the_shard(journals, client, sums):
    await journals.fake.write("in/one", b"not json\n")
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(CorruptMessage, match="offset 0"):
            await shard.task


async def test_a_source_that_does_not_exist_ends_the_shard(client, sums):
    async with running_shard(sums, shard_spec("shard-sums", ["in/none"]), client) as shard:
        with pytest.raises(JournalNotFound, match="in/none"):
            await shard.task


async def test_a_zombie_cannot_commit_once_another_has_taken_over(journals, client, sums):
    """The race of the store fence: Old consumes, New restores, Old wants to commit."""
    blocked, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def block(message: dict) -> None:
        loop.call_soon_threadsafe(blocked.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

    class Old(type(sums)):
        def consume_message(self, shard, store, message: Envelope, publisher) -> None:
            publisher.publish("out/one", {"key": "zombie", "n": 0})
            self.before(message.message)

    head = await journals.publish("in/one", {"key": "a", "n": 1})
    old = Old(sums.database, "out/one")
    old.before = block
    async with running_shard(old, SPEC, client) as zombie:
        await blocked.wait()
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": head})
            go_on.set()
            with pytest.raises(Fenced):
                await zombie.task
            head = await journals.publish("in/one", {"key": "a", "n": 2})
            await shard.read_through({"in/one": head})

    assert sums.sums() == {"a": (3, 2)}
    assert journals.committed("out/one") == [{"key": "a", "n": 1}, {"key": "a", "n": 2}]


async def test_finishing_completes_what_was_consumed(journals, client, sums):
    await journals.publish("in/one", {"key": "a", "n": 1})
    consumed = asyncio.Event()
    loop = asyncio.get_running_loop()
    sums.before = lambda message: loop.call_soon_threadsafe(consumed.set)

    async with running_shard(sums, shard_spec("shard-sums", ["in/one"], min_seconds=60, max_seconds=60), client) as it:
        await consumed.wait()
        await it.finish()
    assert sums.sums() == {"a": (1, 1)}
    assert journals.committed("out/one") == [{"key": "a", "n": 1}]


async def test_duplicates_count_as_read_through(journals, client, sums):
    """Nothing is committed for them, and who waits for their offsets is not kept waiting."""
    await journals.publish("in/one", {"key": "a", "n": 1})
    content = journals.fake.journals["in/one"].content
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": len(content)})
        await journals.fake.write("in/one", content)
        await shard.read_through({"in/one": journals.head("in/one")})
    assert sums.sums() == {"a": (1, 1)}
    assert sums.transactions == [[1], []]


async def test_an_application_may_be_async(journals, client, sums):
    class Async(Application):
        async def new_store(self, shard):
            return SqlShardStore(sums.database, SUMS)

        async def consume_message(self, shard, store, message, publisher):
            connection = await store.begin()
            connection.execute(SUMS.insert().values(key=message.uuid, total=message.message["n"], count=1))
            publisher.publish("out/one", {"n": message.message["n"]})

        async def finalize_txn(self, shard, store, publisher):
            publisher.publish("out/one", {"n": -1})

    async with running_shard(Async(), SPEC, client) as shard:
        for n in range(3):
            head = await journals.publish("in/one", {"key": "a", "n": n})
            await shard.read_through({"in/one": head})
    assert sorted(total for total, _ in sums.sums().values()) == [0, 1, 2]
    assert [each["n"] for each in journals.committed("out/one")] == [0, -1, 1, -1, 2, -1]


async def test_recovered_acknowledgements_are_written_again_and_those_of_deleted_journals_dropped(
    journals, client, sums
):
    """A crash between commit and acknowledgement: what was committed is delivered, what came later is rolled back."""
    crashed = journals.producer()
    crashed.add("out/one", {"n": 1})
    await journals.flush(crashed)
    intents = crashed.ack_intents()
    crashed.commit()
    crashed.finish()
    crashed.add("out/one", {"n": 2})
    await journals.flush(crashed)
    assert journals.committed("out/one") == []
    fence, _ = sums.database.raise_fence("shard-sums")
    with sums.database.transaction("shard-sums", fence) as transaction:
        transaction.commit(Checkpoint({}, {**intents, "deleted/journal": b"whatever"}))

    async with running_shard(sums, SPEC, client) as shard:
        head = await journals.publish("in/one", {"key": "a", "n": 3})
        await shard.read_through({"in/one": head})
    assert [each["n"] for each in journals.committed("out/one")] == [1, 3]


class InMemory(Store):
    """A store that never makes anybody wait."""

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        return Checkpoint()

    async def start_commit(self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]):
        return asyncio.gather(*wait_for)

    async def destroy(self) -> None:
        """It holds nothing."""


async def test_an_async_application_that_never_pauses_publishes_behind_the_acknowledgement(journals, client):
    """Messages at hand are consumed as soon as a transaction begins to commit, before anything else gets to run."""

    class Eager(Application[InMemory]):
        consumed = 0

        def new_store(self, shard):
            return InMemory()

        async def consume_message(self, shard, store, message, publisher):
            if self.consumed == 1:
                raise DeferToNextTransaction
            self.consumed += 1
            publisher.publish("out/one", {"n": message.message["n"]})

        async def finalize_txn(self, shard, store, publisher):
            self.consumed = 0

    head = await journals.publish("in/one", *({"key": "a", "n": n} for n in range(5)))
    async with running_shard(Eager(), SPEC, client) as shard:
        await shard.read_through({"in/one": head})
    assert [each["n"] for each in journals.committed("out/one")] == [0, 1, 2, 3, 4]


async def test_nothing_commits_whose_messages_could_not_be_published(journals, client, sums):
    """Also when that was known before the commit began, and nothing of it was pending any more."""
    sums.output = "deleted/journal"
    spec = shard_spec("shard-sums", ["in/one"], min_seconds=0.3, max_seconds=5)
    await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(sums, spec, client) as shard:
        with pytest.raises(JournalNotFound, match="deleted/journal"):
            await shard.task
    assert sums.sums() == {}
    assert sums.database.read("shard-sums").checkpoint == Checkpoint()
