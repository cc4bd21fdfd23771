"""Messages of appends that share a client's stream, including frames to a slow broker.

Tests of the brokers' handlers cover the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from coranto.client.append.stream import AppendStream, NotSent
from coranto.transport import connection as of_connections
from coranto.transport.calls import FrameDialer, GrpcCall
from coranto.transport.connection import FrameConnection
from coranto.transport.frames import FrameKind
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswer, AppendAnswers, AppendBatch
from coranto.wire.frames_pb2 import FrameEnd, FramePort
from tests.broker.running import eventually


class FakeCall:
    """A call that records written messages and answers when the test calls `answer`."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[list[int]] = asyncio.Queue()
        self._answers: asyncio.Queue[AppendAnswers] = asyncio.Queue()

    async def write(self, batch: AppendBatch) -> None:
        self.written.put_nowait([append.id for append in batch.appends])

    async def read(self) -> AppendAnswers:
        await asyncio.sleep(0)  # Like gRPC, even if a message is available.
        return await self._answers.get()

    def answer(self, ids: list[int]) -> None:
        self._answers.put_nowait(AppendAnswers(answers=[AppendAnswer(id=each, response=b"done") for each in ids]))

    def cancel(self) -> None:
        self._answers.put_nowait(AppendAnswers(closing=True))

    async def done_writing(self) -> None:
        return


async def _messages(call: FakeCall, count: int) -> list[list[int]]:
    """Return messages until they contain `count` appends."""
    found: list[list[int]] = []
    while sum(map(len, found)) < count:
        found.append(await asyncio.wait_for(call.written.get(), 10))
    return found


@pytest.mark.parametrize(("tasks", "sizes"), [(64, [32, 32]), (16, [8, 8]), (17, [8, 9]), (8, [8]), (1, [1])])
async def test_appends_answered_together_continue_in_two_alternating_halves(tasks: int, sizes: list[int]) -> None:
    call: Any = FakeCall()
    stream = AppendStream(GrpcCall(call))

    async def append() -> None:
        for _ in range(4):
            assert await stream.append(pb.AppendRequest(journal="a/b"), b"content", None) == b"done"

    running = [asyncio.create_task(append()) for _ in range(tasks)]
    (first,) = await _messages(call, tasks)
    assert len(first) == tasks
    call.answer(first)
    for _ in range(2):  # While one half is answered, the other is in flight and is not split again.
        halves = await _messages(call, tasks)
        assert [len(half) for half in halves] == sizes
        for half in halves:
            call.answer(half)
    for half in await _messages(call, tasks):
        call.answer(half)
    await asyncio.wait_for(asyncio.gather(*running), 10)
    await stream.close()


class FramedBroker:
    """A broker of append streams over frames, which reads nothing until `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.taken: list[int] = []
        self.ends_after: int | None = None
        """The number of appends after which it ends the stream without more answers, or None."""
        self._serving: set[asyncio.Task[None]] = set()

    def accept(self) -> FrameConnection:
        connection = FrameConnection(limit=16 << 20)
        self._serving.add(asyncio.ensure_future(self._serve(connection)))
        return connection

    async def _serve(self, connection: FrameConnection) -> None:
        await connection.read()
        await connection.write(FrameKind.OPENED, b"")
        await self.reads.wait()
        while (frame := await connection.read()) is not None and frame.kind == FrameKind.MESSAGE:
            ids = [append.id for append in AppendBatch.FromString(frame.payload).appends]
            self.taken += ids
            if self.ends_after is not None and len(self.taken) >= self.ends_after:
                break
            answers = AppendAnswers(answers=[AppendAnswer(id=each, response=b"done") for each in ids])
            await connection.write(FrameKind.MESSAGE, answers.SerializeToString())
        connection.end(FrameEnd().SerializeToString())
        await connection.closed()

    async def close(self) -> None:
        await asyncio.gather(*self._serving)


@contextlib.asynccontextmanager
async def framed(broker: FramedBroker) -> AsyncIterator[AppendStream]:
    server = await asyncio.get_running_loop().create_server(broker.accept, "127.0.0.1", 0)
    port = FramePort(port=server.sockets[0].getsockname()[1])
    call = await FrameDialer("127.0.0.1", None).open("AppendStream", port, None, AppendAnswers.FromString)
    stream = AppendStream(call)
    try:
        yield stream
    finally:
        broker.reads.set()
        await stream.close()
        await broker.close()
        server.close()


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make connections buffer little unread content."""
    real = of_connections._prepare

    def prepare(found: socket.socket) -> None:
        real(found)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            found.setsockopt(socket.SOL_SOCKET, option, 1 << 14)

    monkeypatch.setitem(of_connections.FrameConnection.__init__.__kwdefaults__, "write_bytes", 1 << 14)
    monkeypatch.setattr(of_connections, "_prepare", prepare)


@pytest.mark.usefixtures("small_buffers")
async def test_appends_to_a_slowly_reading_broker_wait_and_keep_their_order() -> None:
    broker = FramedBroker()
    async with framed(broker) as stream:
        running = []
        for number in range(120):
            request = pb.AppendRequest(journal=f"a/{number % 3}")
            running.append(asyncio.create_task(stream.append(request, b"x" * 4096, None)))
            if number % 10 == 0:
                await asyncio.sleep(0)  # They are sent in several messages.
        await eventually(lambda: stream._writing)
        broker.reads.set()
        assert await asyncio.wait_for(asyncio.gather(*running), 60) == [b"done"] * 120
        journals: dict[int, list[int]] = {}
        for each in broker.taken:
            journals.setdefault((each - 1) % 3, []).append(each)
        assert sorted(broker.taken) == list(range(1, 121))
        assert all(each == sorted(each) for each in journals.values())
        # The broker reads again, and the append is sent without the task.
        assert await asyncio.wait_for(stream.append(pb.AppendRequest(journal="a/0"), b"more", None), 10) == b"done"
        assert not stream._writing


@pytest.mark.usefixtures("small_buffers")
async def test_if_a_slow_broker_ends_the_stream_only_sent_appends_are_unknown() -> None:
    broker = FramedBroker()
    broker.ends_after = 1
    async with framed(broker) as stream:
        append = stream.append
        running = [
            asyncio.create_task(append(pb.AppendRequest(journal=f"a/{number % 3}"), b"x" * 60_000, None))
            for number in range(100)
        ]
        await eventually(lambda: stream._writing)
        sent = set(stream._sent)
        broker.reads.set()
        found = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)
        not_sent = [number for number, error in enumerate(found, 1) if isinstance(error, NotSent)]
        unknown = [number for number, error in enumerate(found, 1) if isinstance(error, grpc.aio.AioRpcError)]
        assert len(not_sent) + len(unknown) == 100
        assert set(broker.taken) <= sent <= set(unknown)
        assert not_sent
        with pytest.raises(NotSent):
            await append(pb.AppendRequest(journal="a/b"), b"late", None)
