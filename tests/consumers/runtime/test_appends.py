"""The order of appends: what waits holds up what is behind it in its journal, and nothing else."""

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
    """Journals that take appends while they are open."""

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


async def test_each_piece_is_told_where_it_ends_and_small_ones_go_together(brokers):
    appends = OrderedAppends(brokers.append)
    ends = [appends.add("a", b"12"), appends.add("a", b"345"), appends.add("b", b"6")]
    assert not any(end.done() for end in ends)

    assert await asyncio.gather(*ends) == [2, 5, 1]
    assert brokers.content == {"a": b"12345", "b": b"6"}
    assert brokers.appends == 2
    assert all(end.done() for end in ends)


async def test_nothing_is_kept_of_journals_that_have_all_they_were_given(brokers):
    appends = OrderedAppends(brokers.append)
    await asyncio.gather(*(appends.add(f"journal-{number}", b"1") for number in range(10)))
    await asyncio.sleep(0)
    assert appends._lanes == {}
    assert await appends.add("journal-1", b"2") == 2


async def test_what_waits_for_a_commit_holds_up_its_journal_only(brokers):
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


async def test_what_waits_for_a_commit_that_fails_is_never_appended(brokers):
    appends = OrderedAppends(brokers.append)
    committed = asyncio.get_running_loop().create_future()
    ack = appends.add("a", b"ack1 ", after=committed)
    later = appends.add("a", b"next ")
    committed.cancel()
    for done in (ack, later):
        with pytest.raises((asyncio.CancelledError, ConnectionAbortedError)):
            await done
    assert brokers.content == {}


async def test_nothing_is_appended_behind_a_failure(brokers):
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


async def test_room_is_waited_for(brokers):
    appends = OrderedAppends(brokers.append)
    brokers.open.clear()
    appends.add("a", b"12345")
    waiting = asyncio.create_task(appends.wait_for_room(5))
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
