"""Transactions on several keys: readers get all of their events or none, whatever dies or scales."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.errors import (
    AppendOutcomeUnknown,
    CommitUnknown,
    CorruptData,
    InvalidInput,
    MaxTransactionSizeExceeded,
    Outcome,
    StreamNotFound,
    StreamSealed,
    TransactionStateError,
    TransactionTimeout,
    Unavailable,
)
from coranto.streams.control.decisions import Decisions, replay
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Merge, Split
from coranto.streams.model.events import BytesEvents
from coranto.streams.model.stream import segment_journal, transactions_journal
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.multi_key.writer import MultiKeyWriter
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.streams.writer.transactions import TransactionState
from coranto.testing.clocks import HurriedClock
from coranto.testing.cluster import STORE_URL, Cluster

TEMPLATE = default_template(stores=[STORE_URL])
KEYS = ("a", "customer-1", "")  # In the last, first and first of four quarters of the key space.


async def committed(client: JournalClient, name: str = "orders") -> list[Any]:
    """Return all events that readers get, without `_meta`."""
    reader: StreamReader[Any] = StreamReader(client, name)
    async with reader:
        return [{k: v for k, v in event.data.items() if k != "_meta"} async for event in reader]


async def write(writer: MultiKeyWriter[Any], number: int, keys: Sequence[str] = KEYS) -> None:
    async with writer.transaction() as txn:
        for at, key in enumerate(keys):
            txn.write(key, {"txn": number, "at": at})


async def test_events_of_several_segments_are_committed_together(
    cluster: Cluster, streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 4, template=TEMPLATE)
    async with MultiKeyWriter(client, "orders") as writer:
        await write(writer, 0)
        txn = writer.transaction()
        for at in range(20):
            txn.write(KEYS[at % 2], {"txn": 1, "at": at})
        assert {each["txn"] for each in await committed(client)} == {0}, "none of it before its commit"
        before = cluster.appends()
        result = await txn.commit()
        assert cluster.appends() - before == 2 * 2 + 1, "twice for each segment, and once for the decision"
        assert [each.segment for each in result.positions] == [0, 3]
        assert (result.visible, txn.state) == (True, TransactionState.COMMITTED)
        assert await txn.commit() is result
    found = await committed(client)
    assert Counter(each["txn"] for each in found) == {0: 3, 1: 20}
    for parity in (0, 1):
        mine = [each["at"] for each in found if each["txn"] == 1 and each["at"] % 2 == parity]
        assert mine == sorted(mine), "events of a key keep their order"
    for position in result.positions:
        content = await client.read_all(position.journal, position.begin, position.end)
        assert content.count(b"\n") == 10


async def test_concurrent_transactions_share_appends(cluster: Cluster, streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    async with MultiKeyWriter[Any](client, "orders") as writer:
        await write(writer, 0)
        before = cluster.appends()
        results = []

        async def one(number: int) -> None:
            txn = writer.transaction()
            for at, key in enumerate(KEYS):
                txn.write(key, {"txn": number, "at": at})
            results.append(await txn.commit())

        await asyncio.gather(*map(one, range(1, 21)))
        assert cluster.appends() - before < 20, "20 separate transactions would take 100"
    assert Counter(each["txn"] for each in await committed(client)) == dict.fromkeys(range(21), 3)
    spans = sorted((each.segment, each.begin, each.end) for result in results for each in result.positions)
    assert all(one[2] <= other[1] for one, other in pairwise(spans) if one[0] == other[0])


async def test_uncommitted_events_are_never_written(streams: Streams, client: JournalClient) -> None:
    stream = await streams.create("orders", 2, template=TEMPLATE)
    clock = HurriedClock()
    async with MultiKeyWriter(client, "orders", clock=clock, max_transaction_bytes=500) as writer:
        txn = writer.transaction(timeout=5)
        txn.write("a", {"n": 1})
        with pytest.raises(MaxTransactionSizeExceeded, match="more than the 500"):
            txn.write("a", {"n": "x" * 500})
        txn.abort()
        txn.abort()
        assert txn.state is TransactionState.ABORTED
        for call in (txn.commit, lambda: asyncio.sleep(0, txn.write("a", {}))):
            with pytest.raises(TransactionStateError, match="is aborted"):
                await call()
        broken = writer.transaction()
        await broken.__aenter__()
        broken.write("a", {"n": 2})
        await broken.__aexit__(KeyError, KeyError(), None)
        assert broken.state is TransactionState.ABORTED
        late = writer.transaction(timeout=5)
        late.write("a", {"n": 3})
        clock.slept += 5
        with pytest.raises(TransactionTimeout, match="more than 5 s"):
            late.write("a", {"n": 4})
        with pytest.raises(TransactionTimeout):
            await late.commit()
        assert late.state is TransactionState.TIMED_OUT
        assert (await writer.transaction().commit()).positions == ()
        with pytest.raises(InvalidInput, match="seconds above 0"):
            writer.transaction(timeout=0)
        kept = writer.transaction()
        kept.write("a", {"n": 5})
    with pytest.raises(InvalidInput, match="writer is closed"):
        await kept.commit()
    assert kept.state is TransactionState.FAILED
    assert await streams.heads(stream) == {0: 0, 1: 0}
    with pytest.raises(StreamNotFound):
        await MultiKeyWriter(client, "gone").open()
    with pytest.raises(InvalidInput, match="not open yet"):
        MultiKeyWriter[Any](client, "orders").transaction().write("a", {})


async def test_a_sealed_stream_refuses_transactions(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    async with MultiKeyWriter[Any](client, "orders") as writer:
        await write(writer, 0)
        await streams.seal("orders")
        with pytest.raises(StreamSealed):
            await write(writer, 1)
    assert len(await committed(client)) == 3


async def test_bytes_and_other_writers_of_the_stream(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE, content_type=BytesEvents().content_type)
    async with (
        MultiKeyWriter[Any](client, "orders") as writer,
        StreamWriter[Any](client, "orders", writer_id="other") as other,
    ):
        for number in range(3):
            async with writer.transaction() as txn:
                txn.write("a", b"multi %d" % number)
                txn.write("", b"multi %d" % number)
            await other.write_event("a", b"single %d" % number)
            await other.write_event("", b"single %d" % number)
    reader: StreamReader[Any] = StreamReader(client, "orders")
    async with reader:
        by_segment: dict[int, list[bytes]] = {}
        async for event in reader:
            by_segment.setdefault(event.segment, []).append(event.data)
    expected = [b"%b %d" % (kind, number) for number in range(3) for kind in (b"multi", b"single")]
    assert by_segment == {0: expected, 1: expected}


# --------------------------------------------------------------------------------------------------------------- deaths


def joined(content: bytes | Sequence[bytes]) -> bytes:
    return content if isinstance(content, bytes) else b"".join(content)


class Died(Exception):
    """The process died."""


class Mortal:
    """A client whose process dies just before append number `last`."""

    def __init__(self, client: JournalClient, last: int) -> None:
        self._client = client
        self._last = last
        self.appends = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in ("append", "list"):
            return call

        async def counted(*args: Any, **options: Any) -> Any:
            self.appends += name == "append"
            if self.appends >= self._last:
                raise Died
            return await call(*args, **options)

        return counted


class Mute:
    """A client whose appends of certain content fail without being applied."""

    def __init__(self, client: JournalClient, failures: Mapping[bytes, Exception]) -> None:
        self._client = client
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, journal: str, content: Any, **options: Any) -> Any:
        for part, failure in self._failures.items():
            if part in joined(content):
                raise failure
        return await self._client.append(journal, content, **options)


class Deaf:
    """A client that loses the answer to its first append of certain content, applied or not."""

    def __init__(self, client: JournalClient, part: bytes, *, applied: bool) -> None:
        self.contents: list[bytes] = []
        """Such contents, in append order."""
        self._client = client
        self._part = part
        self._applied = applied

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, journal: str, content: Any, **options: Any) -> Any:
        if self._part not in joined(content):
            return await self._client.append(journal, content, **options)
        assert not options.get("retry_unknown")
        self.contents.append(joined(content))
        lost = len(self.contents) == 1
        result = await self._client.append(journal, content, **options) if self._applied or not lost else None
        if lost:
            raise AppendOutcomeUnknown("lost")
        return result


async def test_a_transaction_of_a_dead_writer_is_complete_or_absent(streams: Streams, client: JournalClient) -> None:
    found: list[int] = []
    last, survived = 1, False
    while not survived:
        name = f"orders-{last}"
        await streams.create(name, 2, template=TEMPLATE)
        mortal: Any = Mortal(client, last)
        try:
            writer: MultiKeyWriter[Any] = MultiKeyWriter(mortal, name, retry_timeout=1)
            await writer.open()
            await write(writer, 0)
            survived = True
        except Died:
            last += 1
        if last % 2:
            await streams.resume(name)
        else:  # Scaling finishes decided transactions, too.
            await streams.scale(name, [Merge((0, 1))])
        events = await committed(client, name)
        assert sorted(each["at"] for each in events) in ([], [0, 1, 2])
        found.append(len(events))
        async with MultiKeyWriter[Any](client, name) as another:
            await write(another, 1)
        assert Counter(each["txn"] for each in await committed(client, name))[1] == 3
        await streams.delete(name)
    assert found == sorted(found), "once it is decided, it is committed"
    assert (found[0], found[-1]) == (0, 3)


@pytest.mark.parametrize("applied", [True, False])
async def test_events_whose_answer_is_lost_are_abandoned_and_written_again(
    applied: bool, streams: Streams, client: JournalClient
) -> None:
    """They are not retried: a late copy could arrive after a reader's position and before its end is repeated."""
    await streams.create("orders", 2, template=TEMPLATE)

    deaf: Any = Deaf(client, b'"txn":0', applied=applied)
    async with MultiKeyWriter[Any](deaf, "orders") as writer:
        await write(writer, 0)
        contents = deaf.contents
        assert len(contents) == len(set(contents)) == 4, "of two segments, each time with new UUIDs"
        position = None
        async with StreamReader[Any](client, "orders") as reader:
            assert sorted([event.data["at"] async for event in reader]) == [0, 1, 2]
            position = reader.position()
        await streams.resume("orders")  # The acknowledgements are appended again,
        # and the abandoned events, too.
        await client.append(segment_journal("orders", 1 if b'"at":0' in contents[0] else 0), contents[0])
        await streams.resume("orders")
        async with StreamReader[Any](client, "orders", begin=position) as reader:
            assert [event async for event in reader] == []
    assert sorted(each["at"] for each in await committed(client)) == [0, 1, 2]


async def test_events_that_are_never_answered_are_not_committed(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE)

    mute: Any = Mute(client, {b'"n":1': AppendOutcomeUnknown("lost")})
    async with MultiKeyWriter[Any](mute, "orders", retry_timeout=0.1) as writer:
        txn = writer.transaction()
        txn.write("a", {"n": 1})
        with pytest.raises(Unavailable, match="was not committed: lost") as raised:
            await txn.commit()
        assert raised.value.outcome is Outcome.NOT_APPLIED
    assert await committed(client) == []


@pytest.mark.parametrize("applied", [True, False])
async def test_a_lost_answer_to_a_decision_is_recovered(applied: bool, streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE)

    deaf: Any = Deaf(client, b'"decided"', applied=applied)
    async with MultiKeyWriter[Any](deaf, "orders") as writer:
        await write(writer, 0)
    assert deaf.contents
    assert sorted(each["at"] for each in await committed(client)) == [0, 1, 2]
    journal = transactions_journal("orders")
    content = await client.read_all(journal, 0, await client.head(journal))
    assert content.count(b'"decided"') == 1
    assert (content.find(b'"decided"') < content.find(b'"void"')) is applied, "the first decision counts"
    assert content.count(b'"void"') == 1


async def test_without_any_answer_the_outcome_is_unknown(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE)

    failures = {b'"decided"': AppendOutcomeUnknown("lost"), b'"void"': Unavailable("nothing answers")}
    mute: Any = Mute(client, failures)
    async with MultiKeyWriter[Any](mute, "orders") as writer:
        txn = writer.transaction()
        txn.write("a", {"n": 1})
        with pytest.raises(CommitUnknown, match="may be committed or not"):
            await txn.commit()
        assert txn.state is TransactionState.FAILED
        with pytest.raises(CommitUnknown):
            await txn.commit()


# -------------------------------------------------------------------------------------------------------------- scaling


async def test_scaling_splits_no_transaction(streams: Streams, client: JournalClient) -> None:
    """Writers continue while several processes split and merge segments."""
    await streams.create("orders", 2, template=TEMPLATE)
    written: list[int] = []
    over = asyncio.Event()

    async def work(first: int) -> None:
        async with MultiKeyWriter[Any](client, "orders") as writer:
            number = first
            while not over.is_set() or number < first + 500:
                await write(writer, number)
                written.append(number)
                number += 100
            over.set()

    workers = [asyncio.create_task(work(first)) for first in range(4)]
    for _ in range(4):
        stream = await streams.describe("orders")
        stream = await streams.scale("orders", [Split(stream.active()[0].number), Split(stream.active()[-1].number)])
        low, middle, *_ = stream.active()
        await streams.scale("orders", [Merge((low.number, middle.number))])
    over.set()
    await asyncio.gather(*workers)
    found = await committed(client)
    assert Counter(each["txn"] for each in found) == dict.fromkeys(written, 3), "each completely and once"
    assert len(written) >= 20
    by_key: dict[int, list[int]] = {}
    for each in found:
        by_key.setdefault(each["at"], []).append(each["txn"])
    for order in by_key.values():
        for first in range(4):
            mine = [number for number in order if number % 100 == first]
            assert mine == sorted(mine), "in the order of each writer, for each key"


async def test_a_writer_opens_a_gate_that_was_left_closed(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    await Decisions(client, "orders", lambda size: bytes(size)).close()
    clock = HurriedClock()
    async with MultiKeyWriter[Any](client, "orders", clock=clock) as writer:
        await write(writer, 0)
    assert clock.slept >= 5
    assert len(await committed(client)) == 3


async def test_completed_transactions_are_recorded_periodically(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    decisions = Decisions(client, "orders", lambda size: bytes(size))
    async with MultiKeyWriter[Any](client, "orders") as writer:
        for number in range(5):
            await write(writer, number, ["a"])
    gate = await decisions.gate()
    recorded = await decisions.read(0, gate.end)
    assert (len(recorded.decided), len(recorded.done), recorded.undone()) == (5, 5, ())
    assert gate.settled < gate.end
    await streams.resume("orders")
    after = await decisions.gate()
    assert after.settled == gate.end
    assert await decisions.finish(after) == 0


# ------------------------------------------------------------------------------------------------------------- recovery


def test_the_first_record_of_a_transaction_decides_it() -> None:
    acks = {"orders/segment/00000000": "YWNr"}
    found = replay(
        [
            (0, {"decided": "a", "acks": acks}),
            (10, {"void": "a"}),
            (20, {"void": "b"}),
            (30, {"decided": "b", "acks": acks}),
            (40, {"decided": "c", "acks": {}}),
            (50, {"done": "c"}),
            (60, {"gate": "open-1"}),
            (70, {"settled": 60}),
            (80, {"decided": "a", "acks": {}}),
        ]
    )
    assert {txn: each.offset for txn, each in found.decided.items()} == {"a": 0, "c": 40}
    assert [each.acks for each in found.undone()] == [{"orders/segment/00000000": b"ack"}]
    assert found.void == {"b"}


@pytest.mark.parametrize(
    "record", [{"decided": "a"}, {"decided": "a", "acks": [1]}, {"decided": "a", "acks": {"b": "not base64"}}]
)
def test_an_invalid_decision_is_corrupt(record: dict[str, object]) -> None:
    with pytest.raises(CorruptData, match="the record at offset 7"):
        replay([(7, record)])


async def test_a_journal_with_other_content_is_corrupt(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", template=TEMPLATE)
    decisions = Decisions(client, "orders", lambda size: bytes(size))
    for content, problem in [(b"no json\n", "is not JSON"), (b"[1]\n", "list, not an object")]:
        begin = (await decisions.gate()).end
        await client.append(decisions.journal, content)
        with pytest.raises(CorruptData, match=problem):
            await decisions.read(begin, begin + len(content))
