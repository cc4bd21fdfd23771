"""The stream of appends to one broker: opened over gRPC, then moved to frames if the broker serves them.

A connection for frames is opened in the background. Appends move to it when the gRPC stream has answered everything,
which keeps their order. If frames cannot be used, appends stay on gRPC, and frames are tried again later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from coranto.client.append.stream import AppendStream
from coranto.client.call_ends import CALL_ENDED
from coranto.client.peer_status import PeerStatus
from coranto.security.call_tokens import Metadata
from coranto.transport.calls import CONNECT_SECONDS, FrameDialer, GrpcCall, rpc_error
from coranto.wire import append_stream_pb2_grpc as stream_grpc
from coranto.wire.append_stream_pb2 import AppendAnswers, AppendBatch
from coranto.wire.frames_pb2 import FramePort

LACKING_SECONDS: Final = 300.0
"""The time after which a broker without streams is tried again, since it may have been upgraded."""

FRAMES_AGAIN_SECONDS: Final = 60.0
"""The minimum time between two attempts to move to frames."""

HANDOVER_SECONDS: Final = 0.25
"""The longest time that new appends wait for earlier ones before a move to frames."""

_log = structlog.get_logger(__name__)


class AppendStreams:
    """The stream to one broker: opened when it is first needed, and again after it has ended."""

    def __init__(self, stub: Callable[[], stream_grpc.AppendsAsyncStub], dialer: FrameDialer | None = None) -> None:
        """Without `dialer` the stream stays on gRPC."""
        self._stub = stub
        self._dialer = dialer
        self._stream: AppendStream | None = None
        self._lock = asyncio.Lock()
        self._lacking_until = -math.inf
        self._port: FramePort | None = None  # The broker's port for frames, while the stream is over gRPC.
        self._framed: AppendStream | None = None  # Open, and not yet in use.
        self._frames_at = -math.inf
        self._dialing: asyncio.Task[None] | None = None
        self._logged = False
        self._moved = False

    @property
    def may_serve(self) -> bool:
        """False if the broker is known to serve no streams."""
        return _now() >= self._lacking_until

    @property
    def over_frames(self) -> bool:
        """True if appends go over frames now."""
        return self._moved and self._stream is not None and self._stream.is_open

    async def get(self, metadata: Metadata | None) -> AppendStream | None:
        """Return an open stream, or None if the broker serves none. `metadata` authorizes the call that opens it.

        Raises AioRpcError when no stream can be opened; nothing was sent then.
        """
        async with self._lock:  # Serves callers in order, which keeps the order of their appends.
            if self._port is not None:
                await self._move(self._port, metadata)
            if self._stream is None or not self._stream.is_open:
                self._stream = await self._open(metadata) if self.may_serve else None
            return self._stream

    def renew(self) -> None:
        """Make later appends open another stream. In-flight appends continue."""
        self._port = None
        if self._dialing is not None:
            self._dialing.cancel()
        for stream in (self._stream, self._framed):
            if stream is not None:
                stream.finish()
        self._framed = None

    async def close(self) -> None:
        """End the stream."""
        self._port = None
        if self._dialing is not None:
            self._dialing.cancel()
            await asyncio.gather(self._dialing, return_exceptions=True)
        await asyncio.gather(*(stream.close() for stream in (self._stream, self._framed) if stream is not None))

    async def _open(self, metadata: Metadata | None) -> AppendStream | None:
        self._moved = False
        call: Any = self._stub().AppendStream(metadata=metadata)
        ending = PeerStatus(call)
        try:
            await call.write(AppendBatch())
            first = await call.read()
        except CALL_ENDED as error:
            # Only the call's own status is reliable.
            refused = await ending.error_of(rpc_error(await call.code(), await call.details()))
            if refused.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise refused from error
            self._lacking_until = _now() + LACKING_SECONDS
            return None
        except BaseException:
            call.cancel()
            raise
        _require_served(call, first)
        self._port = first.frames if self._dialer is not None and first.HasField("frames") else None
        if self._port is not None:
            self._dial_soon(self._port, metadata)
        return AppendStream(GrpcCall(call))

    # -- Frames --------------------------------------------------------------------------------------------------------

    async def _move(self, port: FramePort, metadata: Metadata | None) -> None:
        """Move to the stream over frames if it is open; otherwise begin to open it."""
        framed = self._framed
        if framed is None or not framed.is_open:
            self._framed = None
            self._dial_soon(port, metadata)
            return
        if _now() < self._frames_at:
            return
        self._frames_at = _now() + FRAMES_AGAIN_SECONDS
        former = self._stream
        if former is not None:
            if not await former.is_idle_within(HANDOVER_SECONDS):
                return
            former.finish()
        self._stream, self._framed, self._port, self._moved = framed, None, None, True

    def _dial_soon(self, port: FramePort, metadata: Metadata | None) -> None:
        """Start to connect in the background, unless an attempt is running or was recent."""
        if self._dialing is None and self._framed is None and _now() >= self._frames_at:
            self._dialing = asyncio.create_task(self._dial(port, metadata), name="connect for frames")

    async def _dial(self, port: FramePort, metadata: Metadata | None) -> None:
        assert self._dialer is not None
        try:
            async with asyncio.timeout(2 * CONNECT_SECONDS):
                self._framed = await _opened(self._dialer, port, metadata)
            self._logged = False
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            self._frames_at = _now() + FRAMES_AGAIN_SECONDS
            if not self._logged:
                self._logged = True
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer came in time"
                _log.info("client.frames_unreachable", host=self._dialer.host, port=port.port, reason=reason)
        finally:
            self._dialing = None


async def _opened(dialer: FrameDialer, port: FramePort, metadata: Metadata | None) -> AppendStream:
    call: Any = await dialer.open("AppendStream", port, metadata, AppendAnswers.FromString)
    try:
        await call.write(AppendBatch())
        _require_served(call, await call.read())
    except BaseException:
        call.cancel()
        raise
    return AppendStream(call)


def _require_served(call: Any, first: Any) -> None:
    """Check the first answer of a stream. Raises AioRpcError if the broker accepts no appends."""
    if first is grpc.aio.EOF or first.closing:
        call.cancel()
        raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the broker is about to exit, and accepts no more appends")


def _now() -> float:
    return asyncio.get_running_loop().time()
