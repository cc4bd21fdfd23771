"""Appends that a broker refuses while the client still sends: the client gets the broker's status."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest

from coranto.client import JournalClient
from coranto.client.peer_status import PeerStatus
from coranto.errors import Unavailable

REASON = "4 appends under way; nothing of this one was applied"
REFUSING_BROKER = f"""
import asyncio, grpc
from coranto.wire import protocol_pb2_grpc as pb_grpc

class Broker(pb_grpc.JournalServicer):
    async def Append(self, messages, context):
        await context.abort(grpc.StatusCode.ABORTED, {REASON!r})

async def serve():
    server = grpc.aio.server()
    pb_grpc.add_JournalServicer_to_server(Broker(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(serve())
"""


@pytest.fixture
def refusing_broker() -> Iterator[str]:
    """The endpoint of a broker in a separate process, which refuses each append before it reads anything."""
    with subprocess.Popen([sys.executable, "-c", REFUSING_BROKER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.integration
async def test_an_append_refused_early_never_has_an_unknown_outcome(refusing_broker: str) -> None:
    found: Counter[str] = Counter()
    async with JournalClient(refusing_broker) as client:
        for size in (1, 2 << 20):
            for _ in range(200):
                with pytest.raises(Exception) as refused:  # noqa: PT011 (Any, since each is counted.)
                    await client.append("test/journal", b"x" * size, retry_timeout=1e-9)
                found[f"{type(refused.value).__name__}: {REASON in str(refused.value)}"] += 1
    assert found == {f"{Unavailable.__name__}: True": 400}


@pytest.mark.integration
async def test_the_first_append_detects_a_broker_without_append_streams(refusing_broker: str) -> None:
    others = []
    for _ in range(200):  # Each client opens a stream, which the broker ends while the client still sends.
        async with JournalClient(refusing_broker) as client:
            with pytest.raises(Unavailable) as refused:
                await client.append("test/journal", b"x", retry_timeout=0.0)
            if REASON not in str(refused.value):
                others.append(str(refused.value))
    # On a busy machine, gRPC itself may break a connection. That is Unavailable as well, and nothing was applied.
    assert len(others) <= 2, others


class _Call:
    """A call with a status set by the test, in the way of gRPC."""

    def __init__(self) -> None:
        self._status = (grpc.StatusCode.OK, "")
        self._callbacks: list[object] = []

    def add_done_callback(self, callback: object) -> None:
        self._callbacks.append(callback)

    def end(self, code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
        self._status = (code, details)
        for callback in self._callbacks:
            callback(self)  # type: ignore[operator]
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    async def code(self) -> grpc.StatusCode:
        return self._status[0]

    async def details(self) -> str:
        return self._status[1]


INTERNAL = (grpc.StatusCode.INTERNAL, "Internal error from Core")


async def test_a_status_before_or_after_the_error_of_sending_is_raised() -> None:
    before = _Call()
    status = PeerStatus(before)  # type: ignore[arg-type]
    before.end(grpc.StatusCode.ABORTED, REASON)
    found = await status.error_of(before.end(*INTERNAL))
    assert (found.code(), found.details()) == (grpc.StatusCode.ABORTED, REASON)

    after = _Call()
    status = PeerStatus(after)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(status.error_of(after.end(*INTERNAL)))
    await asyncio.sleep(0)
    assert not waiting.done()
    after.end(grpc.StatusCode.PERMISSION_DENIED, "no")
    assert (await waiting).code() is grpc.StatusCode.PERMISSION_DENIED


async def test_without_a_status_of_the_broker_the_error_of_sending_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto.client.peer_status.MAX_SECONDS", 0.01)
    call = _Call()
    status = PeerStatus(call)  # type: ignore[arg-type]
    error = call.end(*INTERNAL)
    assert await status.error_of(error) is error
    other = call.end(grpc.StatusCode.UNAVAILABLE, "connection lost")
    assert await status.error_of(other) is other
