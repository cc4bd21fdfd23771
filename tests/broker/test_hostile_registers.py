"""Registers that grow without bound: refused before they commit, on every path of appends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import RpcFailed
from coranto.specs.validation import validate
from coranto.streams.model import registers as streams
from coranto.streams.model.registers import Fence, WriterEntry
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import registers
from coranto_broker.append.queue import queue_of
from coranto_broker.append.registers import MAX_REGISTERS_BYTES
from coranto_broker.replication.replica import Replica
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import Fsync
from tests.broker.running import RawClient, create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


def some(size: int, prefix: str = "hostile") -> pb.LabelSet:
    """Return registers of about `size` bytes, each with another name."""
    each = labels.MAX_VALUE_BYTES
    return labels.label_set({f"{prefix}-{number:05}": "v" * each for number in range(size // each)})


def growing(part: int) -> Iterator[pb.LabelSet]:
    """Yield new registers of `part` bytes each."""
    number = 0
    while True:
        yield some(part, f"part-{number:04}")
        number += 1


class Way:
    """The ways of an append to the journal."""

    def __init__(self, client: RawClient, replica: Replica) -> None:
        self._client = client
        self._replica = replica

    async def alone(self, registers: pb.LabelSet) -> pb.AppendResponse:
        return await self._client.append(J, b"x", union_registers=registers)

    async def streamed(self, registers: pb.LabelSet) -> pb.AppendResponse:
        """Append more content than a broker receives ahead."""
        return await self._client.append(J, *[b"x" * (1 << 20)] * 2, union_registers=registers)

    async def together(self, registers: pb.LabelSet) -> pb.AppendResponse:
        """Append along with a plain append that has the pipeline first."""
        pipeline = await self._replica.pipeline.take()
        leader = asyncio.create_task(self._client.append(J, b"x"))
        await eventually(lambda: len(queue_of(self._replica)) == 1)
        member = asyncio.create_task(self.alone(registers))
        await eventually(lambda: len(queue_of(self._replica)) == 2)
        self._replica.pipeline.put(pipeline)
        assert (await leader).status == pb.OK
        return await member


@pytest.mark.parametrize("way", ["alone", "streamed", "together"])
@pytest.mark.parametrize("fsync", [Fsync.NEVER, Fsync.COMMIT])  # With the former, single appends commit inline.
async def test_registers_are_bounded_on_every_path_of_appends(
    broker_settings: BrokerSettings, spec: MakeSpec, way: str, fsync: Fsync
) -> None:
    async with running_broker(broker_settings.model_copy(update={"fsync": fsync})) as (process, client):
        await create(client, spec(fragment={"length": 64 << 20}))
        assert (await client.append(J, b"first")).status == pb.OK
        append = getattr(Way(client, process.broker.resolver.local_replicas[0]), way)
        parts = growing(8 << 10)
        for _ in range(7):
            response = await append(next(parts))
            assert response.status == pb.OK
        last = response.registers
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await append(next(parts))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"more than {MAX_REGISTERS_BYTES}" in str(refused.value.details())
        # Nothing of it was applied, and the journal continues.
        after = await client.append(J, b"fine", check_registers=pb.LabelSelector(include=last))
        assert (after.status, after.registers) == (pb.OK, last)
        swapped = await client.append(
            J, b"fine", subtract_registers=pb.LabelSet(labels=last.labels[:8]), union_registers=next(growing(8 << 10))
        )
        assert swapped.status == pb.OK


async def test_a_value_that_replaces_a_shorter_one_counts_too(client: RawClient, spec: MakeSpec) -> None:
    # Changes by stream writers have a separate code path.
    await create(client, spec())
    full = labels.union(labels.label_set(entry="v"), some(62 << 10))
    assert (await client.append(J, b"first", union_registers=full)).status == pb.OK
    held = pb.LabelSelector(include=labels.label_set(entry="v"))
    with pytest.raises(grpc.aio.AioRpcError, match="the journal's registers would take"):
        await client.append(J, b"x", check_registers=held, union_registers=labels.label_set(entry="v" * 1024))
    longer = await client.append(J, b"x", check_registers=held, union_registers=labels.label_set(entry="vv"))
    assert longer.status == pb.OK


@pytest.fixture
async def pair(broker_settings: BrokerSettings) -> AsyncIterator[list[tuple[BrokerProcess, RawClient]]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                running_broker(
                    broker_settings.model_copy(update={"id": name, "data_dir": broker_settings.data_dir / name})
                )
            )
            for name in ("broker-0", "broker-1")
        ]


async def test_registers_above_the_bound_from_earlier_versions_can_shrink(
    pair: list[tuple[BrokerProcess, RawClient]], spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    (process, client), (_, other) = pair
    wanted = spec()
    wanted.replication = 2
    await create(client, wanted)
    parts = [some(200 << 10, f"part-{number}") for number in range(10)]
    with monkeypatch.context() as before:
        before.setattr(registers, "MAX_REGISTERS_BYTES", 16 << 20)
        for part in parts:
            assert (await client.append(J, b"x", union_registers=part)).status == pb.OK
    assert (await client.append(J, b"plain")).registers.ByteSize() > 1 << 20
    endpoint = process.endpoint
    async with JournalClient(endpoint) as friendly:
        with pytest.raises(RpcFailed, match="subtract registers that are no longer needed"):
            await friendly.append(J, b"x", union_registers=labels.label_set(one="more"))
    for through in (client, other):  # One of them forwards.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await through.append(J, b"x", union_registers=labels.label_set(one="more"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for part in parts:
        response = await other.append(J, b"x", subtract_registers=part)
        assert response.status == pb.OK
    assert response.registers == pb.LabelSet()
    assert (await client.append(J, b"x", union_registers=labels.label_set(one="more"))).status == pb.OK


def test_a_segment_full_of_writers_and_fences_is_within_the_bound() -> None:
    longest = WriterEntry(*[(1 << 64) - 1] * 5).encode()
    held = pb.LabelSet()
    for number in range(streams.MAX_WRITERS):
        held = labels.with_value(held, f"{streams.WRITER_PREFIX}{number:012x}", longest)
    for number in range(streams.MAX_FENCES):
        fence = Fence(f"{number:0{streams.MAX_FENCE_NAME_BYTES}}", "t" * labels.MAX_VALUE_BYTES)
        held = labels.with_value(held, streams.FENCE_PREFIX + fence.name, fence.token)
    for name in (streams.ENTERED_LABEL, streams.EXPIRED_LABEL, streams.HELD_LABEL, streams.RESTORED_LABEL):
        held = labels.with_value(held, name, "f" * 40)
    validate(held)
    assert held.ByteSize() <= MAX_REGISTERS_BYTES
