"""The limit of blocking reads: for each caller, over gRPC and HTTP together, and not for other reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import grpc
import grpc.aio
import pytest

from coranto.wire import protocol_pb2 as pb
from coranto_broker.rpc.blocking_reads import BlockingReads, TooManyReads
from coranto_broker.settings import BrokerSettings
from tests.broker.running import create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


def test_each_caller_has_a_limit() -> None:
    refused: list[bool] = []
    reads = BlockingReads(2, lambda: refused.append(True))
    with reads.under_way("alice"), reads.under_way("bob"):
        with reads.under_way("alice"):
            with (
                pytest.raises(TooManyReads, match=r"alice has 2 blocking reads.*max_blocking_reads"),
                reads.under_way("alice"),
            ):
                pass
            with reads.under_way("bob"):
                pass
        with reads.under_way("alice"):
            pass
    assert refused == [True]
    assert not reads._under_way
    unlimited = BlockingReads(0, lambda: refused.append(True))
    with unlimited.under_way("alice"), unlimited.under_way("alice"):
        assert len(refused) == 1


async def test_a_client_that_reads_too_much_is_refused_until_it_ends_reads(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    settings = broker_settings.model_copy(update={"max_blocking_reads": 3, "http_port": 0})
    async with running_broker(settings) as (process, client), aiohttp.ClientSession() as session:
        await create(client, spec())
        waiting = [asyncio.ensure_future(client.read(J, block=True, end_offset=1)) for _ in range(3)]
        under_way = process.broker.blocking_reads._under_way
        await eventually(lambda: sum(under_way.values()) == 3)
        with pytest.raises(grpc.aio.AioRpcError, match=r"ipv4:127\.0\.0\.1 has 3 blocking reads") as refused:
            await client.read(J, block=True)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with session.get(f"{process.http_endpoint}/{J}?block=true") as answer:
            assert (answer.status, "max_blocking_reads" in await answer.text()) == (429, True)
        assert [each.status for each in await client.read(J)] == [pb.OFFSET_NOT_YET_AVAILABLE]
        assert process.broker.metrics.registry.get_sample_value("coranto_reads_refused_total") == 2
        waiting.pop().cancel()
        await eventually(lambda: sum(under_way.values()) == 2)
        waiting.append(asyncio.ensure_future(client.read(J, block=True, end_offset=1)))
        await eventually(lambda: sum(under_way.values()) == 3)
        assert (await client.append_when_ready(J, b"x")).status == pb.OK
        for each in waiting:
            assert b"".join(response.content for response in await each) == b"x"
        await eventually(lambda: not under_way)
