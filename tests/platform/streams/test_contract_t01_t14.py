"""The contract of transactions on one routing key, rows T1 to T14, each in its smallest form.

Cuts are placed exactly (`stream_world.py`). The simulation checks the same rows under random failures.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

import pytest

from coranto.client.committed import async_committed_reader
from coranto.errors import (
    CommitUnknown,
    CorantoError,
    MaxTransactionSizeExceeded,
    PositionUnknown,
    TransactionStateError,
    TransactionTimeout,
)
from coranto.messages.framing import Envelope, iter_messages
from coranto.messages.uuids import Flags
from coranto.streams.control.scaling import Merge, Split
from coranto.streams.model.events import BytesEvents, JsonEvents
from coranto.streams.model.keys import key_hash
from coranto.streams.model.stream import segment_journal
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.stream_writer import MAX_TRANSACTION_BYTES, StreamWriter
from coranto.streams.writer.transactions import Transaction, TransactionState
from coranto.streams.writer.units import CommitResult
from coranto.testing.sim.loop import simulated
from tests.platform.streams.stream_world import STREAM, CutPoint, StreamWorld, VirtualClock, stream_world

from .full_counts import cut_bytes, read_back, reading_everywhere

JOURNAL = segment_journal(STREAM, 0)
CUTS = [point for point in CutPoint if point is not CutPoint.REST]
"""The cut points of an append with one message of content."""
WAYS = [*((cut, False) for cut in CUTS), (CutPoint.COMMIT, True), (CutPoint.ANSWER, True)]
"""These points for an append in a separate call, and those that differ on a shared stream (True)."""
SIZES = [1, 1 << 16, 8 << 20, MAX_TRANSACTION_BYTES]
"""Sizes of content in bytes with equal guarantees (T12). The last one includes all framing."""


def transactions_of(messages: Iterable[Envelope[Any]]) -> list[list[Any]]:
    """Return the transactions of a segment in order, each as the contents of its events.

    Fails unless each is contiguous, of one producer, and followed by its end.
    """
    found: list[list[Any]] = []
    events: list[Envelope[Any]] = []
    for message in messages:
        assert not events or message.producer == events[0].producer, "a transaction is interrupted"
        if message.flags == Flags.CONTINUE_TXN:
            events.append(message)
        elif events:
            assert message.flags == Flags.ACK_TXN, "a transaction has no end"
            found.append([each.message for each in events])
            events = []
    assert not events, "a transaction has no end"
    return found


def numbers(transactions: list[list[Any]]) -> list[list[int]]:
    return [[event["n"] for event in events] for events in transactions]


async def committed(world: StreamWorld, segment: int = 0) -> list[Any]:
    """Return the messages that read-committed readers get from a segment, without transaction ends."""
    journal = segment_journal(world.stream, segment)
    if not (end := await world.client.head(journal)):
        return []
    reader = async_committed_reader(world.client, journal, JsonEvents(), end=end)
    async with contextlib.aclosing(reader):
        return [message.message async for message in reader if message.flags != Flags.ACK_TXN]


async def write(writer: StreamWriter[Any], key: str, *events: Any, **options: Any) -> CommitResult:
    async with writer.transaction(key, **options) as txn:
        for event in events:
            txn.write(event)
        return await txn.commit()


# ------------------------------------------------------------------------------------------------- T1: all or nothing


async def sized(writer: StreamWriter[Any], size: int, number: int) -> list[bytes]:
    """Return three events that form a transaction of this size and contain its number."""
    async with writer.transaction(f"probe {number}") as txn:
        for _ in range(3):
            txn.write(b"")
        overhead = txn.size if size == MAX_TRANSACTION_BYTES else 0
        txn.abort()
    marks = [b"%d.%d." % (number, part) for part in range(3)] if size > 100 else [b"", b"", b"%d" % number]
    rest = size - overhead - sum(map(len, marks))
    return [mark + bytes(rest // 3 + (rest % 3 if part == 2 else 0)) for part, mark in enumerate(marks)]


@pytest.mark.parametrize("size", SIZES)
async def test_t01_and_t12_all_or_nothing_wherever_the_connection_breaks(world: StreamWorld, size: int) -> None:
    given = []
    async with (
        StreamWriter(world.client, STREAM, format=BytesEvents()) as sharing,
        StreamWriter(world.calling_client, STREAM, format=BytesEvents()) as calling,
    ):
        cuts = [CutPoint.REST, CutPoint.CONTENT, CutPoint.COMMIT, CutPoint.ANSWER]
        if size == MAX_TRANSACTION_BYTES:
            cuts = [CutPoint.REST, CutPoint.ANSWER]
        sequences = {sharing: 0, calling: 0}
        # Large content never shares a stream.
        for number, (cut, shares) in enumerate(WAYS if size <= 1 << 16 else [(cut, True) for cut in cuts]):
            writer = sharing if shares else calling
            events = await sized(writer, size, number)
            world.wire.cut(cut)
            result = await write(writer, "key", *events)
            assert not world.wire.cuts
            assert (result.sequence, result.end - result.begin >= size) == (sequences[writer], True)
            sequences[writer] += 1
            given.append(events)
    assert transactions_of(await world.messages(events=BytesEvents())) == given


async def test_t01_connections_that_break_at_any_byte() -> None:
    """On real connections. The contract's count is `python -m tests.platform.streams.full_counts t1`."""
    found = await cut_bytes(46)
    assert found["cuts"] >= 34
    assert 6 < found["sent again"] < found["cuts"], "cuts before and after the commit"


async def test_t01_a_writer_that_stops_during_a_commit_leaves_all_or_nothing(world: StreamWorld) -> None:
    for number, (cut, shares) in enumerate(WAYS):
        writer = StreamWriter(world.client if shares else world.calling_client, STREAM, retry_timeout=30)
        await writer.open()
        gone = asyncio.Event()
        world.wire.cut(cut, then=gone.set)
        commit = asyncio.create_task(write(writer, "key", *[{"n": number, "part": part} for part in range(3)]))
        await gone.wait()
        await writer.close(deadline=0)
        await asyncio.gather(commit, return_exceptions=True)
    found = transactions_of(await world.messages())
    assert all([event["part"] for event in events] == [0, 1, 2] for events in found)
    numbers_found = [events[0]["n"] for events in found]
    assert len(set(numbers_found)) == len(numbers_found)
    applied = {number for number, (cut, _) in enumerate(WAYS) if cut in (CutPoint.ANSWER, CutPoint.STATUS)}
    assert set(numbers_found) >= applied


# ----------------------------------------------------------------------------------------- T2: ordered and contiguous


async def test_t02_transactions_of_many_writers_on_one_key_are_contiguous_and_ordered(world: StreamWorld) -> None:
    async def work(number: int) -> list[CommitResult]:
        async with StreamWriter(world.client if number % 2 else world.calling_client, STREAM) as writer:
            return [
                await write(writer, "key", *[{"n": n, "writer": number, "turn": turn} for n in range(5)])
                for turn in range(3)
            ]

    results = await asyncio.gather(*map(work, range(20)))
    content = await world.content()
    found = transactions_of(await world.messages())
    assert len(found) == 60
    for events in found:
        assert [event["n"] for event in events] == [0, 1, 2, 3, 4]
        assert len({(event["writer"], event["turn"]) for event in events}) == 1
    for number, theirs in enumerate(results):
        assert [result.begin for result in theirs] == sorted(result.begin for result in theirs)
        for turn, result in enumerate(theirs):
            lines = content[result.begin : result.end].splitlines()
            assert len(lines) == 6
            assert all(f'"writer":{number},"turn":{turn}'.encode() in line for line in lines[:5])


# --------------------------------------------------------------------------------------- T3: invisible until commit


async def test_t03_an_open_or_aborted_transaction_leaves_no_bytes_anywhere() -> None:
    marks = [b"marked-open", b"marked-aborted", b"marked-cut"]
    async with stream_world(3, replication=3) as world:
        client, seen = world.client, bytearray()

        async def tail() -> None:
            async for chunk in client.read(JOURNAL, 0, block=True):
                seen.extend(chunk.content)
                if b'"end":true' in seen:
                    return

        tailing = asyncio.create_task(tail())

        def places() -> list[bytes]:
            files = [data for number in range(3) for data in world.cluster.files(number).values()]
            return [bytes(seen), *files, *world.cluster.fragments(JOURNAL).values()]

        async with StreamWriter(client, STREAM) as writer:
            await writer.write_event("key", {"n": 0})
            aborted = writer.transaction("aborted")
            async with aborted:
                aborted.write({"mark": "marked-aborted"})
                aborted.abort()
            txn = writer.transaction("key")
            async with txn:
                txn.write({"mark": "marked-open"})
                await writer.write_event("key", {"n": 1})
                head = await client.head(JOURNAL)
                with pytest.raises(CorantoError):
                    await client.read_all(JOURNAL, head, head + 1)
                assert not [mark for mark in marks for place in places() if mark in place]
                world.wire.cut(CutPoint.HALF_CLOSE)
                txn.write({"mark": "marked-cut"})
        await client.append(JOURNAL, b'{"end":true}\n')
        async with asyncio.timeout(120):
            await tailing
        assert seen == await world.content()
        assert seen.count(b"marked-open") == seen.count(b"marked-cut") == 1  # The attempt that was cut left nothing.
        assert not [place for place in places() if b"marked-aborted" in place]


@pytest.mark.parametrize(
    ("cut", "shares"), [(CutPoint.PARAMETERS, False), (CutPoint.CONTENT, False), (CutPoint.COMMIT, True)]
)
async def test_t03_a_commit_that_fails_before_it_is_applied_leaves_no_bytes_anywhere(
    cut: CutPoint, shares: bool
) -> None:
    async with stream_world(3, replication=3, log_level="critical", append_streams=shares) as world:
        writer = StreamWriter[Any](world.client, STREAM, retry_timeout=5)
        await writer.open()
        await writer.write_event("key", {"n": 0})
        gone = asyncio.Event()
        world.wire.cut(cut, then=gone.set)
        broken = writer.write_events("key", [{"mark": "marked-broken"}])
        await gone.wait()
        await writer.close(deadline=0)
        with pytest.raises(CommitUnknown):
            await broken
        await world.client.append(JOURNAL, b"")  # After everything that the brokers still did with the append.
        places = [data for number in range(3) for data in world.cluster.files(number).values()]
        assert any(b'"n":0' in place for place in places)
        assert not [place for place in [*places, await world.content()] if b"marked-broken" in place]


# ------------------------------------------------------------------------------------- T4, T5: read your commits


async def test_t04_a_commit_is_readable_immediately_by_any_client_at_any_broker() -> None:
    """The contract's count is `python -m tests.platform.streams.full_counts t4`."""
    async with reading_everywhere() as (world, readers):
        peers: set[str] = set()
        heard = world.wire.hear

        def hear(call: Any, to_server: bool, message: tuple[Any, ...]) -> bool:
            if call.method.name == "Read" and call.node.startswith("client-"):
                peers.add(call.peer)
            return heard(call, to_server, message)

        world.cluster._world.rpc.on_delivery = hear
        async with StreamWriter(world.client, STREAM) as writer:
            for number in range(20):
                result = await write(writer, "key", {"n": number})
                contents = await asyncio.gather(
                    *(reader.read_all(JOURNAL, result.begin, result.end) for reader in readers)
                )
                assert all(b'"n":%d}' % number in content for content in contents)
        assert len(peers) == 3
    found = await read_back(100, moves=0)
    assert (sum(found.values()), found["violations"]) == (100, 0)


@pytest.mark.parametrize("size", SIZES)
async def test_t12_transactions_of_any_size_are_contiguous_isolated_and_readable(size: int) -> None:
    """T2, T3 and T4 at the sizes of T12; T1 and T10 have the same sizes in other tests."""
    async with reading_everywhere() as (world, readers):
        given: dict[int, tuple[CommitResult, list[bytes]]] = {}
        bytes_events = BytesEvents()
        all_written = asyncio.Barrier(3)

        async def work(number: int) -> None:
            async with StreamWriter(world.cluster.client(), STREAM, format=bytes_events) as writer:
                events = await sized(writer, size, number)
                async with writer.transaction("key") as txn:
                    for event in events:
                        txn.write(event)
                    await all_written.wait()
                    assert not number or (world.wire.contents, await world.client.head(JOURNAL)) == ([], 0)
                    await all_written.wait()
                    result = await txn.commit()
                given[number] = result, events
                content = await readers[number].read_all(JOURNAL, result.begin, result.end)
                found = list(iter_messages(bytes_events, JOURNAL, [content], result.begin))
                assert [message.message for message in found[:-1]] == events
                assert len(found) == 4

        await asyncio.gather(*map(work, range(3)))
        found = transactions_of(await world.messages(events=bytes_events))
        in_order = sorted(given.values(), key=lambda each: each[0].begin)
        assert found == [events for _, events in in_order]
        async with StreamReader(readers[0], STREAM, format=bytes_events) as reader:
            delivered = [[event.data for event in txn.events] async for txn in reader.transactions()]
        assert delivered == found


async def test_t05_a_commit_returns_its_position() -> None:
    async with stream_world(segments=3) as world:
        results: dict[tuple[int, int, int], list[int]] = {}
        async with StreamWriter(world.client, STREAM) as writer:
            for number in range(10):
                key = f"key {number}"
                async with writer.transaction(key) as txn:
                    txn.write({"n": number})
                    txn.write({"n": -number})
                    size = txn.size
                    result = await txn.commit()
                segment = (await world.streams.describe(STREAM)).segment_of(key)
                assert segment is not None
                assert (result.journal, result.segment) == (segment.journal, segment.number)
                assert result.key_hash == key_hash(key)
                assert result.end - result.begin == size
                assert 0 < result.mod_revision <= world.cluster.revision
                content = (await world.content(segment.number))[result.begin : result.end]
                assert content.endswith(b'"sequence":"%016x"}}\n' % result.sequence)
                results[result.segment, result.begin, result.end] = [number, -number]
        async with StreamReader[Any](world.client, STREAM) as reader:
            async for each in reader.transactions():
                observed = [event.data["n"] for event in each.events]
                assert results.pop((each.segment, each.begin, each.end)) == observed
        assert not results


# --------------------------------------------------------------------------------------------------- T6: aborts


async def fail_within(txn: Transaction[Any]) -> None:
    async with txn:
        txn.write({"n": 2})
        raise ZeroDivisionError


async def test_t06_an_abort_leaves_nothing(world: StreamWorld) -> None:
    end = 0
    async with StreamWriter(world.client, STREAM) as writer:
        for appends in (0, 1):
            async with writer.transaction("key") as txn:
                txn.write({"n": 1})
                txn.abort()
            txn = writer.transaction("key")
            with pytest.raises(ZeroDivisionError):
                await fail_within(txn)
            assert txn.state is TransactionState.ABORTED
            with pytest.raises(TransactionStateError, match="aborted"):
                txn.write({"n": 3})
            await writer.flush()  # All pending work of the writer is done.
            assert len(world.wire.contents) == appends
            assert await world.client.head(JOURNAL) == end
            if not appends:
                end = (await write(writer, "key", {"n": 0})).end
    assert await world.client.head(JOURNAL) == end


# ------------------------------------------------------------------------------------------- T7: bounded in size


@pytest.mark.parametrize("limit", [1000, MAX_TRANSACTION_BYTES])
async def test_t07_the_size_of_a_transaction_with_framing_is_bounded(world: StreamWorld, limit: int) -> None:
    async with StreamWriter(world.client, STREAM, format=BytesEvents(), max_transaction_bytes=limit) as writer:
        async with writer.transaction("probe") as txn:
            txn.write(b"")
            overhead = txn.size
        for size in (limit - 1, limit):
            result = await write(writer, "key", bytes(size - overhead))
            assert result.end - result.begin == size
        calls = len(world.wire.appends)
        async with writer.transaction("key") as txn:
            txn.write(b"kept")
            with pytest.raises(MaxTransactionSizeExceeded) as raised:
                txn.write(bytes(limit + 1 - overhead - 28))
            assert (raised.value.limit, raised.value.actual) == (limit, limit + 1)
            txn.write(bytes(limit - overhead - 28))  # The transaction is unchanged and has room for one byte less.
            with pytest.raises(MaxTransactionSizeExceeded):
                txn.write(b"")
            assert len(world.wire.appends) == calls
            txn.abort()
        with pytest.raises(MaxTransactionSizeExceeded):
            writer.write_event("key", bytes(limit + 1 - 24))
        with pytest.raises(MaxTransactionSizeExceeded):
            writer.write_events("key", [bytes(limit - overhead), b""])
        assert len(world.wire.appends) == calls


# ------------------------------------------------------------------------------------------- T8: bounded in time


async def test_t08_the_time_of_a_transaction_is_bounded(world: StreamWorld, virtual_clock: VirtualClock) -> None:
    async def time_out(txn: Transaction[Any]) -> None:
        async with txn:
            txn.write({"n": 1})
            await virtual_clock.advance(4.9)
            txn.write({"n": 2})
            assert txn.state is TransactionState.OPEN
            await virtual_clock.advance(0.2)
            assert txn.raw_state is TransactionState.TIMED_OUT  # Without any call on it,
            assert txn.size == 0  # and its events are dropped.
            with pytest.raises(TransactionTimeout):
                txn.write({"n": 3})
            with pytest.raises(TransactionTimeout):
                await txn.commit()

    async with StreamWriter(world.client, STREAM, clock=virtual_clock) as writer:
        txn = writer.transaction("key", timeout=5)
        async with writer.transaction("other", timeout=60) as other:
            other.write({"n": 0})
            with pytest.raises(TransactionTimeout, match="more than 5 s"):
                await time_out(txn)
            txn.abort()
            result = await write(writer, "key", {"n": 4}, timeout=5)
        assert result.begin == 0
        assert numbers(transactions_of(await world.messages())) == [[4], [0]]


# ------------------------------------------------------------------------------------------- T9: no coordinator


async def test_t09_a_commit_is_one_append_to_the_primary() -> None:
    async with stream_world(3, replication=3) as world:
        for client in (world.client, world.calling_client):
            async with StreamWriter(client, STREAM) as writer:
                for number in range(3):
                    async with writer.transaction("key") as txn:
                        txn.write({"n": number})
                        revision = world.cluster.revision
                        calls = {method: world.cluster.calls(method) for method in ("List", "Read", "Apply")}
                        appends = world.cluster.appends()
                        await txn.commit()
                        assert world.cluster.appends() == appends + 1
                        assert {method: world.cluster.calls(method) for method in calls} == calls
                        if number:  # The first append of a journal also writes the broker's own records.
                            assert world.cluster.revision == revision


# ------------------------------------------------------------------------------------ T10, T12: exactly once


@pytest.mark.parametrize("size", [1, 1 << 16, 8 << 20, MAX_TRANSACTION_BYTES])
async def test_t10_and_t12_a_lost_answer_is_recovered_at_any_size(world: StreamWorld, size: int) -> None:
    async with StreamWriter(world.client, STREAM, format=BytesEvents()) as writer:
        async with writer.transaction("probe") as txn:
            txn.write(b"")
            overhead = txn.size if size == MAX_TRANSACTION_BYTES else 0
        before = await world.client.head(JOURNAL)
        world.wire.cut(CutPoint.ANSWER)
        cut = await write(writer, "key", bytes(size - overhead))
        appends = len(world.wire.contents)
        plain = await write(writer, "key", bytes(size - overhead))
        assert len(world.wire.contents) == appends + 1
    assert cut.begin == before  # Found by its UUID, because no answer arrived.
    assert (cut.end, cut.end - cut.begin) == (plain.begin, plain.end - plain.begin)
    assert cut.end - cut.begin >= size
    assert await world.client.head(JOURNAL) == plain.end
    assert writer.metrics.retried._value.get() == 0  # Nothing was sent twice.


async def test_t10_writes_that_were_not_applied_are_sent_again(world: StreamWorld) -> None:
    for client in (world.client, world.calling_client):
        async with StreamWriter(client, STREAM) as writer:
            await write(writer, "key", {"n": 0})
            world.wire.cut(CutPoint.COMMIT, CutPoint.HALF_CLOSE, CutPoint.ANSWER)
            await write(writer, "key", {"n": 1})
            await write(writer, "key", {"n": 2})
    assert numbers(transactions_of(await world.messages())) == 2 * [[0], [1], [2]]


# ------------------------------------------------------------------------- T11: when the process restarts


@pytest.mark.parametrize(
    ("cut", "shares"),
    [
        (CutPoint.PARAMETERS, False),
        (CutPoint.CONTENT, False),
        (CutPoint.COMMIT, True),
        (CutPoint.HALF_CLOSE, False),
        (CutPoint.ANSWER, True),
        (CutPoint.STATUS, False),
    ],
)
async def test_t11_a_restarted_process_continues_at_the_last_durable_sequence(
    world: StreamWorld, cut: CutPoint, shares: bool
) -> None:
    writer = StreamWriter(world.client if shares else world.calling_client, STREAM, writer_id="importer")
    await writer.open()
    original = [await write(writer, "key", {"n": n}, {"n": -n}, sequence=n) for n in range(3)]
    killed = asyncio.Event()
    world.wire.cut(cut, then=killed.set)
    commit = asyncio.create_task(write(writer, "key", {"n": 3}, {"n": -3}, sequence=3))
    await killed.wait()
    await writer.close(deadline=0)
    await asyncio.gather(commit, return_exceptions=True)
    async with StreamWriter(world.client, STREAM, writer_id="importer") as again:
        applied = await again.last_sequence("key")
        # To the broker, a broken connection may look like the end of the client's messages.
        possible = {CutPoint.ANSWER: (3,), CutPoint.STATUS: (3,), CutPoint.HALF_CLOSE: (2, 3)}
        assert applied in possible.get(cut, (2,))
        results = [await write(again, "key", {"n": n}, {"n": -n}, sequence=n) for n in range(4)]
        assert [result.deduplicated for result in results] == [n <= applied for n in range(4)]
        for before, after in zip(original, results, strict=False):
            assert (before.begin, before.end, before.journal) == (after.begin, after.end, after.journal)
        event = await again.write_event("key", {"n": 3}, sequence=3)
        assert (event.deduplicated, event.begin) == (True, -1)
    assert numbers(transactions_of(await world.messages())) == [[n, -n] for n in range(4)]


async def test_t11_positions_are_found_in_predecessors(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM, writer_id="importer") as writer:
        original = await write(writer, "key", {"n": 0}, sequence=10)
    await world.streams.scale(STREAM, [Split(0)])
    async with StreamWriter(world.client, STREAM, writer_id="importer") as writer:
        assert await writer.last_sequence("key") == 10
        again = await write(writer, "key", {"n": 0}, sequence=10)
        assert again.deduplicated
        assert again[:4] == original[:4]
        later = await write(writer, "key", {"n": 1}, sequence=11)
        assert later.segment in (1, 2)
    async with StreamWriter(world.client, STREAM, writer_id="importer") as writer:
        assert await writer.last_sequence("key") == 11
        for sequence, result in ((10, original), (11, later)):
            again = await write(writer, "key", {"n": sequence - 10}, sequence=sequence)
            assert again.deduplicated
            assert again[:4] == result[:4]
        with pytest.raises(PositionUnknown):
            await write(writer, "key", {"n": -1}, sequence=5)  # This sequence was never used.


async def test_t11_after_a_merge_each_key_continues_at_its_own_sequence() -> None:
    """The missing writes of one segment are appended although the other segment was ahead."""
    async with stream_world(segments=2) as world:
        stream = await world.streams.describe(STREAM)
        low, high = (
            next(key for key in map(str, range(100)) if stream.segment_of(key) == each) for each in stream.active()
        )
        given = [(4, low), (5, low), (6, high), (7, low), (8, high)]
        writer = StreamWriter(world.client, STREAM, writer_id="importer", retry_timeout=0.01)
        await writer.open()
        await write(writer, low, {"n": 4}, sequence=4)
        world.wire.cut(CutPoint.COMMIT)
        with pytest.raises(CorantoError):
            await write(writer, low, {"n": 5}, sequence=5)
        await write(writer, high, {"n": 6}, sequence=6)
        await writer.close()
        await world.streams.scale(STREAM, [Merge((0, 1))])
        for known in ({4, 6}, {4, 5, 6, 7, 8}):
            async with StreamWriter(world.client, STREAM, writer_id="importer") as again:
                # The entry of the merged segment covers both.
                assert await again.last_sequence(low) == (4 if known == {4, 6} else 8)
                results = [await write(again, key, {"n": n}, sequence=n) for n, key in given]
                assert {n for (n, _), result in zip(given, results, strict=True) if result.deduplicated} == known
        found = [numbers(transactions_of(await world.messages(segment))) for segment in range(3)]
        assert found == [[[4]], [[6]], [[5], [7], [8]]]


# --------------------------------------------------------------------------- T13: moved, sealed and split


async def test_t13_transactions_go_whole_to_one_successor_through_splits_and_merges(world: StreamWorld) -> None:
    keys = [f"key {number}" for number in range(12)]
    given: dict[str, list[int]] = {key: [] for key in keys}
    stop = False

    async def work(writer: StreamWriter[Any], key: str) -> None:
        number = 0
        while not stop or number < 5:
            if number % 3 == 2:
                await writer.write_event(key, {"key": key, "n": number})
                given[key].append(number)
                number += 1
            else:
                await write(writer, key, {"key": key, "n": number}, {"key": key, "n": number + 1})
                given[key] += [number, number + 1]
                number += 2

    async with StreamWriter(world.client, STREAM) as writer:
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(work(writer, key))
            for _ in range(3):
                stream = await world.streams.describe(STREAM)
                stream = await world.streams.scale(STREAM, [Split(segment.number) for segment in stream.active()])
                whole = [segment.number for segment in stream.active()]
                await world.streams.scale(STREAM, [Merge(tuple(whole[:3] if len(whole) > 2 else whole))])
            stop = True
    stream = await world.streams.describe(STREAM)
    found: dict[str, list[int]] = {key: [] for key in keys}
    for segment in sorted(stream.segments.values(), key=lambda segment: (segment.epoch, segment.number)):
        messages = await world.messages(segment.number)
        assert all(len(events) == 2 for events in transactions_of(messages))
        for event in await committed(world, segment.number):
            found[event["key"]].append(event["n"])
    assert found == given


async def test_t13_an_open_transaction_goes_to_a_successor_whole(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM) as writer:
        await write(writer, "key", {"n": 0})
        async with writer.transaction("key") as txn:
            txn.write({"n": 1})
            stream = await world.streams.scale(STREAM, [Split(0)])
            txn.write({"n": 2})
            result = await txn.commit()
    successor = stream.segment_of("key")
    assert successor is not None
    assert result.segment == successor.number
    assert numbers(transactions_of(await world.messages(0))) == [[0]]
    assert numbers(transactions_of(await world.messages(result.segment))) == [[1, 2]]


@pytest.mark.parametrize("gracefully", [False, True])
def test_t13_a_transaction_whose_journal_moves_is_committed_once(gracefully: bool) -> None:
    """Another broker becomes primary while the transaction is open and others are in flight."""

    async def primary(world: StreamWorld) -> int:
        (info,) = (await world.client.list(f"name={JOURNAL}")).journals
        return int(info.route.members[info.route.primary].suffix.removeprefix("broker-"))

    async def main() -> None:
        async with stream_world(3, replication=2, log_level="critical") as world:
            async with StreamWriter(world.client, STREAM, in_flight=4, batch_bytes=1) as writer:
                await write(writer, "key", {"n": 0})
                before = await primary(world)
                async with writer.transaction("key") as txn:
                    txn.write({"n": 4})
                    in_flight = [writer.write_events("key", [{"n": n}, {"n": n}]) for n in (1, 2, 3)]
                    sent = len(world.wire.contents)
                    while len(world.wire.contents) == sent:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                    await (world.cluster.stop(before) if gracefully else world.cluster.kill(before, expire=True))
                    txn.write({"n": 5})
                    await txn.commit()
                await asyncio.gather(*in_flight)
            assert await primary(world) != before
            assert numbers(transactions_of(await world.messages())) == [[0], [1, 1], [2, 2], [3, 3], [4, 5]]

    with simulated(seed=1) as loop:  # So that the test need not wait for a lease.
        loop.run_until_complete(main())


@pytest.mark.parametrize("cut", [CutPoint.COMMIT, CutPoint.ANSWER])
async def test_t13_a_commit_in_doubt_is_resolved_by_the_sealed_segment(world: StreamWorld, cut: CutPoint) -> None:
    """The connection breaks at the commit; after the reconnect the segment is sealed."""
    async with StreamWriter(world.client, STREAM) as writer:
        await write(writer, "key", {"n": 0})
        broken = asyncio.Event()

        def down() -> None:
            world.cluster.cut("client", 0)
            broken.set()

        admin = world.cluster.client(name="admin")
        world.wire.cut(cut, then=down)
        done = writer.write_events("key", [{"n": 1}, {"n": 2}])
        await broken.wait()
        later = writer.write_event("key", {"n": 3})
        await type(world.streams)(admin).scale(STREAM, [Split(0)])
        world.cluster.heal()
        result, position = await done, await later
    assert (result.segment == 0) is (cut is CutPoint.ANSWER)
    assert position.segment != 0
    whole = numbers(transactions_of([*await world.messages(0), *await world.messages(position.segment)]))
    assert whole == [[0], [1, 2]]
    assert [event["n"] for event in await committed(world, position.segment)][-1] == 3


# ----------------------------------------------------------------------------- T14: order against plain events


async def test_t14_plain_events_and_transactions_are_read_in_write_order(
    world: StreamWorld,
) -> None:
    async with StreamWriter(world.client, STREAM, in_flight=4, batch_bytes=200) as writer:
        for number in range(60):
            if number % 3:
                writer.write_event("key", {"n": number})
            else:
                writer.write_events("key", [{"n": number}, {"n": number, "second": True}])
            if number % 10 == 0:
                await asyncio.sleep(0)
        # A transaction counts at its commit, not at its begin.
        async with writer.transaction("key") as txn:
            txn.write({"n": 61})
            writer.write_event("key", {"n": 60})
        await writer.flush()
    expected = [n for number in range(60) for n in ([number] if number % 3 else [number, number])]
    assert [event["n"] for event in await committed(world)] == [*expected, 60, 61]
