"""Connections of frames: back-pressure in both directions, silent peers, ends, and the memory bound of a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from coranto.transport.connection import (
    FRAME_BYTES,
    MAX_SIGNS,
    READ_BYTES,
    FrameBudget,
    FrameConnection,
    FrameFault,
)
from coranto.transport.frames import PREFACE, Frame, FrameKind, encode_frame
from coranto.wire.frames_pb2 import FrameEnd

LIMIT = 1 << 20
PIECE = b"x" * (256 << 10)


@contextlib.asynccontextmanager
async def connected(
    budget: FrameBudget | None = None,
) -> AsyncIterator[tuple[FrameConnection, FrameConnection, list[bool]]]:
    """Yield a client's connection, the server's, and a list that records the loss of the server's."""
    lost: list[bool] = []
    accepted: asyncio.Future[FrameConnection] = asyncio.get_running_loop().create_future()

    def accept() -> FrameConnection:
        made = FrameConnection(limit=LIMIT, on_lost=lambda: lost.append(True))
        made.opened(LIMIT, budget or FrameBudget(1 << 30))
        accepted.set_result(made)
        return made

    loop = asyncio.get_running_loop()
    server = await loop.create_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    _, client = await loop.create_connection(lambda: FrameConnection(limit=LIMIT), "127.0.0.1", port)
    try:
        yield client, await accepted, lost
    finally:
        client.abort("the test has ended")
        (await accepted).abort("the test has ended")
        server.close()


async def eventually(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def write_all(connection: FrameConnection, count: int) -> int:
    return sum([await connection.write(FrameKind.MESSAGE, PIECE) for _ in range(count)])


async def test_a_slow_reader_stops_the_writer_and_gets_all_frames() -> None:
    async with connected() as (client, server, _):
        count = 200  # 50 MiB, more than the kernel and both sides hold.
        writing = asyncio.create_task(write_all(client, count))
        done, _ = await asyncio.wait((writing,), timeout=0.3)
        assert not done
        assert server._unread <= READ_BYTES + 2 * LIMIT
        for _ in range(count):
            assert await server.read() == (FrameKind.MESSAGE, PIECE)
        assert await writing == count


async def test_unread_empty_frames_are_bounded() -> None:
    async with connected() as (client, server, _):
        assert client._transport is not None
        frame = b"".join(encode_frame(FrameKind.MESSAGE, b""))
        client._transport.write(frame * 2_000_000)  # 10 MB
        await eventually(lambda: server._reading_paused)
        await asyncio.sleep(0.05)
        assert len(server._frames) <= READ_BYTES // FRAME_BYTES + LIMIT // len(frame)
        for _ in range(len(server._frames) + 1):
            assert await server.read() == (FrameKind.MESSAGE, b"")


async def test_frames_received_before_the_end_are_read_and_then_the_reason() -> None:
    async with connected() as (client, server, lost):
        await client.write(FrameKind.MESSAGE, b"last words")
        assert await server.read() == (FrameKind.MESSAGE, b"last words")
        client.abort("no more")
        assert await asyncio.wait_for(server.read(), 10) is None
        assert server.problem is not None
        assert lost == [True]
        assert not await server.write(FrameKind.MESSAGE, b"to nobody")
        assert not await client.write(FrameKind.MESSAGE, b"to nobody")


async def test_the_last_frame_arrives_although_the_other_side_still_sends() -> None:
    async with connected() as (client, server, _):
        writing = asyncio.create_task(write_all(client, 40))
        await server.read()
        server.end(b"the end")
        server.end(b"told once")
        assert await asyncio.wait_for(client.read(), 10) == (FrameKind.END, b"the end")
        assert not await server.write(FrameKind.MESSAGE, b"behind the end")
        await asyncio.wait_for(writing, 10)


async def test_invalid_frames_end_the_connection_with_the_reason() -> None:
    async with connected() as (client, server, _):
        assert client._transport is not None
        client._transport.write(b"\xff" * 64)
        assert await asyncio.wait_for(server.read(), 10) is None
        frame = await asyncio.wait_for(client.read(), 10)
        assert frame is not None
        assert "is longer than" in FrameEnd.FromString(frame.payload).details


async def test_a_silent_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (client, _, _):
        client.watch()
        client._check_silence(False)  # A minute of silence causes a ping.
        await eventually(lambda: client._has_received)  # The other side answers, although no task reads there.
        client._check_silence(True)
        assert client.problem is None
        monkeypatch.setattr(FrameConnection, "data_received", lambda *_: None)
        client._check_silence(False)
        assert client.problem is None
        client._check_silence(True)
        assert await asyncio.wait_for(client.read(), 10) is None
        assert "silent" in str(client.problem)


async def test_connections_beyond_the_shared_budget_are_closed_and_release_it() -> None:
    budget = FrameBudget(3 * len(PIECE))
    async with connected(budget) as (one, small, _), connected(budget) as (client, large, lost):
        await one.write(FrameKind.MESSAGE, b"little")
        await eventually(lambda: budget.held)
        await write_all(client, 8)
        await eventually(lambda: lost)
        assert "hold too many unread bytes" in str(large.problem)
        assert small.problem is None
        assert budget.held == len(b"little") + FRAME_BYTES


class Sent(asyncio.Transport):
    """A transport that records sent data."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high

    def resume_reading(self) -> None:
        self.pieces.append(b"resumed")

    def abort(self) -> None:
        self.pieces.append(b"aborted")


def made() -> tuple[FrameConnection, Sent]:
    connection, sent = FrameConnection(), Sent()
    connection.connection_made(sent)
    connection.data_received(PREFACE)
    return connection, sent


def bytes_of(kind: FrameKind, payload: bytes = b"") -> bytes:
    return b"".join(encode_frame(kind, payload))


@pytest.mark.parametrize("kind", [FrameKind.PING, FrameKind.PONG, FrameKind.MESSAGE, FrameKind.OPENING])
async def test_only_one_frame_is_accepted_before_a_call_is_opened(kind: FrameKind) -> None:
    flooded, sent = made()
    flooded.data_received(bytes_of(kind) * 50_000)
    assert not flooded._frames
    assert "before the call was opened" in str(flooded.problem)
    assert len(sent.pieces) == 2  # The preface, and the end.

    late, sent = made()
    late.data_received(bytes_of(kind))
    assert await late.read() == (kind, b"")  # This includes pings, which get no answer yet.
    late.data_received(b"\0")
    assert "before the call was opened" in str(late.problem)
    assert len(sent.pieces) == 2


async def test_many_pings_get_one_answer_and_too_many_end_the_connection() -> None:
    connection, sent = made()
    connection.data_received(bytes_of(FrameKind.OPENING))
    connection.opened(LIMIT, FrameBudget(LIMIT))
    connection.data_received(bytes_of(FrameKind.PING) * MAX_SIGNS + bytes_of(FrameKind.MESSAGE))
    assert sent.pieces[1:] == [bytes_of(FrameKind.PONG)]
    assert [await connection.read(), await connection.read()] == [(FrameKind.OPENING, b""), (FrameKind.MESSAGE, b"")]
    connection.data_received(bytes_of(FrameKind.PONG) * 50_000)
    assert "50000 pings and pongs arrived together" in str(connection.problem)
    assert await connection.read() is None


async def test_frames_read_after_the_loss_do_not_count_in_the_budget() -> None:
    budget = FrameBudget(1 << 30)
    connection, _ = made()
    connection.opened(LIMIT, budget)
    connection.data_received(bytes_of(FrameKind.MESSAGE, b"one") + bytes_of(FrameKind.MESSAGE, PIECE)[:-1])
    assert budget.held > len(PIECE)
    connection.connection_lost(None)
    assert budget.held == 0
    assert await connection.read() == Frame(FrameKind.MESSAGE, b"one")
    assert budget.held == 0


async def test_a_started_frame_must_be_completed_in_time_unless_reading_is_paused() -> None:
    connection, sent = made()
    connection.opened(LIMIT, FrameBudget(1 << 30))
    frame = bytes_of(FrameKind.MESSAGE, b"late")
    connection._check_progress()  # Idle for a minute.
    connection.data_received(frame[:-1])
    connection._check_progress()
    connection.data_received(frame[-1:] + frame[:6])  # The frame is complete, and the next one has started.
    connection._check_progress()
    connection._reading_paused = True
    connection._check_progress()
    assert await connection.read() == (FrameKind.MESSAGE, b"late")
    connection._check_progress()
    assert connection.fault is None
    connection.data_received(frame[6:7])  # One byte per minute is too slow.
    connection._check_progress()
    assert connection.fault is FrameFault.LATE
    assert "the rest of a frame did not arrive" in (connection.problem or "")
    assert sent.pieces[-1] == b"aborted"
    assert await connection.read() is None
