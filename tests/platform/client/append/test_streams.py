"""The stream to a broker moves from gRPC to frames in order, and stays on gRPC if frames fail."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from coranto.client.append import streams as append_streams
from coranto.client.append.stream import AppendStream
from coranto.client.append.streams import AppendStreams
from coranto.transport.calls import GrpcCall, rpc_error
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswer, AppendAnswers, AppendBatch
from coranto.wire.frames_pb2 import FramePort

PORT = FramePort(port=1, key=b"key")


class FakeCall:
    """A call that records written messages and answers when the test calls `answer`."""

    def __init__(self, name: str, log: list[tuple[str, bytes]], first: AppendAnswers) -> None:
        self.name = name
        self.log = log
        self.unanswered: list[int] = []
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._answers.put_nowait(first)

    async def write(self, batch: AppendBatch) -> None:
        for append in batch.appends:
            self.log.append((self.name, append.content))
            self.unanswered.append(append.id)

    async def read(self) -> Any:
        found = await self._answers.get()
        if isinstance(found, Exception):
            raise found
        return found

    def answer(self) -> None:
        ids, self.unanswered = self.unanswered, []
        self._answers.put_nowait(AppendAnswers(answers=[AppendAnswer(id=each, response=b"done") for each in ids]))

    def breaks(self) -> None:
        self._answers.put_nowait(rpc_error(grpc.StatusCode.UNAVAILABLE, "broken"))

    def add_done_callback(self, _: object) -> None:
        return

    def cancel(self) -> None:
        self.breaks()

    async def done_writing(self) -> None:
        self._answers.put_nowait(grpc.aio.EOF)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK


class FakeFrames(GrpcCall[AppendAnswers]):
    """A call whose first answer was already read."""

    def __init__(self, call: FakeCall) -> None:
        super().__init__(call)
        self.read = call.read


class World:
    """A broker with or without frames, and the calls to it."""

    host = "broker.example"

    def __init__(self, *, port: FramePort | None = PORT) -> None:
        self.log: list[tuple[str, bytes]] = []
        self.calls: list[FakeCall] = []
        self.port = port
        self.refusal: grpc.aio.AioRpcError | None = None
        self.tries = 0
        self.streams = AppendStreams(lambda: self, self)  # type: ignore[arg-type, return-value]

    def AppendStream(self, metadata: object) -> FakeCall:
        return self._called("gRPC", AppendAnswers(frames=self.port))

    async def open(self, *_: object) -> FakeFrames:
        self.tries += 1
        if self.refusal is not None:
            raise self.refusal
        return FakeFrames(self._called("frames", AppendAnswers()))

    def _called(self, name: str, first: AppendAnswers) -> FakeCall:
        self.calls.append(FakeCall(name, self.log, first))
        return self.calls[-1]

    def begin(self, content: bytes) -> asyncio.Task[bytes]:
        async def append() -> bytes:
            stream = await self.streams.get(None)
            assert isinstance(stream, AppendStream)
            return await stream.append(pb.AppendRequest(journal="a/b"), content, None)

        return asyncio.create_task(append())

    async def sent(self, count: int) -> None:
        for _ in range(1_000_000):
            if len(self.log) >= count:
                return
            await asyncio.sleep(0)
        raise TimeoutError

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def world() -> World:
    return World()


async def test_appends_move_to_frames_once_earlier_ones_are_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_streams, "HANDOVER_SECONDS", 60.0)
    first = world.begin(b"1")
    await world.sent(1)
    await world.settled()  # The connection for frames is open.
    second = world.begin(b"2")
    await world.settled()
    third = world.begin(b"3")
    await world.settled()
    assert world.log == [("gRPC", b"1")]
    assert not world.streams.over_frames
    world.calls[0].answer()
    await world.sent(3)
    assert world.log == [("gRPC", b"1"), ("frames", b"2"), ("frames", b"3")]
    assert world.streams.over_frames
    world.calls[1].answer()
    assert await asyncio.gather(first, second, third) == [b"done"] * 3
    await world.streams.close()


async def test_slow_answers_delay_the_move_to_frames(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_streams, "HANDOVER_SECONDS", 0.02)
    first = world.begin(b"1")
    await world.sent(1)
    await world.settled()
    second = world.begin(b"2")
    await world.sent(2)
    third = world.begin(b"3")
    await world.sent(3)
    assert [name for name, _ in world.log] == ["gRPC"] * 3
    world.calls[0].answer()
    assert await asyncio.gather(first, second, third) == [b"done"] * 3
    monkeypatch.setattr(world.streams, "_frames_at", 0.0)
    last = world.begin(b"4")
    await world.sent(4)
    assert world.log[-1] == ("frames", b"4")
    world.calls[1].answer()
    assert await last == b"done"
    await world.streams.close()


async def test_unreachable_frames_are_logged_once_and_lose_no_append(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.refusal = rpc_error(grpc.StatusCode.UNAVAILABLE, "no connection within 5 s")
    for number in range(1, 6):
        if number > 3:
            monkeypatch.setattr(world.streams, "_frames_at", 0.0)  # Simulates that time has passed.
        append = world.begin(b"x")
        await world.sent(number)
        world.calls[0].answer()
        assert await append == b"done"
        await world.settled()
    assert len(world.calls) == 1
    assert world.tries == 3
    output = capsys.readouterr().out
    assert output.count("client.frames_unreachable") == 1
    assert "no connection within 5 s" in output
    await world.streams.close()


async def test_broken_frames_leave_the_answer_unknown_and_grpc_continues(world: World) -> None:
    first = world.begin(b"1")
    await world.sent(1)
    world.calls[0].answer()
    await first
    await world.settled()
    lost = world.begin(b"2")
    await world.sent(2)
    world.calls[1].breaks()
    with pytest.raises(grpc.aio.AioRpcError, match="the stream broke before the answer"):
        await lost
    again = world.begin(b"3")
    await world.sent(3)
    assert [name for name, _ in world.log] == ["gRPC", "frames", "gRPC"]
    world.calls[2].answer()
    assert await again == b"done"
    # A connection that has just broken is not reopened immediately.
    await world.settled()
    assert world.tries == 1
    await world.streams.close()


async def test_a_broker_without_frames_is_not_dialled_and_new_certificates_use_grpc() -> None:
    world = World(port=None)
    for number in (1, 2):
        append = world.begin(b"x")
        await world.sent(number)
        world.calls[-1].answer()
        await append
        await world.settled()
    assert [call.name for call in world.calls] == ["gRPC"]
    world.streams.renew()
    append = world.begin(b"x")
    await world.sent(3)
    assert [call.name for call in world.calls] == ["gRPC", "gRPC"]
    world.calls[1].answer()
    await append
    await world.streams.close()
