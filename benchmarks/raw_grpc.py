"""The floor of the append benchmarks: a bare `grpc.aio` server, in a process of its own, that takes the very messages
of an Append stream, does nothing with them but count their bytes, and answers once. Same wire messages, same
serialisation, no journal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import grpc

from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc


class CountingJournal(pb_grpc.JournalServicer):
    async def Append(
        self, request_iterator: AsyncIterator[pb.AppendRequest], context: grpc.aio.ServicerContext[object, object]
    ) -> pb.AppendResponse:
        total = 0
        async for message in request_iterator:
            total += len(message.content)
        return pb.AppendResponse(commit=pb.Fragment(end=total))


async def serve() -> None:
    server = grpc.aio.server()
    pb_grpc.add_JournalServicer_to_server(CountingJournal(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.stop(None)


@contextlib.contextmanager
def raw_server() -> Iterator[str]:
    """Yield the endpoint, `host:port`, of a counting server that lives as long as the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.raw_grpc"], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(serve())
