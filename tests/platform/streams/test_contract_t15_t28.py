"""The contract of transactions on one routing key, rows T15 to T28, each in its smallest form.

T16 is in `test_transactions.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from coranto import labels
from coranto.client import JournalClient
from coranto.effects import SystemClock
from coranto.errors import (
    CommitUnknown,
    CorantoError,
    EarlierWriteFailed,
    InvalidInput,
    Outcome,
    PositionUnknown,
    PreconditionFailed,
    StreamNotFound,
    StreamSealed,
    TransactionInProgress,
    TransactionTimeout,
    Unauthenticated,
    WriteError,
    WriterClosed,
    WriterExpired,
    WriterFenced,
)
from coranto.security.tokens import BearerToken
from coranto.streams.control.lifecycle import Streams
from coranto.streams.control.scaling import Split
from coranto.streams.model.events import BytesEvents
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.registers import Fence, Registers, WriterEntry, enter
from coranto.streams.model.stream import Segment, segment_journal, spec_of
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.multi_key.writer import MultiKeyWriter
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.streams.writer.transactions import TransactionState
from coranto.streams.writer.units import CommitResult
from coranto.testing.fake_broker import CallPoint, FakeBroker
from coranto.testing.sim.disk import MemoryDisk
from coranto.testing.sim.loop import simulated
from coranto.wire import protocol_pb2 as pb
from tests.platform.streams.stream_world import STREAM, CutPoint, StreamWorld, VirtualClock, lose_records, stream_world

from .full_counts import enter_many

JOURNAL = segment_journal(STREAM, 0)


async def write(writer: StreamWriter[Any], key: str, *events: Any, **options: Any) -> CommitResult:
    async with writer.transaction(key, **options) as txn:
        for event in events:
            txn.write(event)
        return await txn.commit()


async def events_of(world: StreamWorld) -> list[Any]:
    """Return the numbers of all committed events of the stream in order."""
    async with StreamReader[Any](world.client, STREAM) as reader:
        return [event.data["n"] async for event in reader]


async def registers_of(world: StreamWorld) -> Registers:
    return Registers.of((await world.client.append(JOURNAL, b"")).registers)


# ------------------------------------------------------------------------------------------- T15: one open at a time


async def test_t15_a_second_transaction_of_a_key_is_refused_before_any_call(
    world: StreamWorld, virtual_clock: VirtualClock
) -> None:
    async with StreamWriter(world.client, STREAM, clock=virtual_clock) as writer:
        async with writer.transaction("key") as txn:
            calls = len(world.wire.appends)
            with pytest.raises(TransactionInProgress, match="'key'"):
                await writer.transaction("key").__aenter__()
            assert len(world.wire.appends) == calls
            await write(writer, "other key", {"n": 0})
            txn.write({"n": 1})
        await write(writer, "key", {"n": 2})
        async with writer.transaction("key") as txn:
            txn.abort()
            await write(writer, "key", {"n": 3})
        timed_out = await writer.transaction("key", timeout=1).__aenter__()
        await virtual_clock.advance(1)
        await write(writer, "key", {"n": 4})
        with pytest.raises(TransactionTimeout):
            await timed_out.commit()
        async with writer.transaction("key") as txn:
            txn.write({"n": 5})
            commit = asyncio.create_task(txn.commit())
            await asyncio.sleep(0)
            assert txn.state is TransactionState.COMMITTING
            await write(writer, "key", {"n": 6})  # Pipelined after it.
            await commit
    assert await events_of(world) == [0, 1, 2, 3, 4, 5, 6]


# ----------------------------------------------------------------------------------------------------- T17: closing


async def test_t17_closing_aborts_open_transactions_and_awaits_appends_in_flight(world: StreamWorld) -> None:
    writer = StreamWriter(world.client, STREAM)
    await writer.open()
    txn = await writer.transaction("open").__aenter__()
    txn.write({"n": -1})
    done = writer.write_events("key", [{"n": 0}])
    plain = writer.write_event("key", {"n": 1})
    await writer.close()
    assert txn.state is TransactionState.ABORTED
    assert done.result().end == plain.result().begin
    for use in (lambda: writer.write_event("key", {}), lambda: writer.write_events("key", [{}])):
        with pytest.raises(WriterClosed):
            use()
    assert await events_of(world) == [0, 1]


async def test_t17_writes_unfinished_at_the_deadline_are_unknown_or_not_appended(world: StreamWorld) -> None:
    writer = StreamWriter(world.client, STREAM, in_flight=1, batch_bytes=1)
    await writer.open()
    await writer.write_event("key", {"n": 0})
    cut = asyncio.Event()

    def down() -> None:
        world.cluster.cut("client", 0)
        cut.set()

    world.wire.cut(CutPoint.ANSWER, then=down)
    sent, waiting = writer.write_events("key", [{"n": 1}]), writer.write_events("key", [{"n": 2}])
    await cut.wait()
    await writer.close(deadline=0.05)
    with pytest.raises(CommitUnknown) as unknown:
        await sent
    assert unknown.value.outcome is Outcome.UNKNOWN
    with pytest.raises(WriterClosed) as refused:
        await waiting
    assert refused.value.outcome is Outcome.NOT_APPLIED
    world.cluster.heal()
    assert await events_of(world) == [0, 1]


# ---------------------------------------------------------------------------------------------------- T18: outcomes


def subclasses(kind: type[CorantoError]) -> list[type[CorantoError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in subclasses(child))]


def test_t18_every_error_says_whether_the_write_may_be_durable() -> None:
    unknown = {kind for kind in subclasses(WriteError) if kind.outcome is Outcome.UNKNOWN}
    assert unknown == {CommitUnknown, PositionUnknown}
    assert all(isinstance(kind.outcome, Outcome) for kind in subclasses(CorantoError))
    assert WriterExpired("…", Outcome.UNKNOWN).outcome is Outcome.UNKNOWN


async def test_t18_writes_reported_as_not_applied_are_never_read(world: StreamWorld) -> None:
    """Each refusable condition, with later writes in the pipeline."""
    failed: list[tuple[int, CorantoError]] = []
    async with StreamWriter(world.client, STREAM, batch_bytes=1) as writer:
        stale = await writer.raise_fence("key", "owner")
        await writer.raise_fence("key", "owner")
        for number, options in enumerate([{"fence": stale}, {"expected_offset": 3}, {"expected_offset": 0}]):
            first = writer.write_events("key", [{"n": 10 * number}])
            refused = writer.write_events("key", [{"n": 10 * number + 1}], **options)
            behind = [writer.write_events("key", [{"n": 10 * number + n}]) for n in (2, 3)]
            await asyncio.gather(first, *behind)
            with pytest.raises(PreconditionFailed) as raised:
                await refused
            failed.append((10 * number + 1, raised.value))
    assert all(error.outcome is Outcome.NOT_APPLIED for _, error in failed)
    assert await events_of(world) == [10 * number + n for number in range(3) for n in (0, 2, 3)]


async def test_t18_after_a_failed_write_nothing_is_appended(world: StreamWorld) -> None:
    writer = StreamWriter(world.client, STREAM, in_flight=2, batch_bytes=1, retry_timeout=0.01)
    await writer.open()
    await writer.write_event("key", {"n": 0})
    world.wire.cut(CutPoint.COMMIT, then=lambda: world.cluster.cut("client", 0))
    given = [writer.write_event("key", {"n": number}) for number in (1, 2, 3, 4)]
    outcomes = await asyncio.gather(*given, return_exceptions=True)
    world.cluster.heal()
    assert isinstance(outcomes[0], CorantoError)
    for later in outcomes[2:]:
        assert isinstance(later, EarlierWriteFailed)
        assert later.outcome is Outcome.NOT_APPLIED
    with pytest.raises(type(outcomes[0])):
        await writer.flush()
    await writer.flush()  # The error was reported, and the writer continues.
    await writer.write_event("key", {"n": 5})
    await writer.close()
    found = await events_of(world)
    for number, outcome in enumerate(outcomes, start=1):
        assert isinstance(outcome, CorantoError)
        assert number not in found or outcome.outcome is Outcome.UNKNOWN
    assert found[-1] == 5


# -------------------------------------------------------------------------------------------- T19: empty or wrong


async def test_t19_empty_transactions_make_no_append_and_invalid_ones_are_refused(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM) as writer:
        await write(writer, "key", {"n": 0})
        calls = len(world.wire.appends)
        result = await write(writer, "key")
        assert result == CommitResult("", -1, -1, -1, writer.key_hash("key"), -1, -1)
        assert await writer.write_events("key", []) == result
        async with writer.transaction("key") as txn:
            with pytest.raises(InvalidInput, match="JSON object"):
                txn.write("text")
            with pytest.raises(InvalidInput, match="cannot be written as JSON"):
                txn.write({"n": object()})
            txn.write({"n": 1})
            assert len(world.wire.appends) == calls
        for options in ({"timeout": 0}, {"timeout": float("nan")}, {"expected_offset": -1}, {"sequence": 1}):
            with pytest.raises(InvalidInput):
                writer.transaction("key", **options)
        with pytest.raises(InvalidInput, match="writer with an id"):
            writer.write_event("key", {}, sequence=1)
    async with StreamWriter(world.client, STREAM, writer_id="w") as writer:
        await writer.write_event("key", {"n": 2}, sequence=0)
        with pytest.raises(InvalidInput, match="all events and transactions of a writer"):
            writer.write_event("key", {"n": 3})
        for wrong in (-1, 1 << 63):
            with pytest.raises(InvalidInput, match="not a sequence"):
                writer.write_event("key", {}, sequence=wrong)
    assert await events_of(world) == [0, 1, 2]


# --------------------------------------------------------------------------------------- T20: conditional commits


async def test_t20_a_commit_may_expect_an_offset_and_hold_a_fence(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM) as writer:
        first = await write(writer, "key", {"n": 0}, expected_offset=0)
        second = await write(writer, "key", {"n": 1}, expected_offset=first.end)
        assert second.begin == first.end
        for wrong in (first.end, second.end + 1, 0):
            with pytest.raises(PreconditionFailed) as raised:
                await write(writer, "key", {"n": -1}, expected_offset=wrong)
            assert raised.value.actual == second.end
        old = await writer.raise_fence("key", "owner")
        third = await write(writer, "key", {"n": 2}, fence=old)
        async with StreamWriter(world.client, STREAM) as other:
            new = await other.raise_fence("key", "owner")
            await write(other, "key", {"n": 3}, fence=new)
        with pytest.raises(PreconditionFailed, match="was raised again") as raised:
            await write(writer, "key", {"n": -2}, fence=old)
        assert raised.value.actual == new.token
        with pytest.raises(PreconditionFailed, match="not raised here") as raised:
            await write(writer, "key", {"n": -3}, fence=Fence("nobody", "t"))
        assert raised.value.actual is None
        assert await world.client.head(JOURNAL) > third.end
        await write(writer, "key", {"n": 4}, fence=new)  # Any writer with the token may use it.
    assert await events_of(world) == [0, 1, 2, 3, 4]


# -------------------------------------------------------------------------------------------- T21: a total loss


async def lose_everything(world: StreamWorld, *, specs: bool) -> None:
    """Lose the broker's disk and etcd's in-sync record. The fragment store keeps the content.

    With `specs`, etcd loses everything, and an operator applies the specs again from a listing.
    """
    listing = await world.client.list()
    cluster = world.cluster
    await cluster.stop(0)
    machine = cluster._machine(0)
    machine.disk = MemoryDisk()
    lose_records(cluster, JOURNAL, specs=specs)
    await cluster.start(0)
    if specs:
        await world.client.apply([pb.ApplyRequest.Change(upsert=info.spec) for info in listing.journals])
    await cluster.ready(JOURNAL)
    head = await world.client.head(JOURNAL)
    await world.client.append(JOURNAL, b"", offset=head)  # The operator confirms that no broker has more.
    assert not (await world.client.append(JOURNAL, b"")).registers.labels


@pytest.mark.parametrize("specs", [False, True], ids=["brokers", "and all of etcd"])
async def test_t21_after_losing_all_brokers_no_fence_is_held_and_no_past_invented(
    world: StreamWorld, specs: bool
) -> None:
    async with StreamWriter(world.client, STREAM) as holder, StreamWriter(world.client, STREAM) as writer:
        async with StreamWriter(world.client, STREAM, writer_id="importer") as importer:
            await write(importer, "key", {"n": 0}, sequence=7)
        fence = await holder.raise_fence("key", "owner")
        await write(holder, "key", {"n": 1}, fence=fence)
        await write(writer, "key", {"n": 2})
        await lose_everything(world, specs=specs)
        with pytest.raises(PreconditionFailed, match="not raised here"):
            await write(holder, "key", {"n": -1}, fence=fence)
        await write(writer, "key", {"n": 3})  # With nothing in doubt it enters again.
        async with StreamWriter(world.client, STREAM, writer_id="importer") as importer:
            with pytest.raises(WriterExpired) as raised:
                await write(importer, "key", {"n": 0}, sequence=7)
            assert raised.value.outcome is Outcome.NOT_APPLIED
        async with StreamWriter(world.client, STREAM, writer_id="importer", fresh=True) as importer:
            await write(importer, "key", {"n": 4}, sequence=8)
        again = await holder.raise_fence("key", "owner")
        await write(holder, "key", {"n": 5}, fence=again)
    assert (await registers_of(world)).restored is not None
    assert await events_of(world) == [0, 1, 2, 3, 4, 5]


# ----------------------------------------------------------------------------------- T22: state is bounded


async def test_t22_memory_does_not_grow_with_short_lived_writers() -> None:
    """The contract's count is `python -m tests.platform.streams.full_counts t22`.

    This runs in a separate process, because other tests change the memory of this one.
    """
    program = (
        f"import asyncio; from {enter_many.__module__} import enter_many as f; print(asyncio.run(f(600, most=64)))"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=Path(__file__).parents[3], stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    sizes = json.loads(output.splitlines()[-1])
    # 1.6 MiB is the log of the spool on its in-memory disk: 5 KiB per append, until it is compacted.
    assert sizes[-1] - sizes[len(sizes) // 2] < 3 << 20
    assert len(sizes) == 11


def test_t22_registers_do_not_grow_with_the_number_of_writers() -> None:
    """By the rules of brokers. The cost of entering does not depend on the number of earlier writers."""
    most = 16
    registers, sizes = pb.LabelSet(), []
    decoded = Registers.of(registers)
    for number in range(3000):
        label = f"coranto.dev/writer-{number:012x}"
        value = WriterEntry(number, 1, 1 << 60, 1 << 30, 1_700_000_000 + number).encode()
        conditions = enter(decoded, label, value, nonce=f"{number:x}.1", max_writers=most)
        if conditions.subtract is not None:
            registers = labels.subtract(registers, conditions.subtract)
        registers = labels.union(conditions.union, registers)
        decoded = Registers.of(registers)
        if number >= most:
            assert len(decoded.entries) == most
            assert min(decoded.entries) == f"coranto.dev/writer-{number - most + 1:012x}", "the latest are kept"
            sizes.append(registers.ByteSize())
    assert max(sizes) - min(sizes) <= 3 * most, "numbers have a digit or two more"


async def test_t22_writer_entries_are_bounded_and_expired_writers_get_an_error() -> None:
    async with stream_world(max_writers=4) as world:
        idle = StreamWriter[Any](world.client, STREAM)
        await idle.open()
        await write(idle, "key", {"n": 0})
        async with StreamWriter(world.client, STREAM, writer_id="stable") as stable:
            await write(stable, "key", {"n": 1}, sequence=0)
            for number in range(60):
                async with StreamWriter(world.client, STREAM) as writer:
                    writer.write_event("key", {"n": 100 + number})
            registers = await registers_of(world)
            assert len(registers.entries) == 4
            assert registers.expired is not None
            with pytest.raises(WriterExpired):
                await write(stable, "key", {"n": 2}, sequence=1)
        async with StreamWriter(world.client, STREAM, writer_id="stable") as again:
            with pytest.raises(WriterExpired, match="writer stable"):
                await again.last_sequence("key")
        await write(idle, "key", {"n": 3})  # It had nothing in doubt.
        await idle.close()
        # A new name cannot be distinguished from a forgotten one.
        async with StreamWriter(world.client, STREAM, writer_id="new") as new:
            with pytest.raises(WriterExpired):
                await write(new, "key", {"n": 5}, sequence=0)
        async with StreamWriter(world.client, STREAM, writer_id="stable", fresh=True) as fresh:
            await write(fresh, "key", {"n": 4}, sequence=1)
        found = await events_of(world)
        assert found[:2] == [0, 1]
        assert found[2:-2] == list(range(100, 160))
        assert found[-2:] == [3, 4]


class FastClock(SystemClock):
    """A clock that is years ahead."""

    def now(self) -> float:
        return super().now() + 10 * 365 * 24 * 3600


async def test_t22_a_clock_ahead_does_not_affect_later_writers() -> None:
    async with stream_world(max_writers=2) as world:
        async with StreamWriter(world.client, STREAM, writer_id="fast", clock=FastClock()) as fast:
            await write(fast, "key", {"n": 0}, sequence=0)
        for number in range(1, 4):
            async with StreamWriter(world.client, STREAM) as writer:
                await write(writer, "key", {"n": number})
        async with StreamWriter(world.client, STREAM, writer_id="fast", fresh=True) as again:
            await write(again, "key", {"n": 4}, sequence=1)
        now = SystemClock().now()
        async with StreamReader[Any](world.client, STREAM) as reader:
            events = {event.data["n"]: event.time - now async for event in reader}
        assert set(events) == set(range(5)), "readers do not take later writes of the writer id for repetitions"
        ahead = 9 * 365 * 24 * 3600
        assert {number for number, off in events.items() if off > ahead} == {0, 4}


class OldClock(SystemClock):
    """A clock that is behind, so that its writer is the least recently used."""

    def now(self) -> float:
        return super().now() - 1000


async def test_t22_an_expired_writer_in_doubt_gets_an_unknown_outcome() -> None:
    async with stream_world(max_writers=2) as world:
        async with StreamWriter(world.client, STREAM, clock=OldClock()) as writer:
            await write(writer, "key", {"n": 0})
            broken = asyncio.Event()

            def down() -> None:
                world.cluster.cut("client", 0)
                broken.set()

            world.wire.cut(CutPoint.ANSWER, then=down)
            commit = writer.write_events("key", [{"n": 1}])
            await broken.wait()
            for number in (2, 3):
                async with StreamWriter(world.cluster.client(name="other"), STREAM) as other:
                    await write(other, "key", {"n": number})
            world.cluster.heal()
            with pytest.raises(WriterExpired) as raised:
                await commit
            assert raised.value.outcome is Outcome.UNKNOWN
            await write(writer, "key", {"n": 4})
        assert await events_of(world) == [0, 1, 2, 3, 4]


async def test_t22_a_writer_id_belongs_to_one_process_at_a_time(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM, writer_id="w") as zombie:
        await write(zombie, "key", {"n": 0}, sequence=0)
        async with StreamWriter(world.client, STREAM, writer_id="w") as later:
            assert await later.last_sequence("key") == 0
            await write(zombie, "key", {"n": 1}, sequence=1)  # Not taken over yet.
            assert (await write(later, "key", {"n": 1}, sequence=1)).deduplicated
            await write(later, "key", {"n": 2}, sequence=2)
            for _ in range(2):
                with pytest.raises(WriterFenced):
                    await write(zombie, "key", {"n": -1}, sequence=3)
            await write(later, "key", {"n": 3}, sequence=3)
    assert await events_of(world) == [0, 1, 2, 3]


# -------------------------------------------------------------------------------------------- T23: pipelining


def test_t23_pipelined_transactions_stay_in_order_at_five_times_the_throughput() -> None:
    """The round trip takes 5 ms of virtual time, so only latency counts, on any machine."""

    async def main() -> dict[int, float]:
        rates = {}
        async with stream_world(delay=0.0025) as world:
            for width in (1, 8, 16):
                async with StreamWriter(world.client, STREAM, in_flight=width, batch_bytes=1) as writer:
                    await write(writer, "key", {"n": 0})
                    began = asyncio.get_running_loop().time()
                    await asyncio.gather(*(writer.write_events("key", [{"n": n}, {"n": n}]) for n in range(1, 65)))
                    rates[width] = 64 / (asyncio.get_running_loop().time() - began)
            assert await events_of(world) == [0, *(n for n in range(1, 65) for _ in range(2))] * 3
        return rates

    with simulated(seed=1, shuffle=False) as loop:
        rates = loop.run_until_complete(main())
    assert rates[8] >= 5 * rates[1]
    assert rates[16] >= 10 * rates[1]


@pytest.mark.parametrize("cut", [point for point in CutPoint if point is not CutPoint.REST])
async def test_t23_a_failed_transaction_in_the_pipeline_is_retried_in_order(world: StreamWorld, cut: CutPoint) -> None:
    async with StreamWriter(world.client, STREAM, in_flight=8, batch_bytes=1) as writer:
        await write(writer, "key", {"n": 0})
        begun = asyncio.gather(*(writer.write_events("key", [{"n": n}]) for n in range(1, 5)))
        world.wire.cut(cut, cut)
        later = asyncio.gather(*(writer.write_events("key", [{"n": n}]) for n in range(5, 17)))
        results = [*await begun, *await later]
    assert await events_of(world) == list(range(17))
    assert [result.begin for result in results[1:]] == [result.end for result in results[:-1]]


# ------------------------------------------------------------------------------------------ T24: tokens


@contextlib.asynccontextmanager
async def one_segment_on_a_fake_broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker() as broker:
        segment = Segment(0, 0, JOURNAL, KeyRange.FULL)
        journal = broker.create(JOURNAL)
        journal.spec.CopyFrom(spec_of(STREAM, segment, journal.spec))
        yield broker


@pytest.mark.parametrize("point", [CallPoint.APPEND_BEGUN, CallPoint.APPEND_CONTENT])
async def test_t24_a_token_that_expires_before_the_commit_is_reported_and_nothing_is_applied(point: CallPoint) -> None:
    async with one_segment_on_a_fake_broker() as broker:
        token = BearerToken.parse("expires")
        async with (
            JournalClient(broker.endpoint, auth=token) as client,
            StreamWriter(client, STREAM, in_flight=4, batch_bytes=1) as writer,
        ):
            await write(writer, "key", {"n": 0})
            before = broker.journals[JOURNAL].content
            async with writer.transaction("key") as txn:
                txn.write({"n": 1})
                broker.at(point, grpc.StatusCode.UNAUTHENTICATED)
                with pytest.raises(Unauthenticated) as raised:
                    await txn.commit()
            assert raised.value.outcome is Outcome.NOT_APPLIED
            assert txn.state is TransactionState.FAILED
            assert broker.journals[JOURNAL].content == before
            await write(writer, "key", {"n": 2})
            content = broker.journals[JOURNAL].content
            assert [b'"n":%d}' % number in content for number in range(3)] == [True, False, True]


@pytest.mark.parametrize("renewed", [True, False])
async def test_t24_a_token_that_expires_within_an_append_leaves_all_or_nothing(renewed: bool) -> None:
    """Brokers end calls when their tokens expire. A key signs each new call; a fixed token is refused."""
    async with one_segment_on_a_fake_broker() as broker:
        async with (
            JournalClient(broker.endpoint, auth=BearerToken.parse("expires"), retry_timeout=60) as client,
            StreamWriter(client, STREAM) as writer,
        ):
            await write(writer, "key", {"n": 0})
            before = broker.journals[JOURNAL].content
            broker.at(CallPoint.APPEND_CONTENT, grpc.StatusCode.DEADLINE_EXCEEDED)
            broker.at(CallPoint.APPEND_BEGUN, None, *([] if renewed else [grpc.StatusCode.UNAUTHENTICATED]))
            if renewed:
                await write(writer, "key", {"n": 1}, {"n": 1})
            else:
                # The append may have been applied, and the client may not read.
                with pytest.raises(CommitUnknown) as raised:
                    await write(writer, "key", {"n": 1}, {"n": 1})
                assert isinstance(raised.value.__cause__, Unauthenticated)
                assert broker.journals[JOURNAL].content == before
            await write(writer, "key", {"n": 2})
            content = broker.journals[JOURNAL].content
            assert [content.count(b'"n":%d' % number) for number in range(3)] == [1, 2 if renewed else 0, 1]


# ------------------------------------------------------------------------------------------ T25: cancellation


async def test_t25_a_cancelled_transaction_is_aborted_and_a_cancelled_commit_continues(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM) as writer:
        await write(writer, "key", {"n": 0})
        entered = asyncio.Event()

        async def hang() -> None:
            async with writer.transaction("key") as txn:
                txn.write({"n": -1})
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hang())
        await entered.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        applied = asyncio.Event()
        world.wire.cut(CutPoint.ANSWER, then=applied.set)
        async with writer.transaction("key") as txn:
            txn.write({"n": 1})
            commit = asyncio.create_task(txn.commit())
            await applied.wait()
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
            assert commit.cancelled()
            assert txn.state is TransactionState.COMMITTING  # The outcome is unknown until the writer finds out.
            behind = await write(writer, "key", {"n": 2})
            result = await txn.commit()
            assert result.end == behind.begin
    assert await events_of(world) == [0, 1, 2]


async def test_t25_drain_waits_until_pending_bytes_are_below_the_limit(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM, format=BytesEvents(), pending_bytes=10_000) as writer:
        for _ in range(50):
            writer.write_event("key", bytes(1000))
            await writer.drain()
            assert writer.pending_bytes <= 10_000
        writer.write_event("key", bytes(20_000))
        assert writer.pending_bytes > 10_000
        await writer.drain()
        assert writer.pending_bytes <= 10_000
        waiting = writer.write_event("key", b"cancelled")
        waiting.cancel()  # Cancelling does not recall the event.
        await writer.flush()
        assert writer.pending_bytes == 0
    assert len(await world.messages(events=BytesEvents())) == 52


# ---------------------------------------------------------------------------------------- T26: observability


async def test_t26_counters_and_one_log_line_for_each_end_without_a_commit(virtual_clock: VirtualClock) -> None:
    async with stream_world(log_level="info") as world:
        await count_all_ends(world, virtual_clock)


async def count_all_ends(world: StreamWorld, virtual_clock: VirtualClock) -> None:
    def value(name: str, **labels: str) -> float:
        return writer.metrics.registry.get_sample_value(name, labels) or 0.0

    def ended(outcome: str) -> float:
        return value("coranto_stream_transactions_total", outcome=outcome)

    with structlog.testing.capture_logs() as lines:
        async with StreamWriter(world.client, STREAM, writer_id="w", clock=virtual_clock) as writer:
            async with writer.transaction("key", sequence=0) as txn:
                assert value("coranto_stream_transactions_open") == 1
                txn.write({"n": 0, "secret": "payload"})
            assert value("coranto_stream_transactions_open") == 0
            await write(writer, "key", {"n": 0, "secret": "payload"}, sequence=0)
            async with writer.transaction("key", sequence=1) as txn:
                txn.write({"n": 1, "secret": "payload"})
                txn.abort()
            timed_out = await writer.transaction("key", sequence=1, timeout=1).__aenter__()
            await virtual_clock.advance(1)
            assert timed_out.state is TransactionState.TIMED_OUT
            with pytest.raises(PreconditionFailed):
                await write(writer, "key", {"n": 1, "secret": "payload"}, sequence=1, expected_offset=0)
            await write(writer, "key", sequence=1)
            result = await write(writer, "key", {"n": 1}, sequence=1)
            await writer.write_event("key", {"n": 2}, sequence=2)
            world.wire.cut(CutPoint.COMMIT)
            broken = asyncio.create_task(write(writer, "key", {"n": 3}, sequence=3))
            while not broken.done():
                await virtual_clock.advance(0.1)
            last = await broken
    ends = {outcome: ended(outcome) for outcome in ("committed", "deduplicated", "aborted", "timed_out", "failed")}
    assert ends == {"committed": 3, "deduplicated": 1, "aborted": 1, "timed_out": 1, "failed": 1}
    assert ended("empty") == 1
    assert value("coranto_stream_deduplicated_total") == 1
    assert value("coranto_stream_appends_retried_total") >= 1
    assert value("coranto_stream_commit_seconds_count") == 3
    assert value("coranto_stream_events_total", outcome="committed") == 1
    assert value("coranto_stream_bytes_total") == last.end
    assert result.sequence == 1
    logged = [line for line in lines if line["event"] == "stream_writer.transaction_not_committed"]
    assert [line["outcome"] for line in logged] == ["deduplicated", "aborted", "timed_out", "failed", "empty"]
    assert {line["writer"] for line in logged} == {"w"}
    assert [line["sequence"] for line in logged] == [0, 1, 1, 1, 1]
    assert {line["key_hash"] for line in logged} == {f"{writer.key_hash('key'):013x}"}
    assert "payload" not in str(lines)


# ------------------------------------------------------------------------------------- T27: whole transactions


async def test_t27_readers_get_transactions_whole(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM) as writer:
        given = []
        for number in range(10):
            events = [{"n": number, "part": part} for part in range(number % 4 + 1)]
            if len(events) == 1:
                await writer.write_event("key", events[0])
            else:
                await write(writer, "key", *events)
            given.append(events)
    async with StreamReader[Any](world.client, STREAM) as reader:
        found = [[event.data for event in txn.events] async for txn in reader.transactions()]
    assert [[(event["n"], event["part"]) for event in events] for events in found] == [
        [(event["n"], event["part"]) for event in events] for events in given
    ]
    # At any point, the position of a reader is between transactions.
    for taken in range(1, 10):
        async with StreamReader[Any](world.client, STREAM) as reader:
            iterator = reader.transactions()
            for _ in range(taken):
                await anext(iterator)
            position = reader.position()
        async with StreamReader[Any](world.client, STREAM, begin=position) as rest:
            assert len([txn async for txn in rest.transactions()]) == 10 - taken
    # The same for single events: the position is before a transaction until its last event is delivered.
    flat = [(event["n"], event["part"]) for events in given for event in events]
    for taken in range(1, len(flat)):
        async with StreamReader[Any](world.client, STREAM) as reader:
            for _ in range(taken):
                await anext(reader)
            position = reader.position()
        number, part = flat[taken - 1]
        whole = taken if part == len(given[number]) - 1 else taken - part - 1
        async with StreamReader[Any](world.client, STREAM, begin=position) as rest:
            assert [(event.data["n"], event.data["part"]) async for event in rest] == flat[whole:]


# -------------------------------------------------------------------------------------------------- T28: cost


async def test_t28_a_commit_costs_as_much_as_a_plain_append_of_the_same_bytes() -> None:
    async with stream_world(3, replication=3) as world:
        plain_journal = "plain/journal"
        await world.cluster.create(plain_journal)
        async with StreamWriter(world.client, STREAM) as writer:
            first = await write(writer, "key", {"n": 0})
            await world.client.append(plain_journal, bytes(first.end))
            content = await world.client.read_all(JOURNAL, first.begin, first.end)

            async def cost(work: Any) -> tuple[dict[str, int], dict[str, int]]:
                methods = ("List", "Read", "Apply", "ListFragments")
                calls = {method: world.cluster.calls(method) for method in methods}
                appends = world.cluster.appends()
                messages = dict(world.wire.messages)
                await work
                after = world.wire.messages
                counts = {method: world.cluster.calls(method) - calls[method] for method in methods}
                return (
                    counts | {"appends": world.cluster.appends() - appends},
                    {method: after[method] - messages.get(method, 0) for method in after},
                )

            plain = await cost(world.client.append(plain_journal, content))
            transaction = await cost(write(writer, "key", {"n": 1}))
        assert transaction == plain
        assert transaction[0] == {"appends": 1, "List": 0, "Read": 0, "Apply": 0, "ListFragments": 0}


def test_t28_a_commit_has_the_median_latency_of_a_plain_append() -> None:
    """In virtual time, with three replicas 2 ms apart. docs/benchmarks.md has the processor time."""

    async def main() -> tuple[float, float]:
        now = asyncio.get_running_loop().time
        async with stream_world(3, replication=3, delay=0.002) as world:
            await world.cluster.create("plain/journal", replication=3)
            commits, appends = [], []
            async with StreamWriter(world.client, STREAM) as writer:
                await write(writer, "key", {"n": 0})
                await world.client.append("plain/journal", b"0")
                for number in range(1, 40):
                    began = now()
                    async with writer.transaction("key") as txn:
                        txn.write({"n": number})
                        result = await txn.commit()
                    commits.append(now() - began)
                    began = now()
                    await world.client.append("plain/journal", bytes(result.end - result.begin))
                    appends.append(now() - began)
        return statistics.median(commits), statistics.median(appends)

    with simulated(seed=1, shuffle=False) as loop:
        commit, append = loop.run_until_complete(main())
    assert 0 < commit <= 1.15 * append


async def test_t28_a_commit_takes_a_tenth_of_the_calls_of_a_multi_segment_one() -> None:
    """Pravega's transactions have a shadow segment for each segment of the stream. Coranto's on
    several keys take two appends for each segment that they write to, and one more."""
    async with stream_world(segments=5) as world:
        stream = await world.streams.describe(STREAM)
        keys = {segment.number: "" for segment in stream.active()}
        for key in map(str, range(200)):
            segment = stream.segment_of(key)
            assert segment is not None
            keys[segment.number] = key
        async with StreamWriter(world.client, STREAM) as writer, MultiKeyWriter[Any](world.client, STREAM) as several:

            async def on_all() -> None:
                async with several.transaction() as txn:
                    for key in keys.values():
                        txn.write(key, {"n": 0})

            counts = []
            for _ in range(2):  # In the first round, both read the registers of the segments.
                for work in (write(writer, keys[0], {"n": 0}), on_all()):
                    before = world.cluster.appends()
                    await work
                    counts.append(world.cluster.appends() - before)
        assert counts[2:] == [1, 11]


# ------------------------------------------------------------------------------------------- the stream itself


async def test_a_sealed_or_missing_stream_refuses_writes(world: StreamWorld) -> None:
    with pytest.raises(StreamNotFound, match="no stream shop/other"):
        await StreamWriter(world.client, "shop/other").open()
    async with StreamWriter(world.client, STREAM) as writer:
        await write(writer, "key", {"n": 0})
        await world.streams.seal(STREAM)
        for _ in range(2):
            with pytest.raises(StreamSealed) as raised:
                await write(writer, "key", {"n": 1})
            assert raised.value.outcome is Outcome.NOT_APPLIED
    assert await events_of(world) == [0]


async def test_deleting_a_segment_during_a_commit_leaves_its_outcome_unknown(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM) as writer:
        await write(writer, "key", {"n": 0})
        broken = asyncio.Event()

        def down() -> None:
            world.cluster.cut("client", 0)
            broken.set()

        world.wire.cut(CutPoint.ANSWER, then=down)
        commit = writer.write_events("key", [{"n": 1}])
        await broken.wait()
        admin = Streams(world.cluster.client(name="admin"))
        stream = await admin.scale(STREAM, [Split(0)])
        await admin.truncate(STREAM, {segment.number: 0 for segment in stream.active()})
        world.cluster.heal()
        with pytest.raises(CommitUnknown):
            await commit
        result = await write(writer, "key", {"n": 2})
        assert result.segment in (1, 2)


async def test_noted_times_follow_earlier_writes(world: StreamWorld) -> None:
    async with StreamWriter(world.client, STREAM) as writer:
        await writer.write_event("key", {"n": 0})
        writer.note_time(10)
        writer.write_event("key", {"n": 1})
        await writer.flush()
        async with StreamReader[Any](world.client, STREAM) as reader:
            assert [event.data["n"] async for event in reader] == [0, 1]
            window = await reader.time_window()
            assert (window.lower, window.upper) == (10, None)
    marks = await world.client.read_all(f"{STREAM}/marks", 0, await world.client.head(f"{STREAM}/marks"))
    assert marks.count(b"\n") == 2
    assert b'"left":true' in marks.splitlines()[-1]
