"""Sequences without gaps: after a failed write, nothing with a higher sequence is applied before it is repeated."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from coranto.errors import CommitUnknown, EarlierWriteFailed, Outcome, PreconditionFailed, WriteError
from coranto.streams import JsonEvents, Merge, StreamWriter
from coranto.streams.model.keys import KeyRange, key_hash
from coranto.streams.writer.attempt_queue import AttemptQueue
from coranto.streams.writer.gaps import Gaps
from coranto.streams.writer.units import WriteUnit
from tests.platform.streams.stream_world import STREAM, CutPoint, StreamWorld, stream_world

LOW, HIGH = KeyRange.FULL.split(2)


class Fragile(JsonEvents):
    """A format that fails to stamp events that contain `fragile`."""

    def stamp(self, encoded: bytes, uuid: UUID) -> bytes:
        if b"fragile" in encoded:
            raise ValueError("broken")
        return super().stamp(encoded, uuid)


def importer(world: StreamWorld, **options: Any) -> StreamWriter[Any]:
    return StreamWriter(world.client, STREAM, format=Fragile(), writer_id="importer", **options)


def key_in(wanted: KeyRange) -> str:
    return next(key for key in map(str, range(100)) if key_hash(key) in wanted)


async def numbers(world: StreamWorld, segment: int = 0) -> list[int]:
    return [each.message["n"] for each in await world.messages(segment) if "n" in each.message]


async def test_an_open_transaction_is_not_applied_after_an_earlier_write_failed() -> None:
    async with stream_world() as world, importer(world) as writer:
        await writer.write_event("a", {"n": 17}, sequence=17)
        async with writer.transaction("b", sequence=20) as txn:
            txn.write({"n": 20})
            failing = writer.write_event("a", {"fragile": 18}, sequence=18), writer.write_event("a", {}, sequence=19)
            for each in failing:
                with pytest.raises(WriteError):
                    await each
            with pytest.raises(EarlierWriteFailed, match="18") as refused:
                await txn.commit()
            assert refused.value.outcome is Outcome.NOT_APPLIED
        assert await writer.last_sequence("b") == 17
        for sequence in (18, 19):
            await writer.write_event("a", {"n": sequence}, sequence=sequence)
        await writer.write_events("b", [{"n": 20}], sequence=20)
        assert await numbers(world) == [17, 18, 19, 20]


async def test_a_later_write_waits_for_each_failed_write_of_its_segment() -> None:
    async with stream_world(segments=2) as world, importer(world) as writer:
        low, high = key_in(LOW), key_in(HIGH)
        failing = [writer.write_event(low, {"fragile": n}, sequence=n) for n in (1, 2)]
        await asyncio.wait(failing)
        assert (await writer.write_event(high, {"n": 3}, sequence=3)).segment == 1  # The other segment is not affected.
        await writer.write_event(low, {"n": 1}, sequence=1)
        with pytest.raises(EarlierWriteFailed, match="sequence 2"):
            await writer.write_event(low, {"n": 4}, sequence=4)
        again = [writer.write_event(low, {"n": n}, sequence=n) for n in (2, 4)]
        await asyncio.gather(*again)
        assert (await numbers(world, 0), await numbers(world, 1)) == ([1, 2, 4], [3])


async def test_a_gap_moves_to_the_successor_of_its_segment() -> None:
    async with stream_world(segments=2) as world, importer(world) as writer:
        low, high = key_in(LOW), key_in(HIGH)
        with pytest.raises(WriteError, match="stamp"):
            await writer.write_event(low, {"fragile": 1}, sequence=1)
        await writer.write_event(high, {"n": 2}, sequence=2)
        await world.streams.scale(STREAM, [Merge((0, 1))])
        with pytest.raises(EarlierWriteFailed):
            await writer.write_event(high, {"n": 3}, sequence=3)
        again = [writer.write_event(key, {"n": n}, sequence=n) for key, n in ((low, 1), (high, 3))]
        assert [each.segment for each in await asyncio.gather(*again)] == [2, 2]
        assert (await numbers(world, 1), await numbers(world, 2)) == ([2], [1, 3])


async def test_a_write_that_fails_by_its_own_condition_leaves_no_gap() -> None:
    async with stream_world() as world, importer(world) as writer:
        await writer.write_event("key", {"n": 1}, sequence=1)
        with pytest.raises(PreconditionFailed):
            await writer.write_events("key", [{"n": 2}], sequence=2, expected_offset=1)
        await writer.write_event("key", {"n": 3}, sequence=3)
        assert await numbers(world) == [1, 3]


@pytest.mark.parametrize("transaction", [True, False])
@pytest.mark.parametrize("entered", [True, False], ids=["a later append", "the first append"])
async def test_a_repeated_write_of_unknown_outcome_is_stored_once(transaction: bool, entered: bool) -> None:
    async with stream_world() as world, importer(world, retry_timeout=0.2) as writer:

        def give(n: int) -> Any:
            if transaction:
                return writer.write_events("key", [{"n": n}], sequence=n)
            return writer.write_event("key", {"n": n}, sequence=n)

        if entered:
            await give(1)
        else:
            await writer.last_sequence("key")
        world.wire.cut(CutPoint.ANSWER, then=lambda: world.cluster.cut("client", 0))
        with pytest.raises(CommitUnknown):
            await give(2)
        world.cluster.heal()
        with pytest.raises(EarlierWriteFailed):
            await give(3)
        again = [give(2), give(3)]
        assert [each.deduplicated for each in await asyncio.gather(*again)] == [True, False]
        assert await numbers(world) == ([1, 2, 3] if entered else [2, 3])


def first(gaps: Gaps, sequence: int, keys: KeyRange) -> int | None:
    gap = gaps.first_before(sequence, keys)
    return None if gap is None else gap.sequence


def unit(order: int, sequence: int, key_hash: int = 0) -> WriteUnit:
    done = asyncio.get_running_loop().create_future()
    return WriteUnit(order, key_hash, (b"",), 0, done, sequence=sequence)


async def test_a_repeated_write_takes_the_place_of_the_failed_one() -> None:
    gaps, queue = Gaps(), AttemptQueue()
    queue.append(unit(4, 22))
    gaps.add(unit(2, 18), WriteError("…"))
    gaps.add(unit(3, 19), WriteError("…"))
    for again in (unit(6, 18), unit(7, 19), unit(8, 23)):
        gaps.close(again)
        queue.append(again)
    assert [(each.order, each.sequence) for each in queue.units] == [(2, 18), (3, 19), (4, 22), (8, 23)]
    assert gaps.first_before(30, KeyRange.FULL) is None


async def test_gaps_apply_to_their_range_of_keys() -> None:
    gaps = Gaps()
    for sequence, begin in ((5, HIGH.begin), (3, LOW.begin), (5, LOW.begin)):
        gaps.add(unit(sequence, sequence, begin), WriteError("…"))
    assert [first(gaps, sequence, LOW) for sequence in (3, 4, 9)] == [None, 3, 3]
    assert [first(gaps, sequence, HIGH) for sequence in (5, 6)] == [None, 5]
    gaps.close(unit(9, 3))
    assert [first(gaps, 9, keys) for keys in (LOW, HIGH)] == [5, 5]
    gaps.close(unit(10, 5))
    assert first(gaps, 9, KeyRange.FULL) is None
