"""Bulk transactions: events appended by several processes are committed together and once, despite losses."""

from __future__ import annotations

import os
import time
from array import array
from dataclasses import replace
from typing import Any

import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import AppendOutcomeUnknown, CommitUnknown, CorruptData, Fenced, InvalidInput, Unavailable
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerClock, build_uuid, new_producer_id
from coranto.streams.control.decisions import REVISION_LABEL
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Split
from coranto.streams.model.events import BytesEvents
from coranto.streams.model.keys import key_hash
from coranto.streams.model.stream import transactions_journal
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.multi_key import decision_log
from coranto.streams.writer.multi_key.bulk import BulkCommitter
from coranto.streams.writer.multi_key.bulk_parts import EVENTS, BulkPart
from coranto.testing.cluster import STORE_URL
from coranto.wire import protocol_pb2 as pb

TEMPLATE = default_template(stores=[STORE_URL])


async def appended(client: JournalClient, journal: str, numbers: range, key: str = "customer-1") -> BulkPart:
    """Append pending events of one key, and return the part that a process would report."""
    producer, first = new_producer_id(os.urandom), ProducerClock(time.time_ns).tick()
    clocks = [first + at * CLOCK_TICK for at in range(len(numbers))]
    events = [EVENTS.encode({"n": n}) for n in numbers]
    stamped = [
        EVENTS.stamp(event, build_uuid(producer, clock, Flags.CONTINUE_TXN))
        for event, clock in zip(events, clocks, strict=True)
    ]
    begin = (await client.append(journal, b"".join(stamped))).begin
    places = array("Q", [key_hash(key)] * len(numbers)).tobytes()
    last = clocks[-1]
    return BulkPart(journal, producer, begin, first, last, len(numbers), places)


async def numbers(client: JournalClient) -> list[int]:
    reader: StreamReader[Any] = StreamReader(client, "orders")
    async with reader:
        return [event.data["n"] async for event in reader]


class Lossy:
    """A client that loses the answer to one append that contains a word, applied or not."""

    def __init__(self, client: JournalClient, word: bytes, *, applied: bool) -> None:
        self._client = client
        self._word = word
        self._applied = applied
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, journal: str, content: Any, **options: Any) -> Any:
        if self.lost or self._word not in (content if isinstance(content, bytes) else b"".join(content)):
            return await self._client.append(journal, content, **options)
        self.lost += 1
        if self._applied:
            await self._client.append(journal, content, **options)
        raise AppendOutcomeUnknown("the answer is lost")


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("writer", ["", "query-1"])
async def test_a_decision_whose_answer_is_lost_is_made_once(
    streams: Streams, client: JournalClient, writer: str, applied: bool
) -> None:
    stream = await streams.create("orders", 1, template=TEMPLATE)
    [segment] = stream.active()
    lossy: Any = Lossy(client, b'"decided"', applied=applied)
    committer = BulkCommitter(lossy, "orders")
    await committer.prepare()

    assert await committer.commit([await appended(client, segment.journal, range(5))], writer=writer)

    assert lossy.lost == 1
    assert await numbers(client) == list(range(5))
    decisions = transactions_journal("orders")
    content = await client.read_all(decisions, 0, await client.head(decisions))
    assert content.count(b'"decided"') == 1


@pytest.mark.parametrize("writer", ["", "query-1"])
async def test_a_possibly_decided_transaction_is_not_rolled_back(
    streams: Streams, client: JournalClient, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [segment] = (await streams.create("orders", 1, template=TEMPLATE)).active()
    lossy: Any = Lossy(client, b'"decided"', applied=True)
    committer = BulkCommitter(lossy, "orders")
    part = await appended(client, segment.journal, range(5))
    real = lossy.append

    async def silent(journal: str, content: Any, **options: Any) -> Any:
        if lossy.lost:
            raise Unavailable("nothing answers")
        return await real(journal, content, **options)

    monkeypatch.setattr(lossy, "append", silent, raising=False)
    with pytest.raises(CommitUnknown, match="may be committed or not: the answer is lost"):
        await committer.commit([part], writer=writer)

    if writer:  # Commit the same parts again while the register cannot be read.

        async def silent_decisions(journal: str, content: Any, **options: Any) -> Any:
            if journal == transactions_journal("orders"):
                raise Unavailable("nothing answers")
            return await client.append(journal, content, **options)

        monkeypatch.setattr(lossy, "append", silent_decisions)
        with pytest.raises(Unavailable, match="nothing answers"):
            await committer.commit([part], writer=writer)

    await BulkCommitter(client, "orders").prepare()
    assert await numbers(client) == list(range(5))
    if writer:
        assert not await BulkCommitter(client, "orders").commit([part], writer=writer)
        assert await numbers(client) == list(range(5))


async def test_failed_acknowledgements_are_appended_before_later_ones(streams: Streams, client: JournalClient) -> None:
    [segment] = (await streams.create("orders", 1, template=TEMPLATE)).active()
    first = await appended(client, segment.journal, range(5))
    lossy: Any = Lossy(client, first.acknowledgement, applied=False)
    assert await BulkCommitter(lossy, "orders").commit([first], writer="q")
    assert await numbers(client) == []

    committer = BulkCommitter(client, "orders")
    assert await committer.commit([await appended(client, segment.journal, range(5, 9))], writer="q", batch=1)

    assert await numbers(client) == list(range(9))
    assert not await committer.commit([await appended(client, segment.journal, range(5, 9))], writer="q", batch=1)
    with pytest.raises(Fenced):
        await committer.commit([], writer="q", batch=0)
    assert await numbers(client) == list(range(9))


async def test_parts_keep_their_order_when_they_are_moved(streams: Streams, client: JournalClient) -> None:
    [segment] = (await streams.create("orders", 1, template=TEMPLATE)).active()
    parts = [await appended(client, segment.journal, range(at, at + 3)) for at in (0, 3)]
    # A late append whose answer was lost.
    await client.append(segment.journal, await client.read_all(segment.journal, parts[0].begin, parts[1].begin))
    stream = await streams.scale("orders", [Split(0)])
    own = stream.segment_of("customer-1")
    assert own is not None
    parts.append(await appended(client, own.journal, range(6, 9)))

    assert await BulkCommitter(client, "orders").commit(parts)

    assert await numbers(client) == list(range(9))


async def test_missing_events_in_a_sealed_segment_fail_the_transaction(streams: Streams, client: JournalClient) -> None:
    [segment] = (await streams.create("orders", 1, template=TEMPLATE)).active()
    part = await appended(client, segment.journal, range(5))
    lacking = replace(part, events=6, last_clock=part.last_clock + CLOCK_TICK, places=(part.places or b"") + bytes(8))
    await streams.scale("orders", [Split(0)])

    with pytest.raises(CorruptData, match="has 5 of 6 events"):
        await BulkCommitter(client, "orders").commit([lacking])
    assert await numbers(client) == []


async def test_an_outdated_listing_is_not_used(
    streams: Streams, client: JournalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await streams.create("orders", 1, template=TEMPLATE)
    part = await appended(client, before.active()[0].journal, range(5))
    await streams.scale("orders", [Split(0)])
    real, outdated = Streams.describe, [before, before]

    async def describe(self: Streams, name: str) -> Any:
        return outdated.pop() if outdated else await real(self, name)

    monkeypatch.setattr(Streams, "describe", describe)
    assert await BulkCommitter(client, "orders").commit([part])

    assert not outdated
    assert await numbers(client) == list(range(5))


@pytest.mark.parametrize("register", ["1.9999999", "9999999", "{own:x}.9999999"])
async def test_a_listing_of_a_restored_etcd_need_not_reach_a_revision_of_another_etcd(
    streams: Streams, client: JournalClient, monkeypatch: pytest.MonkeyPatch, register: str
) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    scaled = await streams.scale("orders", [Split(0)])
    log = decision_log.DecisionLog(client, "orders", retry_timeout=5.0, clock=None, entropy=os.urandom)
    opened = await log.decisions.gate()
    assert (opened.revision, opened.cluster) == (
        max(each.mod_revision for each in scaled.segments.values()),
        scaled.cluster,
    )
    union = labels.label_set({REVISION_LABEL: register.format(own=scaled.cluster)})
    await client.append(log.decisions.journal, b"{}\n", union_registers=union)
    monkeypatch.setattr(decision_log, "_LISTING_SECONDS", 0.0)

    if register.startswith("1."):
        assert (await log.snapshot()).stream == scaled
    else:
        with pytest.raises(Unavailable, match="stream orders changed at etcd revision 9999999"):
            await log.snapshot()


async def test_invalid_batches_of_a_writer_are_refused(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    with pytest.raises(InvalidInput, match="'a b' cannot name a writer of batches"):
        await BulkCommitter(client, "orders").commit([], writer="a b")
    await streams.create("bytes", 1, template=TEMPLATE, content_type=BytesEvents().content_type)
    with pytest.raises(InvalidInput, match="the events of bytes are application/x-protobuf-fixed, not lines of JSON"):
        await BulkCommitter(client, "bytes").prepare()
    register = pb.LabelSet(labels=[pb.Label(name="coranto.dev/batch/q", value="nonsense")])
    await client.append(transactions_journal("orders"), b"{}\n", union_registers=register)
    with pytest.raises(CorruptData, match="the register of a writer's last batch is 'nonsense'"):
        await BulkCommitter(client, "orders").commit([], writer="q")
