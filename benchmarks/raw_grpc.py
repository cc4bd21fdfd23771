"""Floors: bare `grpc.aio` servers in separate processes that only transfer the messages of the journals' RPCs.

They use the same wire messages and the same serialisation, but no journal.

`Append` counts the bytes of its messages and answers once. With relays it first forwards each message to them, over one
long-lived `Replicate` stream for all appends, as brokers do, and awaits their answers. A *storing* server also hashes
all content and writes it to a file, as every broker must, in a second thread. `Read` sends the requested bytes in
chunks from memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from coranto.process.memory import keep_freed_memory
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
READ_CHUNK = 1 << 20
STORING = "--storing"
STORED_AHEAD = 8
"""The number of messages that may wait to be hashed and written."""
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
        """Wait for the answer to a message that requested an acknowledgement."""
        async with self._turn:
            await self._call.read()


class BareJournal(pb_grpc.JournalServicer):
    def __init__(self, relays: list[str], *, storing: bool = False) -> None:
        self._relays = [Relay(endpoint) for endpoint in relays]
        self._storing = storing
        self._thread = ThreadPoolExecutor(1)

    async def _store(self, messages: AsyncIterator[pb.AppendRequest]) -> pb.AppendResponse:
        digest, total = hashlib.sha1(usedforsecurity=False), 0
        loop = asyncio.get_running_loop()
        slots = asyncio.Semaphore(STORED_AHEAD)
        with tempfile.TemporaryFile() as file:

            def store(content: bytes, offset: int) -> None:
                digest.update(content)
                os.pwrite(file.fileno(), content, offset)
                loop.call_soon_threadsafe(slots.release)

            async for message in messages:
                content = message.content
                await slots.acquire()
                self._thread.submit(store, content, total)
                total += len(content)
            await loop.run_in_executor(self._thread, digest.digest)
        return pb.AppendResponse(commit=pb.Fragment(end=total))

    async def Append(self, request_iterator: AsyncIterator[pb.AppendRequest], context: Context) -> pb.AppendResponse:
        if self._storing:
            return await self._store(request_iterator)
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


async def serve(arguments: list[str]) -> None:
    storing = STORING in arguments
    relays = [each for each in arguments if each != STORING]
    server = grpc.aio.server(options=OPTIONS)
    journal = BareJournal(relays, storing=storing)  # type: ignore[abstract]  # Other methods are not called.
    pb_grpc.add_JournalServicer_to_server(journal, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.stop(None)


@contextlib.contextmanager
def raw_server(relays: int = 0, *, storing: bool = False) -> Iterator[str]:
    """Yield the endpoint, `host:port`, of a bare server with `relays` relays. The server stops with the block."""
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(raw_server()) for _ in range(relays)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.raw_grpc", *others, *([STORING] if storing else [])],
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
