"""The autoscaler measures real journals in virtual time and applies the policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.errors import InvalidInput, StreamChanged, StreamNotFound
from coranto.messages.uuids import Flags, ProducerId, build_uuid
from coranto.streams.control.autoscale import Autoscaler
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Merge, ScalingPolicy, Split
from coranto.streams.model.events import BytesEvents, JsonEvents
from coranto.streams.model.stream import Stream
from coranto.testing.cluster import STORE_URL, Cluster

TEMPLATE = default_template(stores=[STORE_URL])


class MovedClock:
    """A clock that tests advance. Waiting advances it, too."""

    def __init__(self) -> None:
        self.time = 0.0
        self.stop_at = float("inf")
        self.passing: Callable[[float], Awaitable[object]] | None = None

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        if self.passing is not None:
            await self.passing(self.time)
        if self.time >= self.stop_at:
            raise asyncio.CancelledError


@pytest.fixture
async def client() -> AsyncIterator[JournalClient]:
    async with Cluster(brokers=1) as cluster:
        yield cluster.client()


def events(format: Any, count: int) -> bytes:
    """Content of `count` events of at least 100 bytes each."""
    event = {"data": "x" * 100} if isinstance(format, JsonEvents) else b"x" * 100
    return b"".join(
        format.marshal(event, build_uuid(ProducerId(b"\x01write"), (1 << 40) + n, Flags.OUTSIDE_TXN))
        for n in range(count)
    )


async def minutes(
    scaler: Autoscaler, clock: MovedClock, count: int, feed: Callable[[], Any]
) -> list[tuple[int, tuple[object, ...]]]:
    """Append content and step once a minute. Return the changes with their minutes."""
    found: list[tuple[int, tuple[object, ...]]] = []
    for minute in range(count):
        await feed()
        found += [(minute, each.changes) for each in await scaler.step()]
        clock.time += 60
    return found


@pytest.mark.parametrize(("format", "unit"), [(JsonEvents(), "events"), (BytesEvents(), "bytes")])
async def test_a_busy_segment_is_split_and_idle_ones_are_merged(client: JournalClient, format: Any, unit: str) -> None:
    streams, clock = Streams(client), MovedClock()
    policy = ScalingPolicy.by_events(0.25) if unit == "events" else ScalingPolicy.by_bytes(30)
    await streams.create("orders", template=TEMPLATE, content_type=format.content_type, policy=policy)
    await streams.create("quiet", template=TEMPLATE)
    load = events(format, 24)  # 0.4 per second: above the ten-minute target, below the targets of shorter windows.

    async def feed() -> None:
        for each in (await streams.describe("orders")).active()[:1]:
            await client.append(each.journal, load)

    scaler = Autoscaler(client, clock=clock)
    assert await minutes(scaler, clock, 12, feed) == [(10, (Split(0, 2),))]

    async def idle() -> None:
        return

    assert await minutes(scaler, clock, 40, idle) == [(19, (Merge((1, 2)),))], "20 minutes old"
    found = await streams.describe("orders")
    assert [each.number for each in found.active()] == [3]
    assert (await streams.describe("quiet")).epoch == 0


async def test_scaling_named_streams_with_another_policy(client: JournalClient) -> None:
    streams, clock = Streams(client), MovedClock()
    for name in ("orders", "returns"):
        await streams.create(name, 2, template=TEMPLATE, policy=ScalingPolicy.fixed(2))
    scaler = Autoscaler(client, ["orders"], policy=ScalingPolicy.by_bytes(1), clock=clock)
    assert [each.changes for each in await scaler.step()] == []
    clock.time += 1200
    (scaled,) = await scaler.step()
    assert (scaled.stream.name, scaled.changes) == ("orders", (Merge((0, 1)),))
    assert (await streams.describe("returns")).epoch == 0
    with pytest.raises(StreamNotFound):
        await Autoscaler(client, ["gone"], clock=clock).step()


async def test_a_failure_of_one_stream_is_retried_and_does_not_block_others(client: JournalClient) -> None:
    clock = MovedClock()

    class Contended(Streams):
        refused = 0

        async def scale(self, name: str, changes: Any) -> Stream:
            if name == "orders" and not self.refused:
                self.refused += 1
                raise StreamChanged("another process scaled first")
            return await super().scale(name, changes)

    streams = Contended(client)
    for name in ("orders", "returns"):
        await streams.create(name, 2, template=TEMPLATE, policy=ScalingPolicy.by_bytes(1))
    scaler = Autoscaler(client, clock=clock, streams=streams)
    await scaler.step()
    clock.time += 1200
    assert [each.stream.name for each in await scaler.step()] == ["returns"]
    clock.time += 10
    assert [each.stream.name for each in await scaler.step()] == ["orders"]


async def test_the_autoscaler_runs_until_cancelled_and_finds_new_streams(client: JournalClient) -> None:
    streams, clock = Streams(client), MovedClock()
    clock.stop_at = 3000
    scaler = Autoscaler(client, ["orders"], clock=clock)
    await streams.create("returns", template=TEMPLATE)

    async def create_later(time: float) -> None:
        if time == 600:
            await streams.create("orders", 2, template=TEMPLATE, policy=ScalingPolicy.by_bytes(1))

    clock.passing = create_later
    with pytest.raises(asyncio.CancelledError):
        await scaler.run(60)
    assert (await streams.describe("orders")).epoch == 1
    with pytest.raises(InvalidInput, match="not an interval"):
        await scaler.run(0)
