"""Floors: bare `grpc.aio` servers, in processes of their own, that move the very messages of the journals' RPCs and do
nothing else. Same wire messages, same serialisation, no journal.

`Append` counts the bytes of its messages and answers once. With relays it first passes each message on to them, over
one long-lived `Replicate` stream for all appends, as brokers do, and awaits their answers. `Read` sends what it is
asked for, in chunks from memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from coranto.memory import keep_freed_memory
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
READ_CHUNK = 1 << 20
OPTIONS = [("grpc.max_receive_message_length", 16 << 20), ("grpc.max_send_message_length", 16 << 20)]


class Relay:
    """One long-lived stream to another bare server."""

    def __init__(self, endpoint: str) -> None:
        self._call: Any = pb_grpc.JournalStub(grpc.aio.insecure_channel(endpoint, options=OPTIONS)).Replicate()
        self._turn = asyncio.Lock()
        self._writing = asyncio.Lock()

    async def send(self, message: pb.ReplicateRequest) -> None:
        async with self._writing:
            await self._call.write(message)

    async def acknowledged(self) -> None:
        """Await the answer to a message that asked for one."""
        async with self._turn:
            await self._call.read()


class BareJournal(pb_grpc.JournalServicer):
    def __init__(self, relays: list[str]) -> None:
        self._relays = [Relay(endpoint) for endpoint in relays]

    async def Append(self, request_iterator: AsyncIterator[pb.AppendRequest], context: Context) -> pb.AppendResponse:
        total = 0
        async for message in request_iterator:
            total += len(message.content)
            if message.content:
                for relay in self._relays:
                    await relay.send(pb.ReplicateRequest(content=message.content))
        for relay in self._relays:
            await relay.send(pb.ReplicateRequest(acknowledge=True))
        for relay in self._relays:
            await relay.acknowledged()
        return pb.AppendResponse(commit=pb.Fragment(end=total))

    async def Replicate(
        self, request_iterator: AsyncIterator[pb.ReplicateRequest], context: Context
    ) -> AsyncIterator[pb.ReplicateResponse]:
        async for message in request_iterator:
            if message.acknowledge:
                yield pb.ReplicateResponse()

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.ReadResponse]:
        content = bytes(READ_CHUNK)
        for offset in range(0, request.end_offset, READ_CHUNK):
            yield pb.ReadResponse(offset=offset, content=content)


async def serve(relays: list[str]) -> None:
    server = grpc.aio.server(options=OPTIONS)
    pb_grpc.add_JournalServicer_to_server(BareJournal(relays), server)  # type: ignore[abstract]  # Others are not called.
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.stop(None)


@contextlib.contextmanager
def raw_server(relays: int = 0) -> Iterator[str]:
    """Yield the endpoint, `host:port`, of a bare server that lives as long as the block, with so many relays."""
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(raw_server()) for _ in range(relays)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.raw_grpc", *others],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ.copy(),
        )
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
            process.wait(10)
            process.stdout.close()


if __name__ == "__main__":
    keep_freed_memory()
    asyncio.run(serve(sys.argv[1:]))
