"""The order of appends: a waiting append blocks later ones to its journal, and no others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from coranto.client import AppendResult
from coranto.errors import JournalNotFound, PermissionDenied
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.appends import OrderedAppends


class Brokers:
    """Journals that accept appends while `open` is set."""

    def __init__(self) -> None:
        self.content: defaultdict[str, bytes] = defaultdict(bytes)
        self.appends = 0
        self.open = asyncio.Event()
        self.open.set()
        self.failure: Exception | None = None

    async def append(self, journal: str, pieces: Any, within: Any) -> AppendResult:
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        self.appends += 1
        begin = len(self.content[journal])
        self.content[journal] += b"".join(pieces)
        return AppendResult(journal, begin, len(self.content[journal]), b"", pb.LabelSet(), pb.Header())


@pytest.fixture
async def brokers() -> Brokers:
    return Brokers()


async def test_each_append_gets_its_end_and_small_appends_are_combined(brokers):
    appends = OrderedAppends(brokers.append)
    ends = [appends.add("a", b"12"), appends.add("a", b"345"), appends.add("b", b"6")]
    assert not any(end.done() for end in ends)

    assert await asyncio.gather(*ends) == [2, 5, 1]
    assert brokers.content == {"a": b"12345", "b": b"6"}
    assert brokers.appends == 2
    assert all(end.done() for end in ends)


async def test_no_state_is_kept_for_journals_without_pending_appends(brokers):
    appends = OrderedAppends(brokers.append)
    await asyncio.gather(*(appends.add(f"journal-{number}", b"1") for number in range(10)))
    await asyncio.sleep(0)
    assert appends._lanes == {}
    assert await appends.add("journal-1", b"2") == 2


async def test_an_append_that_waits_for_a_commit_blocks_only_its_journal(brokers):
    appends = OrderedAppends(brokers.append)
    committed = asyncio.get_running_loop().create_future()
    ack = appends.add("a", b"ack1 ", after=committed)
    next_transaction = appends.add("a", b"next ")
    elsewhere = appends.add("b", b"next ")
    await elsewhere
    assert (ack.done(), next_transaction.done()) == (False, False)
    assert brokers.content == {"b": b"next "}

    committed.set_result(None)
    await next_transaction
    assert brokers.content["a"] == b"ack1 next "


async def test_an_append_that_waits_for_a_failed_commit_is_dropped(brokers):
    appends = OrderedAppends(brokers.append)
    committed = asyncio.get_running_loop().create_future()
    ack = appends.add("a", b"ack1 ", after=committed)
    later = appends.add("a", b"next ")
    committed.cancel()
    for done in (ack, later):
        with pytest.raises((asyncio.CancelledError, ConnectionAbortedError)):
            await done
    assert brokers.content == {}


async def test_nothing_is_appended_after_a_failure(brokers):
    appends = OrderedAppends(brokers.append)
    brokers.failure = JournalNotFound("append to a")
    with pytest.raises(JournalNotFound):
        await appends.add("a", b"1")
    brokers.failure = None
    with pytest.raises(JournalNotFound):
        await appends.add("a", b"2")
    assert brokers.content == {}
    brokers.failure = PermissionDenied("append to b")
    with pytest.raises(PermissionDenied):
        await appends.add("b", b"3")


async def test_waiting_for_capacity_ends_after_the_appends(brokers):
    appends = OrderedAppends(brokers.append)
    brokers.open.clear()
    appends.add("a", b"12345")
    waiting = asyncio.create_task(appends.wait_for_capacity(5))
    done, _ = await asyncio.wait([waiting], timeout=0.02)
    assert not done
    brokers.open.set()
    await asyncio.wait_for(waiting, 60)


async def test_closing_drops_pending_content(brokers):
    appends = OrderedAppends(brokers.append)
    brokers.open.clear()
    pending = appends.add("a", b"1")
    await appends.close()
    with pytest.raises((asyncio.CancelledError, ConnectionAbortedError)):
        await pending
    assert brokers.content == {}
