"""Clients that overload a broker, or send nothing: each gets an error, and none waits without bound."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import permutations

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from coranto.client import JournalClient
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.queue import queue_of
from coranto_broker.replication import resolver
from coranto_broker.rpc import first_message
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, create, eventually, running_broker

J, OTHER = "test/journal", "test/other"
MakeSpec = Callable[..., pb.JournalSpec]


async def code_of(call: asyncio.Future[pb.AppendResponse]) -> str:
    """Return the status of an append, or the code of its call's error."""
    try:
        return pb.Status.Name((await call).status)
    except grpc.aio.AioRpcError as error:
        return error.code().name


def appends_under_way(process: BrokerProcess) -> float | None:
    return process.broker.metrics.registry.get_sample_value("coranto_calls", {"method": "Append"})


async def test_appends_above_the_limit_are_refused_and_not_applied(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    async with AsyncExitStack() as stack:
        brokers: list[tuple[BrokerProcess, RawClient]] = []
        for name in ("broker-0", "broker-1"):
            settings = broker_settings.model_copy(
                update={"id": name, "data_dir": broker_settings.data_dir / name, "max_appends": 4}
            )
            brokers.append(await stack.enter_async_context(running_broker(settings)))
        await create(brokers[0][1], spec())
        brokers.sort(key=lambda each: not each[0].broker.resolver.local_replicas)
        (process, primary), (_, other) = brokers
        replica = process.broker.resolver.local_replicas[0]
        pipeline = await replica.pipeline.take()
        waiting = [asyncio.ensure_future(primary.append(J, b"%d" % number)) for number in range(4)]
        await eventually(lambda: len(queue_of(replica)) == 4)
        with capture_logs() as logs:
            for client in (primary, other, primary):  # One of them forwards, and returns the refusal.
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await client.append(J, b"too much")
                assert refused.value.code() is grpc.StatusCode.ABORTED
                assert "nothing of this one was applied" in str(refused.value.details())
        counts = [log["refused"] for log in logs if log["event"] == "admission.appends_refused"]
        assert counts[0] == 1  # On a slow machine, later entries count more.
        assert process.broker.metrics.appends_refused.value == 3
        calls = JournalClient(process.endpoint, append_streams=False)
        async with calls, JournalClient(process.endpoint) as streamed:
            patient = asyncio.ensure_future(calls.append(J, b"later"))  # Retries after the refusal.
            await eventually(lambda: process.broker.metrics.appends_refused.value > 3)
            patient.cancel()
            # A stream is not refused: one of its appends is accepted, and the others wait for it.
            many = [asyncio.ensure_future(streamed.append(J, b"later", retry_timeout=0)) for _ in range(20)]
            await eventually(lambda: process.broker.append_streams)
            replica.pipeline.put(pipeline)
            assert {(await each).status for each in waiting} == {pb.OK}
            assert [(await each).end for each in many] == [4 + 5 * number for number in range(1, 21)]
        assert await other.content(J) in {bytes(each) + b"later" * 20 for each in permutations(b"0123")}


async def test_at_the_limit_a_stalled_journal_does_not_block_a_stream(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    async with running_broker(broker_settings.model_copy(update={"max_appends": 4})) as (process, client):
        for journal in (J, OTHER):
            await create(client, spec(journal))
        async with JournalClient(process.endpoint) as streamed:
            for journal in (J, OTHER):
                await streamed.append(journal, b"0")
            replica = process.broker.resolver.replica_of(J)
            assert replica is not None
            pipeline = await replica.pipeline.take()
            own_append = asyncio.ensure_future(streamed.append(J, b"s"))
            calls = [asyncio.ensure_future(client.append(J, b"c")) for _ in range(3)]
            await eventually(lambda: appends_under_way(process) == 4)
            other = asyncio.ensure_future(streamed.append(OTHER, b"1"))
            await eventually(lambda: process._service._admission._waiting)
            calls[0].cancel()  # Its place goes to the stream, whose own append is still stalled.
            assert (await other).end == 2
            assert not own_append.done()
            replica.pipeline.put(pipeline)
            done = await own_append
            assert done.end == done.begin + 1
            await asyncio.gather(*calls[1:])


async def test_a_burst_of_appends_gets_statuses(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    # gRPC itself cancels calls without a status while more than a thousand wait to be accepted.
    async with running_broker(broker_settings.model_copy(update={"min_append_rate": 0})) as (_, client):
        await create(client, spec())
        calls = [asyncio.ensure_future(client.append(J, b"x" * 200)) for _ in range(2500)]
        found = Counter([await code_of(call) for call in calls])
        assert set(found) <= {"OK", "ABORTED"}
        (head,) = await client.read(J, -1)
        assert head.write_head == 200 * found["OK"] > 0


async def test_the_wait_for_a_revision_that_never_arrives_is_bounded(
    client: RawClient, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(client, spec())
    never = (1 << 63) - 1
    monkeypatch.setattr(resolver, "REVISION_TIMEOUT_SECONDS", 0.2)
    for call, code in (
        (client.append(J, b"x", min_etcd_revision=never), grpc.StatusCode.ABORTED),  # Nothing was applied.
        (client.read(J, min_etcd_revision=never), grpc.StatusCode.UNAVAILABLE),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=f"revision {never} did not arrive within") as refused:
            await call
        assert refused.value.code() is code

    monkeypatch.setattr(resolver, "REVISION_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(resolver, "MAX_WAITING_FOR_REVISIONS", 3)
    waiting = [asyncio.ensure_future(client.read(J, min_etcd_revision=never)) for _ in range(4)]
    (first,), rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(grpc.aio.AioRpcError, match="3 calls already wait for etcd revisions"):
        first.result()
    for each in rest:
        each.cancel()
    await asyncio.wait(rest)
    # Cancelled calls do not wait any more.
    monkeypatch.setattr(resolver, "REVISION_TIMEOUT_SECONDS", 0.01)

    async def waits() -> bool:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await client.read(J, min_etcd_revision=never)
        return "did not arrive" in str(ended.value.details())

    await eventually(waits)
    assert (await client.append(J, b"fine")).status == pb.OK


@pytest.mark.parametrize("method", ["Append", "Replicate"])
async def test_a_silent_stream_is_closed(
    broker_settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(first_message, "FIRST_MESSAGE_SECONDS", 0.3)
    async with running_broker(broker_settings) as (process, client):
        gone = client.stub.Append()  # A client that disconnects before its first message is not counted.
        await eventually(lambda: process.broker.receive_budget.first_message_deadlines.waiting == 1)
        gone.cancel()
        async with asyncio.timeout(30):
            for call in [getattr(client.stub, method)() for _ in range(3)]:
                assert await call.code() is grpc.StatusCode.ABORTED
                assert "nothing was sent for 0.3 seconds" in await call.details()
        await eventually(lambda: process.broker.receive_budget.first_message_deadlines.waiting == 0)
