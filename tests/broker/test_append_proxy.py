"""Appends that are forwarded to a primary which breaks off: whether they can have been applied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from coranto.cluster.processes import free_port
from coranto.errors import Unavailable
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.append import _proxy
from coranto_broker.peers import Peers

J = "a/journal"


class Primary:
    """Reads so many messages, or all when that is 0, and breaks off."""

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self.received: list[pb.AppendRequest] = []

    async def append(self, request_iterator: Any, context: Any) -> pb.AppendResponse:
        async for request in request_iterator:
            self.received.append(request)
            if len(self.received) == self._messages:
                break
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broke off")
        raise AssertionError


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
        keyspace=SimpleNamespace(state=None),
        unrouted_header=lambda _: pb.Header(process_id=pb.ProcessSpec.ID(zone="zone", suffix="local")),
    )
    fsm: Any = SimpleNamespace(resolution=SimpleNamespace(header=header), request=pb.AppendRequest(journal=J))
    inbox: Any = SimpleNamespace(read=read)
    try:
        return await _proxy(broker, fsm, inbox)
    finally:
        await peers.close()


async def test_a_primary_that_is_gone_has_not_applied_it() -> None:
    response = await _forward(free_port(), pb.AppendRequest(content=b"x"), pb.AppendRequest())
    assert response.status == pb.NO_JOURNAL_PRIMARY_BROKER
    assert (response.header.process_id.suffix, response.header.route.members[0].suffix) == ("local", "primary")


@pytest.mark.parametrize("commits", [False, True])
async def test_a_primary_that_breaks_off(commits: bool) -> None:
    """After the commit was sent nobody knows; before it, the append was not applied."""
    server = grpc.aio.server()
    primary = Primary(0 if commits else 2)
    append = grpc.stream_unary_rpc_method_handler(
        primary.append, pb.AppendRequest.FromString, pb.AppendResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("protocol.Journal", {"Append": append}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        content = [pb.AppendRequest(content=b"x")]
        if commits:
            with pytest.raises(Unavailable, match="broker zone#primary answered UNAVAILABLE: broke off"):
                await _forward(port, *content, pb.AppendRequest())
            assert len(primary.received) == 3
        else:
            assert (await _forward(port, *content)).status == pb.NO_JOURNAL_PRIMARY_BROKER
    finally:
        await server.stop(None)
