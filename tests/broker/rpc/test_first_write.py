"""Contexts that finish sending their first message: after a cancelled sender, before a call's status."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from coranto_broker.rpc.first_write import WholeFirstWrite


class Ended(Exception):
    """The call has ended."""


class Call:
    """A call that refuses its status while its first message is being sent, as grpc.aio does."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.sends = False
        self.seen: list[object] = []
        self.peer_name = "somebody"

    async def read(self) -> object:
        return "a message"

    async def write(self, message: object, /) -> None:
        self.sends = True
        await self.room.wait()
        self.seen.append(message)
        self.sends = False

    async def abort(self, code: object, details: str = "", /) -> NoReturn:
        assert not self.sends, "gRPC takes no status while it sends"
        self.seen.append((code, details))
        raise Ended


async def test_a_status_follows_the_message_whose_sender_was_cancelled() -> None:
    call = Call()
    context = WholeFirstWrite(call)
    assert (await context.read(), context.peer_name) == ("a message", "somebody")
    sender = asyncio.create_task(context.write("first"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert call.sends
    sender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sender
    ending = asyncio.create_task(context.abort(13, "too late"))
    await asyncio.sleep(0)
    call.room.set()
    with pytest.raises(Ended):
        await ending
    assert call.seen == ["first", (13, "too late")]


async def test_a_call_without_a_pending_message_ends_immediately() -> None:
    call = Call()
    call.room.set()
    context = WholeFirstWrite(call)
    for message in ("first", "second"):
        await context.write(message)
    with pytest.raises(Ended):
        await context.abort(0)
    assert call.seen == ["first", "second", (0, "")]


async def test_a_cancelled_wait_leaves_no_task_behind() -> None:
    call = Call()
    context = WholeFirstWrite(call)
    before = asyncio.all_tasks()
    sender = asyncio.create_task(context.write("first"))
    await asyncio.sleep(0)
    sender.cancel()
    await asyncio.wait((sender,))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await context.abort(0)
    (rest,) = asyncio.all_tasks() - before
    await asyncio.wait((rest,))
    assert call.seen == []


async def test_a_send_error_is_raised_to_the_sender() -> None:
    class Gone(Call):
        async def write(self, message: object, /) -> None:
            raise OSError("the client is gone")

    with pytest.raises(OSError, match="gone"):
        await WholeFirstWrite(Gone()).write("first")
