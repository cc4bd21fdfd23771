"""A fork has each transaction completely or not at all, and keeps the order of keys, whenever it is made."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from coranto.client import FragmentInfo, JournalClient
from coranto.errors import InvalidInput, OffsetJump, StreamChanged, StreamExists, StreamNotFound, WriterExpired
from coranto.forks import fork_of, forks_of
from coranto.fragments.forks import holds_of
from coranto.messages.framing import Envelope
from coranto.messages.reading import AsyncReadUncommitted
from coranto.messages.uuids import Flags
from coranto.streams.control import forking
from coranto.streams.control.fork_units import torn_units
from coranto.streams.control.forking import fork_stream
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Merge, Split
from coranto.streams.model.events import JsonEvents
from coranto.streams.model.fork_cut import consistent_cut
from coranto.streams.model.stream import Stream, segment_journal
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.multi_key.writer import MultiKeyWriter
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.testing import Cluster
from coranto.testing.cluster import STORE_URL

TEMPLATE = default_template(stores=[STORE_URL])
KEYS = ("a", "customer-1", "")  # In the last, first and first of four quarters of the key space.


async def committed(client: JournalClient, name: str) -> list[dict[str, Any]]:
    """Return all events that readers get, without `_meta`."""
    async with StreamReader[Any](client, name) as reader:
        return [{k: v for k, v in event.data.items() if k != "_meta"} async for event in reader]


async def write(writer: MultiKeyWriter[Any], number: int) -> None:
    async with writer.transaction() as txn:
        for at, key in enumerate(KEYS):
            txn.write(key, {"txn": number, "at": at})


class Died(Exception):
    """The process died here."""


class Mortal:
    """A client of a process that dies at its n-th append with content."""

    def __init__(self, client: JournalClient, last: int) -> None:
        self._client = client
        self._left = last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, journal: str, content: Any, **options: Any) -> Any:
        if content:
            self._left -= 1
            if self._left < 0:
                raise Died
        return await self._client.append(journal, content, **options)


async def test_a_fork_has_all_segments_and_is_independent_of_its_source(
    streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 1, template=TEMPLATE, max_writers=7)
    async with StreamWriter[Any](client, "orders", writer_id="w") as writer:
        for n in range(5):
            await writer.write_event("a", {"n": n})
        await streams.scale("orders", [Split(0, 2)])
        async with writer.transaction("a") as txn:
            txn.write({"n": 5})
            txn.write({"n": 6})
    before = await streams.describe("orders")

    made = await fork_stream(client, "orders", "what-if")

    assert made.stream.name == "what-if"
    assert [(each.number, each.range, each.predecessors, each.sealed_at) for each in made.stream.segments.values()] == [
        (each.number, each.range, each.predecessors, each.sealed_at) for each in before.segments.values()
    ]
    assert made.stream.max_writers == 7
    assert [each["n"] for each in await committed(client, "what-if")] == list(range(7))
    assert await fork_stream(client, "orders", "what-if") == made, "a repetition finds it"

    async with StreamWriter[Any](client, "orders", writer_id="w") as writer:
        await writer.write_event("a", {"n": "theirs"})
    async with StreamWriter[Any](client, "what-if") as writer:
        await writer.write_event("a", {"n": "ours"})
    await streams.scale("what-if", [Merge((1, 2))])
    async with MultiKeyWriter[Any](client, "what-if") as both:
        await write(both, 9)
    assert [each["n"] for each in await committed(client, "orders")] == [*range(7), "theirs"]
    found = await committed(client, "what-if")
    assert [each["n"] for each in found if "n" in each] == [*range(7), "ours"]
    assert Counter(each["txn"] for each in found if "txn" in each) == {9: 3}
    (successor,) = (await streams.describe("what-if")).active()
    (info,) = (await client.list(f"name={successor.journal}")).journals
    assert fork_of(info.spec) is None, "a successor has no labels of a fork"

    with pytest.raises(InvalidInput, match="the stream what-if was forked from it and shares its fragments"):
        await streams.delete("orders")
    await streams.delete("what-if")
    assert await forks_of(client, segment_journal("orders", 0)) == ()
    await streams.delete("orders")
    assert (await client.list()).journals == ()


async def test_source_and_fork_are_truncated_and_shared_content_remains(
    streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    async with StreamWriter[Any](client, "orders") as writer:
        await writer.write_event("a", {"n": 0})
        await streams.scale("orders", [Split(0, 2)])
        await writer.write_event("a", {"n": 1})
        await fork_stream(client, "orders", "what-if")
        await streams.scale("orders", [Split(1, 2)])
        await writer.write_event("a", {"n": 2})
        await streams.scale("what-if", [Merge((1, 2))])
    source = await streams.describe("orders")
    heads = await streams.heads(source)
    truncated = await streams.truncate("orders", {each.number: heads[each.number] for each in source.active()})
    assert truncated.segments.keys() == source.segments.keys(), "the fork shares the content of the first ones"
    assert all(each.begin == each.sealed_at for each in truncated.segments.values() if each.sealed_at is not None)
    assert await committed(client, "orders") == []
    assert [each["n"] for each in await committed(client, "what-if")] == [0, 1]

    made = await streams.truncate("what-if", {3: 0})
    assert made.segments.keys() == {3}
    listing = await client.list("name:prefix=orders/")
    assert [info.name for info in listing.journals if holds_of(info.spec)] == [], "nothing is held without a fork"
    assert (await streams.truncate("orders", {each.number: 0 for each in source.active()})).segments.keys() == {
        each.number for each in source.active()
    }
    await streams.delete("orders")
    assert await committed(client, "what-if") == []


async def test_decisions_of_a_deleted_stream_are_not_used_by_a_fork_of_its_name(
    cluster: Cluster, streams: Streams, client: JournalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    async with StreamWriter[Any](client, "orders") as writer:
        await writer.write_event("a", {"n": 0})
    with monkeypatch.context() as patch:
        patch.setattr(forking, "MAX_SEGMENTS", 1)
        with pytest.raises(InvalidInput, match=r"has 2 segments, and at most 1 can be forked; truncate it first"):
            await fork_stream(client, "orders", "what-if")
    assert (await client.list("name:prefix=what-if/")).journals == (), "a stream that is too large is not forked"
    await fork_stream(client, "orders", "what-if")
    await streams.scale("what-if", [Merge((0, 1))])  # Its decisions contain a gate end now.
    await cluster.stop(0)  # The broker stores its local content.
    await cluster.start(0)
    await streams.delete("what-if")
    with pytest.raises(StreamExists, match=r"content of an earlier stream what-if \(what-if/transactions\)"):
        await fork_stream(client, "orders", "what-if")
    assert (await client.list("name:prefix=what-if/")).journals == (), "the forks are dropped"
    assert await forks_of(client, segment_journal("orders", 0)) == ()
    assert (await fork_stream(client, "orders", "what-else")).stream.segments.keys() == {0, 1}


async def test_a_fork_does_not_know_writer_ids_of_its_source(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    async with StreamWriter[Any](client, "orders", writer_id="w") as writer:
        await writer.write_event("a", {"n": 0})
    await fork_stream(client, "orders", "what-if")
    async with StreamWriter[Any](client, "what-if", writer_id="w") as writer:
        with pytest.raises(WriterExpired):
            await writer.write_event("a", {"n": 1})
    assert [each["n"] for each in await committed(client, "what-if")] == [0]


async def test_a_fork_commits_exactly_the_transactions_a_dead_writer_decided(
    streams: Streams, client: JournalClient
) -> None:
    found: list[int] = []
    for last in itertools.count(1):
        name, fork = f"orders-{last}", f"fork-{last}"
        await streams.create(name, 2, template=TEMPLATE)
        mortal: Any = Mortal(client, last)
        survived = False
        try:
            writer: MultiKeyWriter[Any] = MultiKeyWriter(mortal, name, retry_timeout=1)
            await writer.open()
            await write(writer, 0)
            survived = True
        except Died:
            pass
        await fork_stream(client, name, fork)
        events = await committed(client, fork)
        assert sorted(each["at"] for each in events) in ([], [0, 1, 2])
        await streams.resume(name)
        assert await committed(client, name) == events, "as in the source"
        async with MultiKeyWriter[Any](client, fork) as another:
            await write(another, 1)
        assert Counter(each["txn"] for each in await committed(client, fork)) == {
            **({0: 3} if events else {}),
            1: 3,
        }, "a transaction of the fork commits no open one of the source"
        found.append(len(events))
        if survived:
            break
    assert (found[0], found[-1]) == (0, 3)
    assert found == sorted(found)


async def test_forks_during_writes_and_scaling_tear_no_transaction(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    done = asyncio.Event()

    async def several_keys() -> int:
        count = 0
        async with MultiKeyWriter[Any](client, "orders") as writer:
            while not done.is_set():
                await write(writer, count)
                count += 1
        return count

    async def one_key(key: str) -> int:
        count = 0
        async with StreamWriter[Any](client, "orders", writer_id=f"w-{key}") as writer:
            while not done.is_set():
                async with writer.transaction(key) as txn:
                    for at in range(3):
                        txn.write({"key": key, "count": count, "at": at})
                count += 1
        return count

    async def scale() -> int:
        count = 0
        while not done.is_set() and count < 5:
            first, second, *_ = (await streams.describe("orders")).active()
            change = Merge((first.number, second.number)) if count % 2 else Split(first.number, 2)
            with contextlib.suppress(StreamChanged):
                await streams.scale("orders", [change])
                count += 1
        return count

    async def fork() -> list[str]:
        try:
            return [(await fork_stream(client, "orders", f"fork-{number}")).stream.name for number in range(3)]
        finally:
            done.set()

    counted, scaled, _, _, names = await asyncio.gather(
        several_keys(), scale(), one_key("a"), one_key("customer-1"), fork()
    )
    assert counted > 1
    assert scaled > 1
    source = await committed(client, "orders")
    seen = 0
    for name in names:
        events = await committed(client, name)
        assert set(Counter(each["txn"] for each in events if "txn" in each).values()) <= {3}
        for key in ("a", "customer-1"):
            mine = [(each["count"], each["at"]) for each in events if each.get("key") == key]
            assert mine == [(n // 3, n % 3) for n in range(len(mine))], "in order and whole"
            assert len(mine) % 3 == 0
        assert len(events) >= seen, "later forks have more"
        seen = len(events)
        assert all(event in source for event in events)


async def uncommitted(client: JournalClient, stream: Stream, number: int) -> list[Envelope[Any]]:
    journal = stream.segments[number].journal
    chunks = client.read(journal, 0, end_offset=await client.head(journal))
    return [each async for each in AsyncReadUncommitted(JsonEvents(), journal, chunks, 0)]


@pytest.mark.exhaustive
async def test_a_fork_at_any_offsets_has_only_whole_transactions(streams: Streams, client: JournalClient) -> None:
    stream = await streams.create("orders", 2, template=TEMPLATE)
    async with MultiKeyWriter[Any](client, "orders") as several, StreamWriter[Any](client, "orders") as single:
        for number in range(2):
            await write(several, number)
            async with single.transaction("a") as txn:
                txn.write({"one": number})
                txn.write({"one": number})
    ends = {number: [0, *(each.end for each in await uncommitted(client, stream, number))] for number in (0, 1)}
    places = [*list(itertools.product(ends[0][::2], ends[1][::2])), (ends[0][-1], ends[1][-1] - 3)]
    sizes = set()
    for count, (first, second) in enumerate(places):
        wanted = {segment_journal("orders", 0): first, segment_journal("orders", 1): second}
        made = await fork_stream(client, "orders", f"fork-{count}", ends=wanted)
        assert made.cut[0] <= first
        assert made.cut[1] <= second
        events = await committed(client, f"fork-{count}")
        assert set(Counter(each["txn"] for each in events if "txn" in each).values()) <= {3}
        assert set(Counter(each["one"] for each in events if "one" in each).values()) <= {2}
        async with StreamWriter[Any](client, f"fork-{count}") as writer:
            async with writer.transaction("a") as txn:
                txn.write({"new": True})
        assert len(await committed(client, f"fork-{count}")) == len(events) + 1
        sizes.add(len(events))
    assert min(sizes) == 0
    assert max(sizes) > 5
    with pytest.raises(InvalidInput, match="segment 0 ends at"):
        await fork_stream(client, "orders", "beyond", ends={segment_journal("orders", 0): 1 << 40})


class Retained:
    """A client of journals whose first content was removed by retention, which removes more at each read."""

    def __init__(self, client: JournalClient, begins: dict[str, list[int]]) -> None:
        self._client = client
        self._begins = begins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def fragments(self, journal: str) -> list[FragmentInfo]:
        begin = self._begins.get(journal, [0])[0]
        found = [each for each in await self._client.fragments(journal) if each.fragment.end > begin]
        return [replace(each, fragment=replace(each.fragment, begin=max(begin, each.fragment.begin))) for each in found]

    def read(self, journal: str, offset: int = 0, **options: Any) -> Any:
        begins = self._begins.get(journal, [0])
        if len(begins) > 1:
            begins.pop(0)
        if offset < begins[0]:
            assert options["fail_on_jump"]
            raise OffsetJump(journal, offset, begins[0])
        return self._client.read(journal, offset, **options)


async def test_retention_tears_no_transaction_of_a_fork_of_an_earlier_time(
    streams: Streams, client: JournalClient
) -> None:
    stream = await streams.create("orders", 2, template=TEMPLATE)
    async with MultiKeyWriter[Any](client, "orders") as several:
        for number in range(3):
            await write(several, number)
    stream, heads = await streams.cut("orders")
    found = {number: await uncommitted(client, stream, number) for number in heads}
    # The first acknowledgement of each segment belongs to no transaction.
    acks = {
        number: [each.end for each in events if each.flags == Flags.ACK_TXN][1:] for number, events in found.items()
    }
    wanted = {number: ends[-1] - 1 for number, ends in acks.items()}

    async def cut(begins: dict[int, list[int]]) -> dict[int, int]:
        retained: Any = Retained(client, {segment_journal("orders", n): offsets for n, offsets in begins.items()})
        units = await torn_units(retained, stream, heads, wanted, JsonEvents(), os.urandom)
        return consistent_cut(stream, wanted, units)

    whole = await cut({})
    assert all(ends[1] == whole[number] < ends[2] for number, ends in acks.items())
    assert await cut({0: [acks[0][0]]}) == whole
    assert await cut({0: [0, acks[0][0]], 1: [acks[1][0], acks[1][1]]}) == whole, (
        "also if it removes content during the cut"
    )
    with pytest.raises(OffsetJump):
        await cut({0: list(range(0, acks[0][0], 5))})


async def test_an_interrupted_fork_continues_at_its_cut(
    streams: Streams, client: JournalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    async with MultiKeyWriter[Any](client, "orders") as writer:
        await write(writer, 0)
        with monkeypatch.context() as broken:

            async def die(*_: object) -> None:
                raise Died

            broken.setattr(forking, "_become_stream", die)
            with pytest.raises(Died):
                await fork_stream(client, "orders", "what-if")
            with pytest.raises(Died):
                await fork_stream(client, "orders", "other")
        with pytest.raises(StreamNotFound):
            await streams.describe("what-if")
        await write(writer, 1)
    await streams.scale("orders", [Split(0, 2), Split(1, 2)])
    await fork_stream(client, "orders", "what-if")
    assert Counter(each["txn"] for each in await committed(client, "what-if")) == {0: 3}
    assert len((await streams.describe("what-if")).active()) == 2
    # A late call does not mistake decisions of the fork for decisions of an earlier stream.
    infos = [info for info in (await client.list("name:prefix=what-if/segment/")).journals if fork_of(info.spec)]
    part = (await client.list("name=what-if/transactions")).journals[0].spec
    late = [replace(info, mod_revision=info.mod_revision - 1) for info in infos]
    await streams.scale("what-if", [Merge((0, 1))])
    with pytest.raises(StreamChanged, match="another process forks the stream what-if too"):
        await forking._add_parts(client, "what-if", [part], late)
    assert Counter(each["txn"] for each in await committed(client, "what-if")) == {0: 3}
    await streams.delete("other")
    assert [info.name for info in (await client.list("name:prefix=other/")).journals] == []
    with pytest.raises(StreamExists):
        await fork_stream(client, "what-if", "orders")
