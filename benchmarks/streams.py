"""Stream writers against plain appends of the same bytes, and against each other.

One process writes to one broker (R=1) with one client, so only the writer's work differs: its sequences and registers,
the framing of events, and routing. Events have 100 bytes, and transactions ten events. A plain append has exactly the
bytes of such a transaction in its segment.

Latencies are measured with sequential commits, a transaction and a plain append in turns. Rates are measured with tasks
that each wait for a commit before the next one, *pipelined* rates with one task that does not wait. Their plain appends
use `AppendService`, which batches concurrent appends as a writer does.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

from benchmarks.append import cluster_of
from benchmarks.runner import Figure, measure_pairs
from coranto.client import AppendService, JournalClient
from coranto.messages.uuids import Flags, build_uuid, new_producer_id
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.model.events import BytesEvents
from coranto.streams.writer.multi_key.writer import MultiKeyWriter
from coranto.streams.writer.stream_writer import StreamWriter

EVENT = b"x" * 100
EVENTS = [EVENT] * 10
TASKS = 64
COMMITS = 150
SECONDS = 1.0
PIPELINED = 3000
KEYS = (1, 10, 100, 1000)
SEGMENTS = (1, 4, 16, 64)
PLAIN = "bench/plain"

T = TypeVar("T")
Measure = Callable[[], Awaitable[float]]


class Bench:
    """A client, and the streams and the journal that it writes to. Use on one event loop."""

    def __init__(self, client: JournalClient) -> None:
        self.client = client

    async def create(self) -> None:
        streams = Streams(self.client)
        template = default_template(stores=())  # Do not measure the compression of fragments.
        for segments in SEGMENTS:
            await streams.create(
                f"bench/{segments}", segments, template=template, content_type=BytesEvents().content_type
            )
        await streams.ensure_part("bench/1", PLAIN, content_type=BytesEvents().content_type)

    def writer(self, segments: int) -> StreamWriter[bytes]:
        return StreamWriter(self.client, f"bench/{segments}", format=BytesEvents())

    @asynccontextmanager
    async def warm(self, segments: int = 1) -> AsyncIterator[StreamWriter[bytes]]:
        """Yield a writer that has already written to all segments, so that their first writes are not measured."""
        async with self.writer(segments) as writer:
            await asyncio.gather(*(writer.write_events(f"key-{number}", EVENTS) for number in range(4 * segments)))
            yield writer

    def plain(self, writer: StreamWriter[bytes]) -> bytes:
        """Return the bytes of a transaction of `EVENTS`."""
        format, producer = BytesEvents(), new_producer_id(lambda size: b"x" * size)
        events = [format.marshal(event, build_uuid(producer, 1, Flags.CONTINUE_TXN)) for event in EVENTS]
        end = format.transaction_end(build_uuid(producer, 2, Flags.ACK_TXN), writer.identity.writer, 1)
        return b"".join([*events, end])

    async def latency(self) -> tuple[float, float]:
        """Return the median latencies in milliseconds: of a transaction, and of a plain append."""
        found: tuple[list[float], list[float]] = ([], [])
        async with self.warm() as writer:
            content = self.plain(writer)
            for _ in range(COMMITS):
                begun = time.perf_counter()
                await writer.write_events("key", EVENTS)
                between = time.perf_counter()
                await self.client.append(PLAIN, content)
                found[0].append(between - begun)
                found[1].append(time.perf_counter() - between)
        return statistics.median(found[0]) * 1e3, statistics.median(found[1]) * 1e3

    async def written_latency(self) -> tuple[float, float]:
        """Measure like `latency`, but only the `commit` of a transaction that is already open and written."""
        found: tuple[list[float], list[float]] = ([], [])
        async with self.warm() as writer:
            content = self.plain(writer)
            for _ in range(COMMITS):
                async with writer.transaction("key") as txn:
                    for event in EVENTS:
                        txn.write(event)
                    begun = time.perf_counter()
                    await txn.commit()
                between = time.perf_counter()
                await self.client.append(PLAIN, content)
                found[0].append(between - begun)
                found[1].append(time.perf_counter() - between)
        return statistics.median(found[0]) * 1e3, statistics.median(found[1]) * 1e3

    async def multi_latency(self) -> tuple[float, float]:
        """Return median latencies in milliseconds: of a transaction on keys of two segments, and of one on one key."""
        found: tuple[list[float], list[float]] = ([], [])
        async with self.warm(4) as single, self.multi() as several:
            await self.commit_several(several)
            for _ in range(COMMITS // 2):
                begun = time.perf_counter()
                await self.commit_several(several)
                between = time.perf_counter()
                await single.write_events("", EVENTS)
                found[0].append(between - begun)
                found[1].append(time.perf_counter() - between)
        return statistics.median(found[0]) * 1e3, statistics.median(found[1]) * 1e3

    def multi(self) -> MultiKeyWriter[bytes]:
        return MultiKeyWriter(self.client, "bench/4", format=BytesEvents())

    async def commit_several(self, writer: MultiKeyWriter[bytes]) -> None:
        async with writer.transaction() as txn:
            for number, event in enumerate(EVENTS):
                txn.write("" if number % 2 else "a", event)  # Keys of the first and of the last segment.

    async def rate(self, tasks: int, commit: Callable[[int], Awaitable[object]]) -> float:
        """Return the commits per second of `tasks` tasks. `commit` gets the task's number."""
        done = 0
        begun = time.perf_counter()
        until = begun + SECONDS

        async def task(number: int) -> None:
            nonlocal done
            while time.perf_counter() < until:
                await commit(number)
                done += 1

        await asyncio.gather(*map(task, range(tasks)))
        return done / (time.perf_counter() - begun)

    def transactions(self, *, tasks: int = TASKS, keys: int = TASKS, segments: int = 1) -> Measure:
        async def measure() -> float:
            turns = itertools.count()
            async with self.warm(segments) as writer:
                return await self.rate(tasks, lambda _: writer.write_events(f"key-{next(turns) % keys}", EVENTS))

        return measure

    def appends(self, tasks: int) -> Measure:
        async def measure() -> float:
            async with self.writer(1) as writer:
                content = self.plain(writer)
            return await self.rate(tasks, lambda _: self.client.append(PLAIN, content))

        return measure

    async def several(self) -> float:
        async with self.multi() as writer:
            await self.commit_several(writer)
            return await self.rate(TASKS, lambda _: self.commit_several(writer))

    async def pipelined_transactions(self) -> float:
        """Return the transactions per second of one task that does not wait for commits."""
        async with self.warm() as writer:
            begun = time.perf_counter()
            for number in range(PIPELINED):
                writer.write_events(f"key-{number % TASKS}", EVENTS)
                await writer.drain()
            await writer.flush()
            return PIPELINED / (time.perf_counter() - begun)

    async def pipelined_appends(self) -> float:
        async with self.writer(1) as writer:
            content = self.plain(writer)
        begun = time.perf_counter()
        async with AppendService(self.client) as service:
            for _ in range(PIPELINED):
                await service.append(PLAIN, content)
        return PIPELINED / (time.perf_counter() - begun)

    async def pipelined_events(self) -> float:
        """Return the events per second, without transactions, of one task that does not wait for them."""
        async with self.warm() as writer:
            begun = time.perf_counter()
            for number in range(PIPELINED * len(EVENTS)):
                writer.write_event(f"key-{number % TASKS}", EVENT)
                if number % len(EVENTS) == 0:
                    await writer.drain()
            await writer.flush()
            return PIPELINED * len(EVENTS) / (time.perf_counter() - begun)

    async def pipelined_events_in_transactions(self) -> float:
        return await self.pipelined_transactions() * len(EVENTS)


def _figures(rounds: int) -> Iterator[Figure]:
    with cluster_of(1) as (cluster, _), asyncio.Runner() as runner:
        bench = runner.run(_bench(cluster.info.endpoint))

        def pair(floor: Measure, subject: Measure) -> tuple[list[float], list[float]]:
            return measure_pairs(rounds, lambda: runner.run(_of(floor)), lambda: runner.run(_of(subject)))

        def latencies(measure: Callable[[], Awaitable[tuple[float, float]]]) -> tuple[list[float], list[float]]:
            runner.run(_of(measure))
            found = [runner.run(_of(measure)) for _ in range(rounds)]
            return [one for one, _ in found], [other for _, other in found]

        try:
            size = len(bench.plain(bench.writer(1)))
            plain = f"plain appends of the same {size} bytes"
            yield Figure("commit of a transaction, p50", "ms", *latencies(bench.latency), plain, "less is better")
            measured = latencies(bench.written_latency)
            yield Figure("commit of events written before, p50", "ms", *measured, plain, "less is better")
            for tasks in (1, TASKS):
                name = f"transactions, {tasks} task{'s' if tasks > 1 else ''}"
                measured = pair(bench.appends(tasks), bench.transactions(tasks=tasks, keys=tasks))
                yield Figure(name, "transactions/s", *measured, plain)
            measured = pair(bench.pipelined_appends, bench.pipelined_transactions)
            yield Figure("transactions, pipelined", "transactions/s", *measured, f"{plain}, by AppendService")
            measured = pair(bench.pipelined_events, bench.pipelined_events_in_transactions)
            yield Figure("events in transactions of ten, pipelined", "events/s", *measured, "events by themselves")
            yield Figure(
                *("commit on two segments, p50", "ms", *latencies(bench.multi_latency)),
                "transactions on one key",
                "less is better",
            )
            measured = pair(bench.transactions(segments=4), bench.several)
            yield Figure(f"on two segments, {TASKS} tasks", "transactions/s", *measured, "transactions on one key")
            for keys in KEYS[1:]:
                measured = pair(bench.transactions(keys=1), bench.transactions(keys=keys))
                yield Figure(f"{keys} routing keys, {TASKS} tasks", "transactions/s", *measured, "one routing key")
            for segments in SEGMENTS[1:]:
                measured = pair(bench.transactions(), bench.transactions(segments=segments))
                yield Figure(f"{segments} segments, {TASKS} tasks", "transactions/s", *measured, "one segment")
        finally:
            runner.run(bench.client.close())


async def _bench(endpoint: str) -> Bench:
    bench = Bench(JournalClient(endpoint))
    await bench.create()
    return bench


async def _of(measure: Callable[[], Awaitable[T]]) -> T:
    return await measure()


def run(rounds: int) -> list[Figure]:
    return list(_figures(rounds))
