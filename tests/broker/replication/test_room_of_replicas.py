"""Three real brokers, one with a disk that is nearly full, or full: answers to appends, and the content."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool import free_space
from tests.broker.running import FaultyDisk, RawClient, create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


@dataclass
class Three:
    disks: list[FaultyDisk]
    clients: list[RawClient]
    primary: int
    spec: pb.JournalSpec
    stacks: list[AsyncExitStack]

    @property
    def client(self) -> RawClient:
        return self.clients[self.primary]

    def disk(self, *, of_primary: bool) -> FaultyDisk:
        return self.disks[self.primary if of_primary else (self.primary + 1) % 3]


@pytest.fixture
async def three(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Three]:
    """Yield a journal on three brokers, with some content."""
    monkeypatch.setattr(free_space, "CHECK_SECONDS", 0.0)
    disks = [FaultyDisk() for _ in range(3)]
    remaining = iter(disks)
    monkeypatch.setattr("coranto_broker.server.process.LocalDisk", lambda: next(remaining))
    async with AsyncExitStack() as stack:
        running, stacks = [], [await stack.enter_async_context(AsyncExitStack()) for _ in range(3)]
        for number, own in enumerate(stacks):
            changes = {"id": f"broker-{number}", "data_dir": broker_settings.data_dir / str(number)}
            running.append(await own.enter_async_context(running_broker(broker_settings.model_copy(update=changes))))
        client = running[0][1]
        replicated = spec()
        replicated.replication = 3
        await create(client, replicated)
        before = await client.append_when_ready(J, b"before ")
        assert before.status == pb.OK
        route = before.header.route
        primary = int(route.members[route.primary].suffix.removeprefix("broker-"))
        yield Three(disks, [each for _, each in running], primary, replicated, stacks)


@pytest.mark.parametrize("of_primary", [True, False])
async def test_appends_are_certainly_refused_before_a_disk_is_full(three: Three, of_primary: bool) -> None:
    client, disk = three.client, three.disk(of_primary=of_primary)
    disk.room = 1 << 20
    assert (await client.append(J, b"told ")).status == pb.OK
    for chunks in ((b"small",), (b"streamed",) * 20, (b"x" * (1 << 17),)):
        refused = await client.append(J, *chunks)
        assert refused.status == pb.INSUFFICIENT_JOURNAL_BROKERS
        assert "is nearly full (disk_reserve_bytes), so nothing was applied" in refused.store_health_error
    assert (await client.append(J)).status == pb.OK, "an append without content needs no space"
    disk.room = 1 << 40
    assert (await client.append(J, b"after")).status == pb.OK
    assert await client.content(J) == b"before told after"


async def test_a_replica_without_free_space_makes_at_most_one_outcome_unknown(three: Three) -> None:
    client, disk = three.client, three.disk(of_primary=False)
    disk.full, disk.room = "content", 0
    with pytest.raises(grpc.aio.AioRpcError, match="no space left") as unknown:
        await client.append(J, b"unknown ")
    assert unknown.value.code() is grpc.StatusCode.UNKNOWN
    assert (await client.append(J, b"refused ")).status == pb.INSUFFICIENT_JOURNAL_BROKERS
    disk.full, disk.room = None, 1 << 40
    assert (await client.append(J, b"after")).status == pb.OK
    content = await client.content(J)
    assert content.removeprefix(b"before ").removeprefix(b"unknown ") == b"after"


async def test_a_journal_continues_with_fewer_replicas_as_the_runbook_says(three: Three) -> None:
    client, full = three.client, (three.primary + 1) % 3
    three.disks[full].room = 1 << 20
    assert (await client.append(J, b"told ")).status == pb.OK
    assert (await client.append(J, b"refused ")).status == pb.INSUFFICIENT_JOURNAL_BROKERS
    three.spec.replication = 2
    await client.apply(three.spec, revision=-1)
    await three.stacks[full].aclose()

    async def continues() -> bool:
        """Append nothing, since the outcome may be unknown while the broker ends."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            return (await client.append(J)).status == pb.OK
        return False

    await eventually(continues)
    after = await client.append_when_ready(J, b"after")
    assert after.status == pb.OK
    assert {each.suffix for each in after.header.route.members} == {f"broker-{n}" for n in range(3) if n != full}
    assert await client.content(J) == b"before told after"
