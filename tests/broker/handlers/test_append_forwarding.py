"""Appends that are forwarded to a primary which breaks off: their possible outcomes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from coranto.cluster.processes import free_port
from coranto.effects import SystemClock
from coranto.errors import Unavailable
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.queued_append import QueuedAppend
from coranto_broker.handlers.append import forward
from coranto_broker.handlers.errors import code_of
from coranto_broker.quotas import QuotaMetrics, Quotas
from coranto_broker.replication.peers import Peers
from coranto_broker.rpc.rolled_back import RolledBack

J = "a/journal"


class Primary:
    """Reads this many messages, or all if 0, and breaks off."""

    def __init__(self, messages: int, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self._messages = messages
        self._code = code
        self.received: list[pb.AppendRequest] = []

    async def append(self, request_iterator: Any, context: Any) -> pb.AppendResponse:
        async for request in request_iterator:
            self.received.append(request)
            if len(self.received) == self._messages:
                break
        await context.abort(self._code, "broke off")
        raise AssertionError


@asynccontextmanager
async def _served(primary: Primary) -> AsyncIterator[int]:
    server = grpc.aio.server()
    append = grpc.stream_unary_rpc_method_handler(
        primary.append, pb.AppendRequest.FromString, pb.AppendResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("protocol.Journal", {"Append": append}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def _forward(port: int, *messages: pb.AppendRequest) -> pb.AppendResponse:
    member = pb.ProcessSpec.ID(zone="zone", suffix="primary")
    route = pb.Route(members=[member], primary=0, endpoints=[f"http://127.0.0.1:{port}"])
    header = pb.Header(process_id=member, route=route)
    left = list(messages)

    async def read() -> pb.AppendRequest | None:
        return left.pop(0) if left else None

    peers = Peers("zone")
    broker: Any = SimpleNamespace(
        peers=peers,
        quotas=Quotas(None, SystemClock(), QuotaMetrics(CollectorRegistry())),
        keyspace=SimpleNamespace(state=None),
        unrouted_header=lambda _: pb.Header(process_id=pb.ProcessSpec.ID(zone="zone", suffix="local")),
    )
    append = QueuedAppend(pb.AppendRequest(journal=J))
    resolution: Any = SimpleNamespace(header=header)
    append.resolution = resolution
    try:
        return pb.AppendResponse.FromString(await forward(broker, append, read))
    finally:
        await peers.close()


async def test_a_primary_that_is_gone_has_not_applied_the_append() -> None:
    response = await _forward(free_port(), pb.AppendRequest(content=b"x"), pb.AppendRequest())
    assert response.status == pb.NO_JOURNAL_PRIMARY_BROKER
    assert (response.header.process_id.suffix, response.header.route.members[0].suffix) == ("local", "primary")


@pytest.mark.parametrize("commits", [False, True])
async def test_a_primary_that_breaks_off_may_have_applied_only_a_sent_commit(commits: bool) -> None:
    primary = Primary(0 if commits else 2)
    async with _served(primary) as port:
        content = [pb.AppendRequest(content=b"x")]
        if commits:
            with pytest.raises(Unavailable, match="broker zone#primary answered UNAVAILABLE: broke off"):
                await _forward(port, *content, pb.AppendRequest())
            assert len(primary.received) == 3
        else:
            assert (await _forward(port, *content)).status == pb.NO_JOURNAL_PRIMARY_BROKER


async def test_a_roll_back_reported_by_the_primary_is_final_after_the_commit_too() -> None:
    async with _served(Primary(0, grpc.StatusCode.ABORTED)) as port:
        with pytest.raises(RolledBack, match="broker zone#primary answered ABORTED: broke off") as caught:
            await _forward(port, pb.AppendRequest(content=b"x"), pb.AppendRequest())
    assert code_of(caught.value) is grpc.StatusCode.ABORTED
