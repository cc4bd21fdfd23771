"""Reader groups of several clients on in-process brokers, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

from coranto.errors import (
    CheckpointRefused,
    InvalidInput,
    JournalRecreated,
    ReaderOffline,
    StreamNotFound,
    StreamTruncated,
)
from coranto.messages.framing import JsonObject
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Merge, Split
from coranto.streams.groups.group_reader import GroupReader
from coranto.streams.groups.reader_groups import ReaderGroup
from coranto.streams.model.frontier import earliest
from coranto.streams.model.positions import StreamPosition
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.testing import Cluster
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import protocol_pb2 as pb

KEYS = [f"key{n}" for n in range(8)]


class World:
    """A cluster, a stream `s` and its reader group `g`."""

    def __init__(self, loop: SimLoop, cluster: Cluster) -> None:
        self.loop = loop
        self.cluster = cluster
        self.clock = SimClock(loop)
        self.client = cluster.client()
        self.streams = Streams(self.client, clock=self.clock, entropy=loop.rng.randbytes)

    async def create(self, segments: int, *, replication: int = 1) -> ReaderGroup:
        template = default_template(replication=replication, stores=["file:///fragments/"])
        await self.streams.create("s", segments, template=template)
        group = self.group("operator")
        assert await group.create()
        assert not await group.create(), "it is there already"
        return group

    def group(self, client: str) -> ReaderGroup:
        """Return the group as another process sees it."""
        return ReaderGroup(
            self.cluster.client(name=client), "s", "g", clock=self.clock, entropy=self.loop.rng.randbytes
        )

    async def write(self, numbers: Iterable[int], *, transactions: int = 0) -> None:
        """Write number n to key n modulo their count; with `transactions`, as a transaction of that many events."""
        async with StreamWriter(self.client, "s", clock=self.clock, entropy=self.loop.rng.randbytes) as writer:
            if not transactions:
                await asyncio.gather(*(writer.write_event(KEYS[n % len(KEYS)], {"n": n}) for n in numbers))
            for n in numbers if transactions else ():
                async with writer.transaction(KEYS[n % len(KEYS)]) as transaction:
                    for part in range(transactions):
                        transaction.write({"n": n, "part": part})


class Process:
    """A process with a reader. Its list of read events and the state at its checkpoints survive it."""

    def __init__(self, world: World, name: str, **options: Any) -> None:
        self.name = name
        self.read: list[tuple[int, int]] = []
        self.kept: dict[str, int] = {}
        group = world.group(name)
        self.reader: GroupReader[JsonObject] = group.reader(name, on_checkpoint=self._keep, **options)
        self.task: asyncio.Task[None] = asyncio.ensure_future(self._run())

    async def _keep(self, checkpoint: str) -> None:
        self.kept[checkpoint] = len(self.read)

    async def _run(self) -> None:
        async with self.reader as reader:
            async for transaction in reader.transactions():
                self.read += [(event.data["n"], event.data.get("part", 0)) for event in transaction.events]

    @property
    def numbers(self) -> list[int]:
        return [n for n, _ in self.read]

    async def kill(self) -> None:
        """End the process immediately, without leaving the group."""
        for task in (self.task, *self.reader._tasks):
            task.cancel()
        self.reader._presence, self.reader._tasks = None, []
        await asyncio.gather(self.task, return_exceptions=True)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def run(main: Callable[[World], Coroutine[Any, Any, None]], *, brokers: int = 1, seed: int = 0) -> None:
    async def whole(loop: SimLoop) -> None:
        async with Cluster(brokers=brokers) as cluster:
            await main(World(loop, cluster))

    with simulated(seed) as loop:
        loop.run_until_complete(whole(loop))
        assert not loop.unnoticed()


async def until(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.05)


async def shares(group: ReaderGroup) -> dict[str, int]:
    state = await group.state()
    return {reader: len(state.owned_by(reader)) for reader in state.members}


async def balanced(group: ReaderGroup, readers: int) -> None:
    """Wait until the group has `readers` readers with fair shares, and all segments are owned."""
    async with asyncio.timeout(120):
        while True:
            state = await group.state()
            counts = (await shares(group)).values()
            if len(counts) == readers and not state.unowned() and max(counts) - min(counts) <= 1:
                return
            await asyncio.sleep(0.05)


def in_order(numbers: list[int]) -> bool:
    of_keys: dict[int, list[int]] = {}
    for n in numbers:
        of_keys.setdefault(n % len(KEYS), []).append(n)
    return all(found == sorted(found) for found in of_keys.values())


def test_readers_that_join_and_leave_share_segments_and_read_each_event_once() -> None:
    async def main(world: World) -> None:
        group = await world.create(5)
        first = Process(world, "r0")
        await balanced(group, 1)
        await world.write(range(40))
        await until(lambda: len(first.read) == 40)
        others = [Process(world, f"r{n}") for n in (1, 2)]
        await balanced(group, 3)
        assert sorted((await shares(group)).values()) == [1, 2, 2]
        await world.write(range(40, 80))
        all_readers = [first, *others]
        await until(lambda: sum(len(each.read) for each in all_readers) == 80)
        await first.stop()
        await balanced(group, 2)
        await world.write(range(80, 120))
        await until(lambda: sum(len(each.read) for each in all_readers) == 120)
        assert sorted(n for each in all_readers for n in each.numbers) == list(range(120))
        assert all(in_order(each.numbers) for each in all_readers)
        for each in others:
            await each.stop()
        assert await shares(group) == {}

    run(main)


def test_each_key_is_in_order_across_splits_and_merges_between_readers() -> None:
    async def main(world: World) -> None:
        await world.create(2)
        order: list[int] = []

        class Noting(Process):
            async def _run(self) -> None:
                async with self.reader as reader:
                    async for event in reader:
                        n: int = event.data["n"]
                        order.append(n)

        processes = [Noting(world, f"r{n}") for n in range(3)]
        numbers = iter(range(250))
        rng = random.Random(5)
        for turn in range(4):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(world.write([next(numbers) for _ in range(50)]))
                active = (await world.streams.describe("s")).active()
                at = rng.randrange(len(active) - 1)
                change = Merge((active[at].number, active[at + 1].number)) if turn % 2 else Split(active[at].number, 3)
                await world.streams.scale("s", [change])
        await world.write(numbers)
        await world.streams.seal("s")
        async with asyncio.timeout(60):
            await asyncio.gather(*(each.task for each in processes))
        assert sorted(order) == list(range(250))
        assert in_order(order), "also between readers: successors come after their predecessors are consumed"

    run(main, brokers=3, seed=3)


def test_unrecorded_events_of_a_dead_reader_are_read_again() -> None:
    async def main(world: World) -> None:
        group = await world.create(2)
        dying = Process(world, "r0", beat=5, timeout=20)
        await balanced(group, 1)
        await world.write(range(20))
        await until(lambda: len(dying.read) == 20)
        await asyncio.sleep(6)  # It has reported all of these but the last, whose consumption is not known yet.
        reported = (await group.state()).frontier.position
        await world.write(range(20, 40))
        await until(lambda: len(dying.read) == 40)
        await dying.kill()
        heir = Process(world, "r1", beat=5, timeout=20)
        begun = world.loop.time()
        await until(lambda: len(heir.read) >= 20)
        assert 15 <= world.loop.time() - begun <= 30, "it is presumed dead after the timeout"
        await asyncio.sleep(30)
        # The last delivered transaction of a segment counts as consumed at the next request.
        assert set(heir.numbers) | set(dying.numbers) == set(range(40))
        assert set(range(20, 40)) <= set(heir.numbers)
        assert len(heir.numbers) == len(set(heir.numbers)) <= 21
        async with StreamReader[JsonObject](world.client, "s", begin=reported, clock=world.clock) as reader:
            assert {event.data["n"] async for event in reader} == set(heir.numbers), (
                "exactly the events after its reported position"
            )
        await heir.stop()

    run(main)


def test_a_zombie_gets_an_error_and_records_nothing() -> None:
    async def main(world: World) -> None:
        group = await world.create(1)
        reader: GroupReader[JsonObject] = world.group("zombie").reader("r0", auto_commit=False)
        async with reader:
            await world.write(range(3))
            await anext(reader)
            await reader.commit()
            assert (await anext(reader)).data["n"] == 1
            await group.reader_offline("r0")
            with pytest.raises(ReaderOffline):
                await reader.commit()
            with pytest.raises(ReaderOffline):
                _ = [event async for event in reader]
        heir = Process(world, "r1")
        await until(lambda: len(heir.read) == 2)
        assert heir.numbers == [1, 2]
        await heir.stop()

    run(main)


def test_a_disconnected_reader_delivers_nothing_until_it_knows_its_state() -> None:
    async def main(world: World) -> None:
        group = await world.create(2)
        cut_off = Process(world, "r0", beat=5, timeout=20)
        other = Process(world, "r1", beat=5, timeout=20)
        await balanced(group, 2)
        world.cluster.cut("r0", 0)
        await balanced(group, 1)
        await world.write(range(16))
        await until(lambda: len(other.read) == 16)
        world.cluster.heal()
        with pytest.raises(ReaderOffline):
            async with asyncio.timeout(120):
                await cut_off.task
        assert cut_off.read == []
        await other.stop()

    run(main)


def test_content_read_ahead_is_not_delivered_by_a_reader_presumed_dead() -> None:
    async def main(world: World) -> None:
        await world.create(1)
        await world.write(range(8))
        slow: GroupReader[JsonObject] = world.group("slow").reader("slow", beat=5, timeout=20)
        async with slow:
            assert (await anext(slow)).data["n"] == 0
            await asyncio.sleep(6)
            world.cluster.cut("slow", 0)
            heir = Process(world, "heir", beat=5, timeout=20)
            await until(lambda: len(heir.read) == 8)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await anext(slow)
            world.cluster.heal()
            with pytest.raises(ReaderOffline):
                async with asyncio.timeout(120):
                    await anext(slow)
        await heir.stop()

    run(main)


def test_leaving_the_context_consumes_the_last_event_unless_it_fails() -> None:
    async def main(world: World) -> None:
        group = await world.create(1)
        await world.write(range(4))
        read: list[int] = []

        async def failing() -> None:
            async with group.reader() as reader:
                read.extend([(await anext(reader)).data["n"] for _ in range(2)])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await failing()
        assert read == [0, 1]
        async with group.reader() as reader:
            async for event in reader:
                read.append(event.data["n"])
                if event.data["n"] == 2:
                    break
        assert read == [0, 1, 1, 2], "the failed reader may not have consumed its last event"
        async with group.reader() as reader:
            assert (await anext(reader)).data["n"] == 3

    run(main)


def test_a_reader_that_restarts_with_its_id_continues_immediately() -> None:
    async def main(world: World) -> None:
        group = await world.create(2)
        first = Process(world, "r0")
        await balanced(group, 1)
        await world.write(range(10))
        await until(lambda: len(first.read) == 10)
        await first.kill()
        begun = world.loop.time()
        second = Process(world, "r0")
        await until(lambda: len(second.read) == 10)
        assert world.loop.time() - begun < 1
        await second.stop()
        third = Process(world, "r0")
        await world.write([10])
        await until(lambda: bool(third.read))
        assert third.numbers == [10], "events delivered to a reader that leaves are consumed"
        await third.stop()

    run(main)


def test_a_position_reported_for_an_offline_reader_counts() -> None:
    async def main(world: World) -> None:
        group = await world.create(1)
        first = Process(world, "r0")
        await balanced(group, 1)
        await world.write(range(10))
        await until(lambda: len(first.read) == 10)
        position = first.reader.position()
        await asyncio.sleep(6)  # It reports all but the last.
        await first.kill()
        with pytest.raises(InvalidInput):
            await group.reader_offline("r0", _before(position))
        await group.reader_offline("r0", position)
        await group.reader_offline("nobody")
        second = Process(world, "r1")
        await world.write([10])
        await until(lambda: bool(second.read))
        assert second.numbers == [10]
        await second.stop()

    run(main)


@pytest.mark.parametrize("seed", range(3))
def test_a_checkpoint_holds_whole_transactions_and_restores_exactly(seed: int) -> None:
    """T27: the events before a checkpoint and those read after a reset to it are all events, each once."""

    async def main(world: World) -> None:
        rng = random.Random(seed)
        group = await world.create(3)
        processes = [Process(world, f"r{n}") for n in range(3)]
        await balanced(group, 3)
        writing = asyncio.ensure_future(world.write(range(60), transactions=3))
        await until(lambda: sum(len(each.read) for each in processes) > rng.randrange(60))
        scaling = asyncio.ensure_future(world.streams.scale("s", [Split(rng.randrange(3))]))
        late = Process(world, "r3")
        position = await group.initiate_checkpoint("c")
        await asyncio.gather(writing, scaling)
        all_readers = [*processes, late]
        await until(lambda: sum(len(each.read) for each in all_readers) == 180)
        for each in all_readers:
            await each.stop()

        kept = [event for each in all_readers for event in each.read[: each.kept.get("c", 0)]]
        assert len(kept) == len(set(kept))
        assert len(kept) % 3 == 0
        assert {(n, part) for n, _ in kept for part in range(3)} == set(kept), "whole transactions only"
        checkpoint = await group.checkpoint()
        assert checkpoint is not None
        assert (checkpoint.name, checkpoint.position) == ("c", position)
        await group.reset(position)
        again = Process(world, "again")
        await until(lambda: len(again.read) == 180 - len(kept))
        await asyncio.sleep(1)
        assert sorted([*kept, *again.read]) == [(n, part) for n in range(60) for part in range(3)]
        assert in_order(again.numbers)
        await again.stop()

    run(main, seed=seed)


def test_a_checkpoint_waits_for_consuming_readers_but_not_for_dead_ones() -> None:
    async def main(world: World) -> None:
        group = await world.create(2)
        slow: GroupReader[JsonObject] = world.group("slow").reader("slow")
        dead = Process(world, "dead")
        async with slow:
            async with asyncio.timeout(60):
                while len(await shares(group)) < 2 or len((await group.state()).owned_by("slow")) != 1:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(1):
                            await anext(slow)
            await world.write(range(16))
            await until(lambda: bool(dead.read))
            event = await anext(slow)
            await dead.kill()
            beginning = asyncio.ensure_future(group.initiate_checkpoint("c"))
            await asyncio.sleep(60)
            assert not beginning.done(), "the event is being consumed"
            with pytest.raises(CheckpointRefused):
                await group.begin_checkpoint("c")
            await anext(slow)
            position = await beginning
            assert position.segments[event.segment].offset == event.end
            assert await group.released_cut() == position
            stream = await world.streams.describe("s")
            await world.streams.truncate("s", earliest(stream, [position, position]))
        await group.release({0: 1, 1: 2})
        assert await group.released_cut() == {0: 1, 1: 2}

    run(main)


def test_without_auto_commit_only_commit_consumes_events() -> None:
    async def main(world: World) -> None:
        group = await world.create(1)
        reader: GroupReader[JsonObject] = world.group("reader").reader("r0", auto_commit=False)
        async with reader:
            await world.write(range(4), transactions=2)
            for _ in range(3):
                await anext(reader)
            committed = await reader.commit()
            for _ in range(3):
                await anext(reader)
            await asyncio.sleep(30)
            assert (await group.state()).frontier.position == committed, "heartbeats report no position"
        heir = Process(world, "r1")
        await until(lambda: len(heir.read) == 6)
        assert heir.read[0] == (1, 0), "a transaction is never committed in part"
        await heir.stop()

    run(main)


def test_without_auto_commit_segments_are_released_and_completed_at_commits() -> None:
    async def main(world: World) -> None:
        group = await world.create(2)
        reader: GroupReader[JsonObject] = world.group("reader").reader("r0", auto_commit=False)
        async with reader:
            await world.write(range(16))
            read = [(await anext(reader)).data["n"] for _ in range(16)]
            other = Process(world, "r1")
            await asyncio.sleep(10)
            assert await shares(group) == {"r0": 2, "r1": 0}
            await reader.commit()
            await balanced(group, 2)
            await world.write(range(16, 32))
            await world.streams.scale("s", [Merge((0, 1))])
            await world.write(range(32, 36))
            async with asyncio.timeout(60):
                read += [event.data["n"] async for event in reader]
            await until(lambda: len(other.read) + len(read) == 32)
            await asyncio.sleep(10)
            assert 2 in (await group.state()).frontier.waiting, "its predecessor is read, but not consumed"
            await reader.commit()
            async with asyncio.timeout(60):
                while len(other.read) + len(read) < 36:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1):
                            read.append((await anext(reader)).data["n"])
            assert sorted([*other.numbers, *read]) == list(range(36))
            await reader.commit()
            await world.streams.seal("s")
            async with asyncio.timeout(60):
                while not reader.is_finished:
                    assert [event async for event in reader] == []
                    await reader.commit()
        await other.task

    run(main)


@pytest.mark.parametrize("seed", range(2))
def test_no_event_is_lost_under_concurrent_failures(seed: int) -> None:
    """Readers are killed and join, brokers are killed, and segments are split and merged, concurrently."""

    async def main(world: World) -> None:
        rng = random.Random(seed)
        group = await world.create(2, replication=2)
        living = [Process(world, f"r{n}") for n in range(2)]
        all_readers = list(living)
        for turn in range(4):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(world.write(range(turn * 16, turn * 16 + 16), transactions=2))
                broker = rng.randrange(3)
                await world.cluster.kill(broker, expire=True)
                await asyncio.sleep(rng.random())
                victim = living.pop(rng.randrange(len(living)))
                await (victim.kill() if rng.random() < 0.7 else victim.stop())
                new = [Process(world, f"r{len(all_readers) + n}") for n in range(rng.randint(1, 2))]
                living += new
                all_readers += new
                await world.cluster.start(broker)
                await world.cluster.ready(*(each.journal for each in (await world.streams.describe("s")).active()))
                active = (await world.streams.describe("s")).active()
                at = rng.randrange(len(active) - 1)
                change = Merge((active[at].number, active[at + 1].number)) if turn % 2 else Split(active[at].number)
                await world.streams.scale("s", [change])
        await world.streams.seal("s")
        async with asyncio.timeout(300):
            await asyncio.gather(*(each.task for each in living))
        assert not (await group.state()).frontier.open
        assert {event for each in all_readers for event in each.read} == {(n, p) for n in range(64) for p in range(2)}
        for each in all_readers:
            assert in_order(each.numbers)
            assert len(each.read) == len(set(each.read)), "no reader gets an event twice"

    run(main, brokers=3, seed=seed)


@pytest.mark.parametrize("seed", range(2))
def test_each_event_is_read_once_wherever_calls_are_cancelled(seed: int) -> None:
    async def main(world: World) -> None:
        rng = random.Random(seed)
        group = await world.create(2)
        read: list[int] = []

        async def cancel_calls(name: str) -> None:
            async with world.group(name).reader(name) as reader:
                while not reader.is_finished:
                    call = asyncio.ensure_future(anext(reader))
                    for _ in range(rng.randrange(30)):
                        await asyncio.sleep(0)
                    if rng.random() < 0.5:
                        call.cancel()
                    await asyncio.wait([call], timeout=rng.random())
                    call.cancel()
                    await asyncio.wait([call])
                    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                        read.append(call.result().data["n"])

        readers = [asyncio.ensure_future(cancel_calls(f"r{n}")) for n in range(3)]
        for turn in range(3):
            await world.write(range(turn * 40, turn * 40 + 40))
            position = await group.initiate_checkpoint(f"c{turn}")
            active = (await world.streams.describe("s")).active()
            await world.streams.scale("s", [Split(rng.choice(active).number)])
            assert position.keys() <= (await world.streams.describe("s")).segments.keys()
        await world.streams.seal("s")
        async with asyncio.timeout(300):
            await asyncio.gather(*readers)
        assert sorted(read) == list(range(120))
        assert in_order(read)

    run(main, seed=seed)


def test_a_group_skips_truncated_content_on_request() -> None:
    async def main(world: World) -> None:
        group = await world.create(1)
        await world.write(range(8))
        async with StreamReader[JsonObject](world.client, "s", clock=world.clock) as reader:
            events = [event async for event in reader]
        await group.reset({0: events[1].end})
        await world.streams.truncate("s", {0: events[4].begin})
        # The content below still exists, so only a truncated journal would report it. A deleted segment does, too.
        await world.streams.scale("s", [Split(0)])
        await world.write(range(8, 16))
        stream = await world.streams.describe("s")
        await world.streams.truncate("s", {each.number: each.begin for each in stream.active()})
        strict = Process(world, "strict")
        with pytest.raises(StreamTruncated) as caught:
            async with asyncio.timeout(60):
                await strict.task
        assert caught.value.segment == 0
        lenient = Process(world, "lenient", skip_truncated=True)
        await until(lambda: len(lenient.read) == 8)
        assert sorted(lenient.numbers) == list(range(8, 16))
        with pytest.raises(StreamTruncated):
            await group.reset({0: events[1].end})
        await group.reset()
        with pytest.raises(ReaderOffline):
            async with asyncio.timeout(60):
                await lenient.task

    run(main)


def test_missing_groups_and_invalid_values_are_refused() -> None:
    async def main(world: World) -> None:
        with pytest.raises(StreamNotFound):
            await world.group("early").create()
        await world.create(1)
        stranger = ReaderGroup(world.client, "s", "stranger", clock=world.clock)
        with pytest.raises(StreamNotFound, match="stranger"):
            await stranger.state()
        with pytest.raises(InvalidInput):
            ReaderGroup(world.client, "s", "no such/../name")
        with pytest.raises(InvalidInput, match="a reader with a heartbeat"):
            world.group("g").reader(beat=5, timeout=5)
        with pytest.raises(InvalidInput, match="not open"):
            await anext(world.group("g").reader())

    run(main)


def _before(position: StreamPosition) -> StreamPosition:
    return StreamPosition.of(dict.fromkeys(position, 0))


def test_a_group_of_a_recreated_stream_has_to_be_reset() -> None:
    async def main(world: World) -> None:
        template = default_template(replication=1, stores=[])
        await world.streams.create("s", 1, template=template)
        group = world.group("operator")
        await group.create()
        await world.write(range(3))
        async with group.reader("r0") as reader:
            for n in range(3):
                assert (await anext(reader)).data["n"] == n
            await reader.commit()
        (segment,) = (await world.streams.describe("s")).segments.values()
        (info,) = (await world.client.list(f"name={segment.journal}")).journals
        await world.client.apply(
            [pb.ApplyRequest.Change(delete=segment.journal, expect_mod_revision=info.mod_revision)]
        )
        await world.client.apply([pb.ApplyRequest.Change(upsert=info.spec)])
        await world.write(range(10, 20))
        async with world.group("later").reader("r1") as reader:
            with pytest.raises(JournalRecreated, match="reset"):
                await anext(reader)
        await group.reset()
        async with world.group("latest").reader("r2") as reader:
            assert [(await anext(reader)).data["n"] for _ in range(10)] == list(range(10, 20))

    run(main)
