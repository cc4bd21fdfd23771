"""`StreamReader` on in-process brokers, in virtual time: order, whole transactions, and continuation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from coranto.client import JournalClient
from coranto.errors import InvalidInput, JournalRecreated, OffsetJump, StreamNotFound, StreamTruncated
from coranto.messages.framing import JsonObject
from coranto.messages.transactions import TransactionBuilder
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto.recovery.heads import reset_head
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Merge, Split
from coranto.streams.model.events import JsonEvents
from coranto.streams.model.positions import StreamPosition
from coranto.streams.model.stream import segment_journal
from coranto.streams.model.watermarks import TimeWindow
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.testing import Cluster
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.timeline import Process

KEYS = [f"key{n}" for n in range(8)]


class World:
    """A cluster, a stream `s` and its clients."""

    def __init__(self, loop: SimLoop, cluster: Cluster) -> None:
        self.loop = loop
        self.cluster = cluster
        self.clock = SimClock(loop)
        self.client = cluster.client()
        self.streams = Streams(self.client, clock=self.clock, entropy=loop.rng.randbytes)

    async def create(self, segments: int = 1) -> None:
        await self.streams.create("s", segments, template=default_template(stores=["file:///fragments/"]))

    def writer(self, client: JournalClient | None = None) -> StreamWriter[JsonObject]:
        return StreamWriter(client or self.client, "s", clock=self.clock, entropy=self.loop.rng.randbytes)

    def reader(self, client: JournalClient | None = None, **options: Any) -> StreamReader[JsonObject]:
        return StreamReader(client or self.client, "s", clock=self.clock, **options)

    async def lose_disk(self) -> None:
        """Lose the broker's disk and continue its journals at the ends of their stored content."""
        machine = self.cluster._machine(0)
        await self.cluster.kill(0, expire=True)
        disk = machine.disk.for_process(Process(self.cluster._world.timeline, "wiper"))
        for path in machine.disk.paths():
            disk.remove(Path(path))
        await self.cluster.start(0)
        names = (await self.client.list()).names
        await self.cluster.ready(*names)
        for name in names:
            await reset_head(self.client, name)

    async def write(self, numbers: Iterable[int], *, transactions: int = 0) -> None:
        """Write number n to key n modulo their count; with `transactions`, as a transaction of that many events."""
        async with self.writer() as writer:
            if not transactions:
                await asyncio.gather(*(writer.write_event(KEYS[n % len(KEYS)], {"n": n}) for n in numbers))
            for n in numbers if transactions else ():
                async with writer.transaction(KEYS[n % len(KEYS)]) as transaction:
                    for part in range(transactions):
                        transaction.write({"n": n, "part": part})


def run(main: Callable[[World], Coroutine[Any, Any, None]], *, brokers: int = 1, seed: int = 0) -> None:
    async def whole(loop: SimLoop) -> None:
        async with Cluster(brokers=brokers) as cluster:
            await main(World(loop, cluster))

    with simulated(seed) as loop:
        loop.run_until_complete(whole(loop))
        assert not loop.unnoticed()


def in_order(numbers: list[int]) -> bool:
    """Return True if the numbers of each key are in the order of writing."""
    of_keys: dict[int, list[int]] = {}
    for n in numbers:
        of_keys.setdefault(n % len(KEYS), []).append(n)
    return all(found == sorted(found) for found in of_keys.values())


@pytest.mark.parametrize("seed", range(3))
def test_each_key_is_in_order_across_splits_and_merges_while_reading(seed: int) -> None:
    async def main(world: World) -> None:
        await world.create(2)
        read: list[int] = []

        async def consume() -> None:
            async with world.reader(world.cluster.client(name="reader"), block=True) as reader:
                async for event in reader:
                    n: int = event.data["n"]
                    read.append(n)

        consuming = asyncio.ensure_future(consume())
        numbers = iter(range(400))
        async with world.writer() as writer:

            async def produce(count: int) -> None:
                for _, n in zip(range(count), numbers, strict=False):
                    writer.write_event(KEYS[n % len(KEYS)], {"n": n})
                    await asyncio.sleep(0.001)

            rng = random.Random(seed)
            for turn in range(4):
                producing = asyncio.ensure_future(produce(80))
                await asyncio.sleep(rng.random() / 20)
                active = (await world.streams.describe("s")).active()
                if turn % 2:
                    first = rng.randrange(len(active) - 1)
                    change = Merge((active[first].number, active[first + 1].number))
                else:
                    change = Split(rng.choice(active).number, 3)
                await world.streams.scale("s", [change])
                await producing
            await produce(80)
            await writer.flush()
        await world.streams.seal("s")
        async with asyncio.timeout(60):
            await consuming
        assert sorted(read) == list(range(400))
        assert in_order(read)
        assert len((await world.streams.describe("s")).segments) > 5

    run(main, seed=seed, brokers=3)


def test_events_committed_earlier_are_read_without_waiting_across_splits() -> None:
    async def main(world: World) -> None:
        await world.create()
        for n in range(6):
            await world.write([n])
            if n in (1, 3):
                active = (await world.streams.describe("s")).active()
                await world.streams.scale("s", [Split(active[0].number)])
            async with world.reader(world.cluster.client(name=f"reader{n}")) as reader:
                assert sorted([event.data["n"] async for event in reader]) == list(range(n + 1))

    run(main, brokers=3)


def test_a_committed_transaction_is_readable_at_its_reported_place() -> None:
    """T4 and T5, with a new reader for each commit at any broker, while segments are split."""

    async def main(world: World) -> None:
        await world.create(2)
        async with world.writer() as writer:
            for n in range(24):
                async with writer.transaction(KEYS[n % len(KEYS)]) as transaction:
                    transaction.write({"n": n, "part": 0})
                    transaction.write({"n": n, "part": 1})
                result = await transaction.commit()
                client = world.cluster.client(name=f"reader{n}")
                async with world.reader(client, begin={result.segment: result.begin}) as reader:
                    found = [each async for each in reader.transactions()]
                assert [[event.data["part"] for event in each.events] for each in found] == [[0, 1]]
                assert [event.data["n"] for event in found[0].events] == [n, n]
                assert (found[0].journal, found[0].begin, found[0].end) == (result.journal, result.begin, result.end)
                assert dict(reader.position()) == {result.segment: result.end}
                if n % 8 == 5:
                    active = (await world.streams.describe("s")).active()
                    await world.streams.scale("s", [Split(active[n % len(active)].number)])

    run(main, brokers=3)


def test_time_advances_with_the_slowest_writer_across_a_split() -> None:
    async def main(world: World) -> None:
        await world.create()
        async with world.writer() as one, world.writer() as other:
            for writer, time in ((one, 10), (other, 12)):
                writer.note_time(time)
                await writer.flush()
            await one.write_event("a", {"n": 0})
            await other.write_event("b", {"n": 1})
            async with world.reader(block=True) as reader:
                assert await reader.time_window() == TimeWindow(10, None), "no mark is before the first ones"
                assert {(await anext(reader)).data["n"] for _ in range(2)} == {0, 1}
                await world.streams.scale("s", [Split(0)])
                await one.write_event("a", {"n": 2})
                one.note_time(20)
                await one.flush()
                assert await reader.time_window() == TimeWindow(10, 20), "earlier events are not read yet"
                await other.write_event("b", {"n": 3})
                other.note_time(21)
                await other.flush()
                assert await reader.time_window() == TimeWindow(10, 20)
                assert {(await anext(reader)).data["n"] for _ in range(2)} == {2, 3}
                assert await reader.time_window() == TimeWindow(20, None)

    run(main)


@pytest.mark.parametrize("whole", [True, False])
def test_reading_continues_from_a_position_after_every_delivery(whole: bool) -> None:
    """T27: no delivery and no position is ever within a transaction."""

    async def main(world: World) -> None:
        await world.create()
        await world.write(range(8), transactions=3)
        await world.streams.scale("s", [Split(0)])
        await world.write(range(8, 16), transactions=3)
        await world.write(range(16, 20))
        expected = {(n, part) for n in range(16) for part in range(3)} | {(n, None) for n in range(16, 20)}

        def parts(events: Iterable[Any]) -> list[tuple[int, int | None]]:
            return [(event.data["n"], event.data.get("part")) for event in events]

        read: list[tuple[int, int | None]] = []
        position: str | None = None
        taken = 1
        while taken:
            begin = StreamPosition.from_json(position) if position is not None else None
            async with world.reader(begin=begin) as reader:
                if whole:
                    got = [parts(transaction.events) async for transaction in _first(reader.transactions(), 3)]
                    assert all(len(each) == (3 if each[0][1] is not None else 1) for each in got)
                    taken = len(got)
                    read += [part for each in got for part in each]
                else:
                    events = parts([event async for event in _first(aiter(reader), 4)])
                    taken = len(events)
                    # Four events are a transaction and the first event of the next one, which the position excludes.
                    while events and events[-1][1] in (0, 1):
                        events.pop()
                    read += events
                position = reader.position().to_json()
        assert len(read) == len(expected)
        assert set(read) == expected
        assert in_order([n for n, _ in read])

    run(main)


async def _first(items: Any, count: int) -> Any:
    for _ in range(count):
        try:
            yield await anext(items)
        except StopAsyncIteration:
            return


def test_a_position_includes_open_transactions_of_other_writers() -> None:
    async def main(world: World) -> None:
        await world.create()
        journal = segment_journal("s", 0)
        builder: TransactionBuilder[JsonObject] = TransactionBuilder(
            new_producer_id(world.loop.rng.randbytes),
            ProducerClock(lambda: int(world.clock.now() * 1e9)),
            JsonEvents(),
        )
        builder.add(journal, {"n": 100})
        builder.add(journal, {"n": 101})
        await world.client.append(journal, builder.take(journal, 1 << 20))
        await world.write([1, 2])
        begun = await world.client.head(journal)
        async with world.reader() as reader:
            assert [event.data["n"] async for event in reader] == [1, 2]
            position = StreamPosition.from_json(reader.position().to_json())
        assert position.segments[0].offset == begun
        assert dict(position) == {0: 0}, "open transactions are still needed"
        await world.write([3])
        builder.add(journal, {"n": 102})
        await world.client.append(journal, builder.take(journal, 1 << 20))
        (acknowledgement,) = builder.ack_intents().values()
        await world.client.append(journal, acknowledgement)
        await world.write([4])
        async with world.reader(begin=position) as reader:
            got = [[event.data["n"] for event in each.events] async for each in reader.transactions()]
            assert got == [[3], [100, 101, 102], [4]]
            after = reader.position()
        assert after.segments[0].pending == ()
        async with world.reader(begin=after) as reader:
            assert [event async for event in reader] == []

    run(main)


def test_reading_from_and_to_a_cut() -> None:
    async def main(world: World) -> None:
        await world.create()
        await world.write(range(8))
        async with world.reader() as reader:
            assert len([event async for event in reader]) == 8
            middle = reader.cut()
        await world.streams.scale("s", [Split(0)])
        await world.write(range(8, 16))
        async with world.reader() as reader:
            assert len([event async for event in reader]) == 16
            later = reader.position()
            assert sorted(later) == [1, 2]
        await world.write(range(16, 24))
        async with world.reader(end=dict(middle)) as reader:
            assert sorted([event.data["n"] async for event in reader]) == list(range(8))
            assert reader.position() == middle
        async with world.reader(begin=dict(middle), end=later) as reader:
            assert sorted([event.data["n"] async for event in reader]) == list(range(8, 16))
            assert dict(reader.position()) == dict(later)
        with pytest.raises(InvalidInput, match="no segment 9"):
            async with world.reader(end={9: 1}) as reader:
                await anext(reader)
        with pytest.raises(InvalidInput, match="within an event"):
            async with world.reader(begin=dict(later), end={1: later[1] + 5, 2: later[2]}) as reader:
                assert [event.data["n"] async for event in reader] == []

    run(main)


def test_a_cancelled_call_takes_nothing() -> None:
    async def main(world: World) -> None:
        await world.create(3)
        read: list[int] = []
        async with world.reader(block=True) as reader:
            # The first calls are cancelled at each possible wait.
            for steps in range(1, 60):
                call = asyncio.ensure_future(anext(reader))
                for _ in range(steps):
                    await asyncio.sleep(0)
                    if call.done():
                        break
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                if not call.cancelled():
                    read.append(call.result().data["n"])
                if steps == 20:
                    await world.write(range(20))
            while len(read) < 20:
                async with asyncio.timeout(60):
                    read.append((await anext(reader)).data["n"])
            assert sorted(read) == list(range(20))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await anext(reader)
            await world.write([20])
            assert (await anext(reader)).data["n"] == 20

    run(main)


def test_truncated_content_is_reported_or_skipped() -> None:
    async def main(world: World) -> None:
        await world.create()
        await world.write(range(4))
        async with world.reader() as reader:
            early = reader.position()
            first = [event async for event in reader]
            early = StreamPosition.of({0: first[0].end})
            late = StreamPosition.of({0: first[2].end})
        await world.streams.truncate("s", late)
        async with world.reader() as reader:
            assert [event.data["n"] async for event in reader] == [3]
        with pytest.raises(StreamTruncated) as caught:
            async with world.reader(begin=early) as reader:
                await anext(reader)
        assert (caught.value.segment, caught.value.available) == (0, late[0])
        async with world.reader(begin=early, skip_truncated=True) as reader:
            assert [event.data["n"] async for event in reader] == [3]
        await world.streams.scale("s", [Split(0)])
        await world.write(range(4, 8))
        stream = await world.streams.describe("s")
        await world.streams.truncate("s", {each.number: each.begin for each in stream.active()})
        with pytest.raises(StreamTruncated):
            async with world.reader(begin=late) as reader:
                await anext(reader)
        async with world.reader(begin=late, skip_truncated=True) as reader:
            assert sorted([event.data["n"] async for event in reader]) == [4, 5, 6, 7]

    run(main)


def test_content_removed_while_reading_is_reported_or_skipped() -> None:
    async def main(world: World) -> None:
        await world.create()
        await world.write(range(4))
        async with world.reader() as reader:
            events = [event async for event in reader]
        real, gap = world.client.read, events[2].begin

        def without(journal: str, offset: int = 0, **options: Any) -> Any:
            if offset < gap:
                assert options["fail_on_jump"]
                raise OffsetJump(journal, offset, gap)
            return real(journal, offset, **options)

        world.client.read = without  # type: ignore[method-assign]
        for begin in (0, events[0].end):
            async with world.reader(begin={0: begin}) as reader:
                with pytest.raises(StreamTruncated) as caught:
                    await anext(reader)
            assert caught.value.available == gap
            async with world.reader(begin={0: begin}, skip_truncated=True) as reader:
                assert [event.data["n"] async for event in reader] == [2, 3]
        async with world.reader() as reader:
            # The stream begins at the first retained content.
            assert [event.data["n"] async for event in reader] == [2, 3]

    run(main)


def test_a_missing_or_deleted_stream_is_reported() -> None:
    async def main(world: World) -> None:
        async with world.reader() as reader:
            with pytest.raises(StreamNotFound):
                await anext(reader)
        await world.create()
        await world.write([0])
        async with world.reader(block=True) as reader:
            assert (await anext(reader)).data["n"] == 0
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(1)
            await world.streams.delete("s")
            with pytest.raises((StreamNotFound, StreamTruncated)):
                async with asyncio.timeout(60):
                    await waiting

    run(main)


@pytest.mark.parametrize("later", [range(10, 30), range(10, 12)], ids=["longer", "shorter"])
def test_a_position_in_a_recreated_stream_is_refused_or_skipped(later: range) -> None:
    async def main(world: World) -> None:
        template = default_template(stores=[])
        await world.streams.create("s", template=template)
        await world.write(range(10))
        async with world.reader() as reader:
            assert [event.data["n"] async for event in reader] == list(range(10))
            position = StreamPosition.from_json(reader.position().to_json())
        (at,) = position.segments.values()
        assert at.journal_id
        await world.streams.delete("s")
        await world.streams.create("s", template=template)
        await world.write(later)

        for block in (False, True):
            async with world.reader(begin=position, block=block) as reader:
                with pytest.raises(JournalRecreated, match="skip_truncated") as error:
                    await anext(reader)
            assert error.value.known == at.journal_id
        with capture_logs() as logs:
            async with world.reader(begin=position, skip_truncated=True) as reader:
                assert [event.data["n"] async for event in reader] == list(later)
                assert reader.position().segments[0].journal_id == error.value.found
        (logged,) = [each for each in logs if each["event"] == "stream_reader.stream_recreated"]
        assert (logged["begin"], logged["journal_id_before"]) == (at.offset, at.journal_id)

    run(main)


def test_a_position_in_content_that_was_lost_and_rewritten() -> None:
    async def main(world: World) -> None:
        await world.create()
        await world.write(range(10))
        await world.cluster.stop(0)  # The broker stores everything.
        await world.cluster.start(0)
        async with world.reader() as reader:
            assert [event.data["n"] async for event in reader] == list(range(10))
            kept = reader.position()
        await world.write(range(10, 20))
        async with world.reader() as reader:
            assert [event.data["n"] async for event in reader] == list(range(20))
            position = reader.position()
        ((number, at),) = position.segments.items()
        fell_to = kept.segments[number].offset
        await world.lose_disk()
        await world.write(range(100, 120))

        async with world.reader(begin=position) as reader:
            with pytest.raises(JournalRecreated, match=f"lost its content from offset {fell_to} on"):
                await anext(reader)
        async with world.reader(begin=position, skip_truncated=True) as reader:
            assert [event.data["n"] async for event in reader] == list(range(100, 120))
            behind = reader.position().segments[number]
            assert behind.offset > at.offset
            assert behind.journal_id != at.journal_id
        async with world.reader(begin=kept) as reader:
            assert [event.data["n"] async for event in reader] == list(range(100, 120))

    run(main)


def test_a_running_reader_detects_that_its_stream_was_recreated() -> None:
    async def main(world: World) -> None:
        template = default_template(stores=[])
        await world.streams.create("s", template=template)
        await world.write([0])
        async with world.reader(block=True) as reader:
            assert (await anext(reader)).data["n"] == 0
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(1)
            await world.streams.delete("s")
            await world.streams.create("s", template=template)
            await world.write(range(1, 9))
            async with asyncio.timeout(300):
                with pytest.raises((JournalRecreated, StreamNotFound)):
                    await waiting

    run(main)
