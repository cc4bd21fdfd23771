"""Forged labels of segments, positions and records of a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import CorantoError, CorruptData, InvalidInput, Unavailable
from coranto.streams.control.autoscale import Autoscaler
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import ScalingPolicy
from coranto.streams.groups import state_synchronizer
from coranto.streams.groups.reader_groups import ReaderGroup
from coranto.streams.model.positions import PendingMessages, SegmentPosition, StreamPosition
from coranto.streams.model.stream import SEGMENT_LABEL, STREAM_LABEL, readers_journal
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.wire import protocol_pb2 as pb

TEMPLATE = default_template(stores=[STORE_URL])


@pytest.fixture
async def client() -> AsyncIterator[JournalClient]:
    async with Cluster(brokers=1) as cluster:
        yield cluster.client()


async def forge(client: JournalClient, journal: str, *pairs: tuple[str, str]) -> None:
    """Forge a journal, as any client can whose token covers journals of a label under any name."""
    spec = pb.JournalSpec()
    spec.CopyFrom(TEMPLATE)
    spec.name = journal
    spec.labels.CopyFrom(labels.label_set([*pairs, ("team", "red")]))
    await client.apply([pb.ApplyRequest.Change(upsert=spec)])


async def test_an_inconsistent_stream_does_not_hide_others(client: JournalClient) -> None:
    streams = Streams(client)
    sound = await streams.create("shop/orders", 2, template=TEMPLATE)
    await forge(client, "red/one", (STREAM_LABEL, "red"), (SEGMENT_LABEL, "-1"))
    await forge(client, "red/two", (STREAM_LABEL, "shop/returns"), (SEGMENT_LABEL, "0"))
    invalid: dict[str, CorruptData] = {}
    assert await streams.list(invalid) == (sound,)
    assert set(invalid) == {"red", "shop/returns"}
    with pytest.raises(CorruptData):
        await streams.list()


class StoppedClock:
    """A clock whose waits end immediately. The third one is cancelled."""

    def __init__(self) -> None:
        self.waits = 0

    def now(self) -> float:
        return 600.0 * self.waits

    monotonic = now

    async def sleep(self, seconds: float) -> None:
        self.waits += 1
        if self.waits == 3:
            raise asyncio.CancelledError


@pytest.mark.parametrize("names", [(), ("red", "shop/orders")], ids=["all", "named"])
async def test_an_autoscaler_continues_despite_an_inconsistent_stream(
    client: JournalClient, names: tuple[str, ...]
) -> None:
    await Streams(client).create("shop/orders", 2, template=TEMPLATE, policy=ScalingPolicy.by_bytes(1))
    await forge(client, "red/segment/00000001", (STREAM_LABEL, "red"), (SEGMENT_LABEL, "one"))
    with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        await Autoscaler(client, names, clock=StoppedClock()).run(600)
    assert (await Streams(client).describe("shop/orders")).epoch == 1, "its idle segments were merged"
    assert {each["stream"] for each in logs if each["event"] == "autoscale.stream_inconsistent"} == {"red"}


async def test_an_autoscaler_survives_failures_of_all_streams(client: JournalClient) -> None:
    await Streams(client).create("shop/orders", 2, template=TEMPLATE, policy=ScalingPolicy.by_bytes(1))

    class Flaky(Streams):
        failures = 1

        async def list(self, invalid: dict[str, CorruptData] | None = None) -> Any:
            if self.failures:
                self.failures -= 1
                raise Unavailable("no broker answers")
            return await super().list(invalid)

    clock = StoppedClock()
    clock.waits = -1
    with pytest.raises(asyncio.CancelledError):
        await Autoscaler(client, clock=clock, streams=Flaky(client)).run(600)
    assert (await Streams(client).describe("shop/orders")).epoch == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"0":{"offset":5,"pending":[{"producer":"zz","last_ack":0,"begin":1}]}}',
        '{"0":{"offset":5,"pending":[{"producer":"0102","last_ack":0,"begin":1}]}}',
        '{"0":{"offset":5,"pending":[{"producer":"010203040506","last_ack":-7,"begin":1}]}}',
        '{"0":{"offset":5,"pending":[{"producer":"010203040506","last_ack":0,"begin":5}]}}',
        '{"0":{"offset":-1}}',
        '{"0":{"offset":' + "9" * 5000 + "}}",
        "[" * 100_000,
    ],
)
def test_positions_are_validated(text: str) -> None:
    """They are stored in files, databases and the journals of groups."""
    with pytest.raises(CorantoError) as raised:
        StreamPosition.from_json(text)
    assert isinstance(raised.value, (CorruptData, InvalidInput))
    assert len(str(raised.value)) < 1000


def test_a_writers_position_round_trips() -> None:
    pending = PendingMessages("010203040506", 7, 1)
    position = StreamPosition({0: SegmentPosition(5, (pending,))})
    assert StreamPosition.from_json(position.to_json()) == position


async def test_a_record_without_an_end_is_refused_by_all_members(
    client: JournalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each member keeps an incomplete record in memory."""
    monkeypatch.setattr(state_synchronizer, "MAX_RECORD_BYTES", 1 << 20)
    await Streams(client).create("shop/orders", template=TEMPLATE)
    members = ReaderGroup(client, "shop/orders", "billing")
    await members.create()
    [info] = (await client.list(f"name={readers_journal('shop/orders', 'billing')}")).journals
    info.spec.labels.CopyFrom(labels.with_value(info.spec.labels, labels.LINES, labels.ANY))
    await client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
    for _ in range(3):
        await client.append(readers_journal("shop/orders", "billing"), b"x" * (1 << 19))
    with pytest.raises(CorruptData, match="it does not end"):
        await ReaderGroup(client, "shop/orders", "billing").state()
    with pytest.raises(CorruptData, match="it does not end"):
        await members.state()
