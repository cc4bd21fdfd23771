"""Calls over frames: messages, ends and failures, as gRPC's calls report them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest

from coranto.cluster import processes
from coranto.transport.calls import FrameCall, FrameDialer
from coranto.transport.connection import FrameConnection
from coranto.transport.frames import Frame, FrameKind
from coranto.wire.append_stream_pb2 import AppendAnswer, AppendAnswers, AppendBatch
from coranto.wire.frames_pb2 import FrameEnd, FrameOpening, FramePort

Serve = Callable[[FrameConnection, Frame], Awaitable[None]]
ANSWER = AppendAnswers(answers=[AppendAnswer(id=7, response=b"done")])


@contextlib.asynccontextmanager
async def called(serve: Serve, *, name: str = "") -> AsyncIterator[FrameCall[AppendAnswers]]:
    """Yield a call to a server that runs `serve` on the connection."""
    serving: list[asyncio.Task[None]] = []

    def accept() -> FrameConnection:
        connection = FrameConnection(limit=1 << 20)

        async def run() -> None:
            frame = await connection.read()
            assert frame is not None
            await connection.write(FrameKind.OPENED, b"")
            await serve(connection, frame)

        serving.append(asyncio.ensure_future(run()))
        return connection

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    port = FramePort(port=server.sockets[0].getsockname()[1], key=b"key")
    call = await FrameDialer("127.0.0.1", None, name).open(
        "AppendStream", port, (("authorization", "Bearer x"),), AppendAnswers.FromString
    )
    try:
        yield call
    finally:
        call.cancel()
        await asyncio.gather(*serving)
        server.close()


async def status(call: FrameCall[AppendAnswers]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asyncio.wait_for(call.read(), 10)
    assert (await call.code(), await call.details()) == (error.value.code(), error.value.details())
    return error.value.code(), error.value.details() or ""


async def test_a_call_has_an_opening_messages_and_both_ends() -> None:
    async def serve(connection: FrameConnection, first: Frame) -> None:
        opening = FrameOpening(method="AppendStream", key=b"key", authorization="Bearer x", user_agent="me grpc-frames")
        assert (first.kind, FrameOpening.FromString(first.payload)) == (FrameKind.OPENING, opening)
        assert await connection.read() == (FrameKind.MESSAGE, AppendBatch().SerializeToString())
        await connection.write(FrameKind.MESSAGE, ANSWER.SerializeToString())
        assert await connection.read() == (FrameKind.END, b"")
        connection.end(FrameEnd().SerializeToString())

    async with called(serve, name="me grpc-frames") as call:
        await call.write(AppendBatch())
        assert await call.read() == ANSWER
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.read() is grpc.aio.EOF
        assert (await call.code(), await call.details()) == (grpc.StatusCode.OK, "")


async def test_answers_received_before_a_failed_write_are_read() -> None:
    async def serve(connection: FrameConnection, _: Frame) -> None:
        for _ in range(2):
            await connection.write(FrameKind.MESSAGE, ANSWER.SerializeToString())
        connection.abort("the broker ends")

    async with called(serve) as call:
        await asyncio.wait_for(call._connection.closed(), 10)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.write(AppendBatch())
        assert [await call.read(), await call.read()] == [ANSWER, ANSWER]
        assert (await status(call))[0] is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError, match="the connection was closed"):
            await call.done_writing()


async def test_the_status_of_a_refusal_is_reported() -> None:
    async def serve(connection: FrameConnection, _: Frame) -> None:
        await connection.write(FrameKind.MESSAGE, ANSWER.SerializeToString())
        connection.end(FrameEnd(code=grpc.StatusCode.ABORTED.value[0], details="in words").SerializeToString())

    async with called(serve) as call:
        assert await call.read() == ANSWER
        assert await status(call) == (grpc.StatusCode.ABORTED, "in words")
        with pytest.raises(grpc.aio.AioRpcError, match="in words"):
            await call.write(AppendBatch())


@pytest.mark.parametrize(("kind", "payload"), [(FrameKind.MESSAGE, b"\xff"), (FrameKind.END, b"\xff"), (9, b"")])
async def test_unreadable_frames_end_the_call(kind: FrameKind, payload: bytes) -> None:
    async def serve(connection: FrameConnection, _: Frame) -> None:
        await connection.write(kind, payload)

    async with called(serve) as call:
        code, words = await status(call)
        assert code is grpc.StatusCode.INTERNAL
        assert f"kind {int(kind)}" in words


async def test_a_broken_connection_makes_the_broker_unavailable() -> None:
    async def serve(connection: FrameConnection, _: Frame) -> None:
        connection.abort("killed")

    async with called(serve) as call:
        assert (await status(call))[0] is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError):
            await call.done_writing()


async def test_a_closed_port_makes_the_broker_unavailable() -> None:
    port = FramePort(port=processes.free_port(), key=b"key")
    with pytest.raises(grpc.aio.AioRpcError, match=f"127.0.0.1 port {port.port}"):
        await FrameDialer("127.0.0.1", None).open("AppendStream", port, None, AppendAnswers.FromString)


@pytest.mark.parametrize(("host", "number"), [("127.0.0.1", 70_000), ("a" * 70, 1), ("a..b", 1)])
async def test_an_invalid_port_or_host_makes_the_broker_unavailable(host: str, number: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await FrameDialer(host, None).open("AppendStream", FramePort(port=number), None, AppendAnswers.FromString)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


class Received:
    """Records messages of a call, and then its status."""

    def __init__(self) -> None:
        self.messages: list[AppendAnswers] = []
        self.ended: asyncio.Future[grpc.aio.AioRpcError | None] = asyncio.get_running_loop().create_future()

    async def status(self) -> grpc.StatusCode | None:
        error = await asyncio.wait_for(asyncio.shield(self.ended), 10)
        return error.code() if error is not None else None


@pytest.mark.parametrize("ends", ["in order", "refused", "broken", "unreadable"])
async def test_messages_and_the_end_are_delivered_on_arrival(ends: str) -> None:
    async def serve(connection: FrameConnection, _: Frame) -> None:
        for _ in range(3):
            await connection.write(FrameKind.MESSAGE, ANSWER.SerializeToString())
        assert await connection.read() == (FrameKind.MESSAGE, AppendBatch().SerializeToString())
        await connection.write(FrameKind.MESSAGE, ANSWER.SerializeToString())
        if ends == "in order":
            connection.end(FrameEnd().SerializeToString())
        elif ends == "refused":
            connection.end(FrameEnd(code=grpc.StatusCode.ABORTED.value[0]).SerializeToString())
        elif ends == "broken":
            await connection.read()  # An abort would discard data in flight.
            connection.abort("killed")
        else:
            await connection.write(FrameKind.MESSAGE, b"\xff")
            await connection.write(FrameKind.MESSAGE, ANSWER.SerializeToString())

    async with called(serve) as call:
        found = Received()

        def each(message: AppendAnswers) -> None:
            assert not found.ended.done()
            found.messages.append(message)
            if len(found.messages) == 3:
                assert call.write_now(AppendBatch().SerializeToString())
            if len(found.messages) == 4 and ends == "broken":
                assert call.write_now(AppendBatch().SerializeToString())

        call.receive(each, found.ended.set_result)
        codes = {
            "in order": None,
            "refused": grpc.StatusCode.ABORTED,
            "broken": grpc.StatusCode.UNAVAILABLE,
            "unreadable": grpc.StatusCode.INTERNAL,
        }
        assert await found.status() == codes[ends]
        assert found.messages == [ANSWER] * 4
        assert not call.write_now(AppendBatch().SerializeToString())


async def test_after_a_cancellation_only_the_end_is_delivered() -> None:
    async def serve(connection: FrameConnection, _: Frame) -> None:
        for _ in range(3):
            await connection.write(FrameKind.MESSAGE, ANSWER.SerializeToString())
        await connection.closed()

    async with called(serve) as call:
        found = Received()

        def each(message: AppendAnswers) -> None:
            found.messages.append(message)
            call.cancel()

        call.receive(each, found.ended.set_result)
        assert await found.status() == grpc.StatusCode.UNAVAILABLE
        count = len(found.messages)
        await asyncio.sleep(0)
        assert 1 <= count == len(found.messages)


async def test_writes_are_refused_while_the_server_does_not_read() -> None:
    read = asyncio.Event()
    whole = 0

    async def serve(connection: FrameConnection, _: Frame) -> None:
        nonlocal whole
        await read.wait()
        while (frame := await connection.read()) is not None and frame.kind == FrameKind.MESSAGE:
            assert frame.payload == b"x" * (1 << 16)
            whole += 1
        connection.end(FrameEnd().SerializeToString())

    async with called(serve) as call:
        found, sent = Received(), 0
        call.receive(found.messages.append, found.ended.set_result)
        while call.write_now(b"x" * (1 << 16)):
            sent += 1
            assert sent < 10_000, "the connection has no bound"
        read.set()
        await asyncio.wait_for(call.done_writing(), 10)
        assert await found.status() is None
        assert whole == sent
