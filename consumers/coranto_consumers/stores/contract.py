"""Contract tests of stores. Run them against your own store.

In a test module, with pytest and pytest-asyncio::

    from coranto_consumers.stores.contract import StoreContract, StoreSubject

    class MySubject(StoreSubject):
        async def open(self): return MyStore(self.folder)
        async def add(self, store, number): store.numbers.append(number)
        async def numbers(self, store): return list(store.numbers)

    class TestMyStore(StoreContract):
        @pytest.fixture
        def subject(self, tmp_path):
            return MySubject(tmp_path)
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from coranto.errors import Fenced
from coranto.messages import Checkpoint, ProducerId, ProducerState, Source
from coranto_consumers.stores.base import Store

SHARD = "contract-shard"
_TIMEOUT_S = 30


class StoreSubject(ABC):
    """Adapter between the tests and a store implementation. Each subject stores the state of one shard."""

    @abstractmethod
    async def open(self) -> Store:
        """Open a new store over the same state, as another process does when the shard is assigned to it.

        It must not notify the earlier stores of this subject.
        """

    @abstractmethod
    async def add(self, store: Any, number: int) -> None:
        """Add a number to the state in the current transaction."""

    @abstractmethod
    async def numbers(self, store: Any) -> Sequence[int]:
        """Return the numbers in the state that the owner sees, in any order."""


def checkpoint(offset: int) -> Checkpoint:
    """Return a checkpoint that uses every field."""
    producers = {ProducerId(b"\x01abcde"): ProducerState(1 << 63, offset), ProducerId(b"\x03abcde"): ProducerState(17)}
    return Checkpoint(
        {"a/journal": Source(offset, producers), "b/journal": Source(offset)}, {"c/journal": b"\x00ack\n"}
    )


async def commit(store: Store, offset: int, wait_for: Sequence[Awaitable[object]] = (), *, shard: str = SHARD) -> None:
    """Commit the current transaction, and wait until it is durable."""
    async with asyncio.timeout(_TIMEOUT_S):
        await (await store.start_commit(shard, checkpoint(offset), wait_for))


@pytest.mark.asyncio
class StoreContract:
    """The contract tests. Subclass as `Test…`, and define the fixture `subject`."""

    @pytest.fixture
    def subject(self) -> StoreSubject:
        raise NotImplementedError("define the fixture `subject` in the subclass")

    async def owner(self, subject: StoreSubject) -> tuple[Any, Checkpoint]:
        """Return a new owner and the checkpoint that it restored."""
        store = await subject.open()
        return store, await store.restore_checkpoint(SHARD)

    async def found(self, subject: StoreSubject) -> tuple[list[int], Checkpoint]:
        """Return the numbers and the checkpoint that a new owner finds."""
        store, restored = await self.owner(subject)
        try:
            return sorted(await subject.numbers(store)), restored
        finally:
            await store.destroy()

    async def test_at_first_there_is_nothing(self, subject: StoreSubject) -> None:
        assert await self.found(subject) == ([], Checkpoint())

    async def test_effects_and_checkpoint_commit_together(self, subject: StoreSubject) -> None:
        store, _ = await self.owner(subject)
        for number in (1, 2, 3):
            await subject.add(store, number)
            await commit(store, 100 * number)
        await store.destroy()
        assert await self.found(subject) == ([1, 2, 3], checkpoint(300))

    async def test_a_transaction_may_have_no_effects(self, subject: StoreSubject) -> None:
        store, _ = await self.owner(subject)
        await commit(store, 100)
        await store.destroy()
        assert await self.found(subject) == ([], checkpoint(100))

    async def test_uncommitted_changes_are_dropped(self, subject: StoreSubject) -> None:
        store, _ = await self.owner(subject)
        await subject.add(store, 1)
        await commit(store, 100)
        await subject.add(store, 2)
        await store.destroy()
        assert await self.found(subject) == ([1], checkpoint(100))

    async def test_the_owner_sees_its_own_changes(self, subject: StoreSubject) -> None:
        store, _ = await self.owner(subject)
        await subject.add(store, 1)
        await commit(store, 100)
        await subject.add(store, 2)
        assert sorted(await subject.numbers(store)) == [1, 2]
        await store.destroy()

    async def test_a_commit_waits_for_the_given_awaitables(self, subject: StoreSubject) -> None:
        store, _ = await self.owner(subject)
        await subject.add(store, 1)
        published: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        committing = asyncio.ensure_future(await store.start_commit(SHARD, checkpoint(100), [published]))
        done, _ = await asyncio.wait([committing], timeout=0.1)
        assert not done
        published.set_result(None)
        async with asyncio.timeout(_TIMEOUT_S):
            await committing
        await store.destroy()
        assert await self.found(subject) == ([1], checkpoint(100))

    async def test_nothing_commits_if_an_awaitable_fails(self, subject: StoreSubject) -> None:
        store, _ = await self.owner(subject)
        await subject.add(store, 1)
        published: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        published.set_exception(ZeroDivisionError("the append failed"))
        with pytest.raises(ZeroDivisionError):
            await commit(store, 100, [published])
        await store.destroy()
        assert await self.found(subject) == ([], Checkpoint())

    async def test_the_next_transaction_is_not_part_of_a_pending_commit(self, subject: StoreSubject) -> None:
        store, _ = await self.owner(subject)
        await subject.add(store, 1)
        published: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        committing = asyncio.ensure_future(await store.start_commit(SHARD, checkpoint(100), [published]))
        adding = asyncio.create_task(subject.add(store, 2))  # May have to wait for the commit.
        await asyncio.sleep(0)
        published.set_result(None)
        async with asyncio.timeout(_TIMEOUT_S):
            await committing
            await adding
        await store.destroy()
        assert await self.found(subject) == ([1], checkpoint(100))

    async def test_a_former_owner_cannot_commit(self, subject: StoreSubject) -> None:
        old, _ = await self.owner(subject)
        await subject.add(old, 1)
        await commit(old, 100)
        new, restored = await self.owner(subject)
        assert restored == checkpoint(100)
        with pytest.raises(Fenced):
            await self._add_and_commit(subject, old, 2, 200)
        await subject.add(new, 3)
        await commit(new, 300)
        await old.destroy()
        await new.destroy()
        assert await self.found(subject) == ([1, 3], checkpoint(300))

    async def test_a_former_owner_with_a_waiting_commit_cannot_commit(self, subject: StoreSubject) -> None:
        """The old owner starts to commit before the new owner restores the checkpoint, and continues afterwards."""
        old, _ = await self.owner(subject)
        published: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        committing = asyncio.ensure_future(await old.start_commit(SHARD, checkpoint(100), [published]))
        new, restored = await self.owner(subject)
        assert restored == Checkpoint()
        published.set_result(None)
        with pytest.raises(Fenced):
            async with asyncio.timeout(_TIMEOUT_S):
                await committing
        await old.destroy()
        await subject.add(new, 1)
        await commit(new, 200)
        await new.destroy()
        assert await self.found(subject) == ([1], checkpoint(200))

    async def test_destroying_is_quiet_after_a_failure(self, subject: StoreSubject) -> None:
        old, _ = await self.owner(subject)
        new, _ = await self.owner(subject)
        with pytest.raises(Fenced):
            await self._add_and_commit(subject, old, 1, 100)
        await old.destroy()
        await new.destroy()

    @staticmethod
    async def _add_and_commit(subject: StoreSubject, store: Store, number: int, offset: int) -> None:
        await subject.add(store, number)
        await commit(store, offset)
