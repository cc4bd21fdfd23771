"""Clients that append to real brokers and never read answers: memory is bounded, and their streams end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from coranto.client import JournalClient
from coranto.transport.frames import PREFACE, FrameKind, encode_frame
from coranto.wire import append_stream_pb2_grpc as stream_grpc
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendBatch, StreamedAppend
from coranto.wire.frames_pb2 import FrameOpening
from coranto_broker.append import overload
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import eventually

J = "test/journal"
BATCH_APPENDS = 500
MakeSpec = Callable[..., pb.JournalSpec]


class Flood:
    """A client that sends batches endlessly, and reads nothing."""

    def __init__(self) -> None:
        self.sent = 0

    def batch(self) -> AppendBatch:
        request = pb.AppendRequest(journal=J)
        first, self.sent = self.sent + 1, self.sent + BATCH_APPENDS
        return AppendBatch(
            appends=[StreamedAppend(id=first + number, request=request, content=b"x" * 20) for number in range(500)]
        )

    async def over_grpc(self, process: BrokerProcess) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 1 << 16)]
        async with grpc.aio.insecure_channel(process.endpoint.removeprefix("http://"), options=options) as channel:
            stub: Any = stream_grpc.AppendsStub(channel)
            call = stub.AppendStream()
            await call.write(AppendBatch())
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await call.write(self.batch())

    async def over_frames(self, process: BrokerProcess) -> None:
        port, frames = process.broker.frames, process._frames
        assert port is not None
        assert frames is not None
        # These tests are not about answers in the broker's kernel, which are some megabytes otherwise.
        listener: Any = frames._listener
        listener._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(own, ("127.0.0.1", port.port))
            opening = FrameOpening(method="AppendStream", key=port.key).SerializeToString()
            await loop.sock_sendall(own, PREFACE + b"".join(encode_frame(FrameKind.OPENING, opening)))
            opened = PREFACE + b"".join(encode_frame(FrameKind.OPENED, b""))
            received = b""
            while len(received) < len(opened):
                received += await loop.sock_recv(own, len(opened) - len(received))
            batch = AppendBatch()
            with contextlib.suppress(OSError):
                while True:
                    message = batch.SerializeToString()
                    await loop.sock_sendall(own, b"".join(encode_frame(FrameKind.MESSAGE, message)))
                    batch = self.batch()


@pytest.mark.parametrize("way", [pytest.param(Flood.over_grpc, marks=pytest.mark.exhaustive), Flood.over_frames])
async def test_a_client_that_never_reads_is_throttled_and_then_loses_its_stream(
    way: Callable[[Flood, BrokerProcess], Any],
    broker_settings: BrokerSettings,
    spec: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overload, "ANSWER_TIMEOUT_SECONDS", 2.0)
    async with (
        BrokerProcess(broker_settings) as process,
        JournalClient(process.endpoint, append_streams=False) as client,
    ):
        broker = process.broker
        await client.apply([pb.ApplyRequest.Change(upsert=spec(J))])
        await client.append(J, b"")
        most, real = 0, overload.ReceiveBudget.require_capacity

        def require_capacity(watch: overload.ReceiveBudget, stream: Any) -> None:
            nonlocal most
            most = max(most, stream.held)
            real(watch, stream)

        monkeypatch.setattr(overload.ReceiveBudget, "require_capacity", require_capacity)
        calls = partial(broker.metrics.registry.get_sample_value, "coranto_calls", {"method": "AppendStream"})
        flood = Flood()
        flooding = asyncio.create_task(way(flood, process))
        ended = broker.metrics.append_streams_ended.labels("answers unread")
        await eventually(lambda: ended._value.get() == 1)
        # Other clients are served, before and after.
        await client.append(J, b"friendly\n")
        await eventually(lambda: calls() == 0)  # The call ends, although its client does not read.
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        await eventually(lambda: broker.receive_budget.held == 0)
        message = BATCH_APPENDS * (overload.ITEM_BYTES + 20)
        assert 0 < most <= overload.STREAM_BYTES + message
        assert flood.sent > BATCH_APPENDS


async def test_many_clients_that_never_read_share_one_bound(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "ANSWER_TIMEOUT_SECONDS", 2.0)  # For the last clients, once not all hold much.
    monkeypatch.setattr(overload, "MAX_BUFFERED_BYTES", 1 << 19)
    monkeypatch.setattr(overload, "MAX_HELD_BYTES", 2 << 20)
    async with (
        BrokerProcess(broker_settings) as process,
        JournalClient(process.endpoint, append_streams=False) as client,
    ):
        broker = process.broker
        await client.apply([pb.ApplyRequest.Change(upsert=spec(J))])
        await client.append(J, b"")
        floods = [Flood() for _ in range(6)]
        flooding = [asyncio.create_task(each.over_frames(process)) for each in floods]
        most = 0

        def all_ended() -> bool:
            nonlocal most
            most = max(most, broker.receive_budget.held)
            return all(each.done() for each in flooding)

        await eventually(all_ended)  # Each has lost its stream, and its connection.
        message = BATCH_APPENDS * (overload.ITEM_BYTES + 20)
        assert most <= (2 << 20) + len(floods) * message
        await eventually(lambda: broker.receive_budget.held == 0)
        await client.append(J, b"friendly\n")
