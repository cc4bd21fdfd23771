"""Bidirectional calls over frames or over gRPC, with one interface (`MessageCall`)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from coranto.errors import InvalidInput
from coranto.security.call_tokens import Metadata
from coranto.security.certificates import Reloaded, client_context
from coranto.security.tls import ClientTls
from coranto.security.tokens import HEADER
from coranto.transport.connection import READ_BYTES, FrameConnection
from coranto.transport.frames import Frame, FrameKind
from coranto.wire.frames_pb2 import FrameEnd, FrameOpening, FramePort

PROTOCOL: Final = "coranto-frames"
"""The ALPN name of frames."""

MAX_FRAME_BYTES: Final = 16 << 20
"""The maximum size in bytes of a frame that a client accepts, as with gRPC."""

CONNECT_SECONDS: Final = 5.0
"""The timeout for connecting, including the TLS handshake and the opening of a call."""

Connect = Callable[[asyncio.Protocol, str, int, ssl.SSLContext | None], Awaitable[None]]
"""Connects to a host and port, with TLS if a context is given, and attaches a protocol. Raises OSError."""

MessageT = TypeVar("MessageT", bound=Message)
ReceivedT_co = TypeVar("ReceivedT_co", bound=Message, covariant=True)
Receive = Callable[[MessageT], object]
Ended = Callable[[grpc.aio.AioRpcError | None], object]
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class MessageCall(Protocol[ReceivedT_co]):
    """A call in progress. Raises the errors of gRPC's calls: AioRpcError with the broker's status, or UNAVAILABLE."""

    @property
    def can_write_now(self) -> bool:
        """True if `write_now` is implemented."""
        ...

    def write_now(self, message: bytes) -> bool:
        """Send an encoded message and return True, or return False if sending would block or the call has ended.

        No task may be in `write`. For a call that has ended, `write` raises the status.
        """
        ...

    def receive(self, each: Callable[[ReceivedT_co], object], ended: Ended) -> None:
        """Call `each` with every received message, and `ended` once with the call's status.

        The status is None if the broker ended the call without an error. Neither function may raise.
        """
        ...

    async def write(self, message: Message) -> None:
        """Send a message, and wait until flow control accepts more."""
        ...

    async def done_writing(self) -> None:
        """Half-close the call."""
        ...

    def cancel(self) -> None:
        """Cancel the call. The broker drops messages that it has not begun to process."""
        ...


class GrpcCall(Generic[MessageT]):
    """A call over gRPC: a `MessageCall`."""

    can_write_now = False

    def __init__(self, call: Any) -> None:
        self._call = call
        self._receiving: asyncio.Task[None] | None = None
        self.write = call.write
        self.done_writing = call.done_writing

    def write_now(self, message: bytes) -> bool:
        return False

    def receive(self, each: Receive[MessageT], ended: Ended) -> None:
        self._receiving = asyncio.create_task(self._receive(each, ended), name="receive over gRPC")

    async def _receive(self, each: Receive[MessageT], ended: Ended) -> None:
        status: grpc.aio.AioRpcError | None = None
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                each(message)
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                status = rpc_error(code, await self._call.details())
        except grpc.aio.AioRpcError as error:
            status = error
        except asyncio.InvalidStateError as error:
            status = rpc_error(grpc.StatusCode.UNAVAILABLE, str(error))
        except asyncio.CancelledError:
            status = rpc_error(grpc.StatusCode.CANCELLED, "the call was cancelled")
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        finally:
            ended(status)

    def cancel(self) -> None:
        self._call.cancel()
        if self._receiving is not None:
            self._receiving.cancel()


class FrameCall(Generic[MessageT]):
    """A call over frames: a `MessageCall`, whose messages may also be read one by one."""

    can_write_now = True

    def __init__(self, connection: FrameConnection, parse: Callable[[bytes], MessageT], begun: float) -> None:
        """`begun` is the event loop's time when the call's token was sent."""
        self.begun = begun
        self._connection = connection
        self._parse = parse
        self._ended: grpc.aio.AioRpcError | None = None
        self._over = False
        self._delivering = self._cancelled = False
        self._each: Callable[[MessageT], object] | None = None
        self._on_end: Callable[[grpc.aio.AioRpcError | None], object] | None = None

    def write_now(self, message: bytes) -> bool:
        return self._connection.write_now(FrameKind.MESSAGE, message)

    def receive(self, each: Receive[MessageT], ended: Ended) -> None:
        self._each, self._on_end = each, ended
        self._connection.when_ready(self._deliver_all)

    def _deliver_all(self) -> None:
        """Deliver all received frames; for a cancelled call, only its end."""
        if self._delivering:
            return  # Reentered: a delivered message has cancelled or ended the call.
        self._delivering = True
        try:
            while self._each is not None:
                frame = None if self._cancelled else self._connection.take()
                if frame is None and self._connection.problem is None:
                    return
                self._deliver(frame, self._each)
        finally:
            self._delivering = False

    def _deliver(self, frame: Frame | None, each: Callable[[MessageT], object]) -> None:
        try:
            message = self._content(frame, FrameKind.MESSAGE)
        except grpc.aio.AioRpcError as error:
            self._end_receiving(error)
            return
        if message is grpc.aio.EOF:
            self._end_receiving(None)
        else:
            each(message)

    def _end_receiving(self, status: grpc.aio.AioRpcError | None) -> None:
        ended, self._each, self._on_end = self._on_end, None, None
        if ended is not None:
            ended(status)

    async def write(self, message: Message) -> None:
        if not await self._connection.write(FrameKind.MESSAGE, message.SerializeToString()):
            raise self._lost()

    async def done_writing(self) -> None:
        if not await self._connection.write(FrameKind.END, b""):
            raise self._lost()

    @property
    def is_open(self) -> bool:
        """True while the call has not ended."""
        return self._ended is None and not self._over and self._connection.problem is None

    async def opened(self) -> None:
        """Wait until the broker has accepted the call. Raises the broker's status if it rejects the call."""
        await self._next(FrameKind.OPENED)

    async def read(self) -> Any:
        """Return the next message, or `grpc.aio.EOF` after the broker ended the call without an error."""
        if self._over:
            return grpc.aio.EOF
        if self._ended is not None:
            raise self._ended
        return await self._next(FrameKind.MESSAGE)

    async def _next(self, kind: FrameKind) -> Any:
        """Return the content of the next frame, which must have this kind, or EOF. Raises the call's status."""
        return self._content(await self._connection.read(), kind)

    def _content(self, frame: Frame | None, kind: FrameKind) -> Any:
        """Return the content of a frame, which must have this kind, or EOF. None means a lost connection."""
        if frame is None:
            self._ended = self._lost()
            raise self._ended
        try:
            if frame.kind == kind:
                return self._parse(frame.payload) if kind == FrameKind.MESSAGE else None
            if frame.kind == FrameKind.END:
                return self._end(FrameEnd.FromString(frame.payload))
        except DecodeError:
            pass
        problem = f"the broker sent an invalid frame of kind {frame.kind}"
        self._ended = rpc_error(grpc.StatusCode.INTERNAL, problem)
        self._connection.abort(problem)
        raise self._ended

    def cancel(self) -> None:
        self._cancelled = True
        self._connection.abort("the call was cancelled")

    async def code(self) -> grpc.StatusCode:
        """Return the status code of a call that has ended."""
        return grpc.StatusCode.OK if self._over else self._lost().code()

    async def details(self) -> str:
        """Return the details of the status of a call that has ended."""
        return "" if self._over else self._lost().details() or ""

    def _end(self, end: FrameEnd) -> Any:
        self._connection.abort("the call has ended")
        if end.code:
            self._ended = rpc_error(_CODES.get(end.code, grpc.StatusCode.UNKNOWN), end.details)
            raise self._ended
        self._over = True
        return grpc.aio.EOF

    def _lost(self) -> grpc.aio.AioRpcError:
        """Return the error of a call whose connection is lost. Frames that were received before stay readable."""
        if self._ended is not None:
            return self._ended
        problem = self._connection.problem or "the call has ended"
        self._connection.abort(problem)
        return rpc_error(grpc.StatusCode.UNAVAILABLE, problem)


class FrameDialer:
    """Opens calls over frames to the host of one endpoint."""

    def __init__(
        self,
        host: str,
        tls: ClientTls | None,
        user_agent: str = "",
        *,
        connect: Connect | None = None,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """`tls` has the certificates of the endpoint's gRPC connection, or is None without TLS.

        By default, `connect` connects by TCP. `read_bytes` limits the unread received bytes of a connection.
        """
        self.host = host
        self._tls = tls
        self._user_agent = user_agent
        self._connect_to = connect or connect_by_tcp
        self._read_bytes = read_bytes
        self._contexts: Reloaded[ssl.SSLContext] | None = None

    async def open(
        self, method: str, port: FramePort, metadata: Metadata | None, parse: Callable[[bytes], MessageT]
    ) -> FrameCall[MessageT]:
        """Connect to a broker's `port`, and open a call. The call's method may still reject it later.

        Raises AioRpcError with the broker's status, or with UNAVAILABLE without a response within CONNECT_SECONDS.
        """
        opening = FrameOpening(method=method, key=port.key, user_agent=self._user_agent)
        opening.authorization = next((value for name, value in metadata or () if name == HEADER), "")
        connection: FrameConnection | None = None
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection = await self._connect(port.port)
                await connection.write(FrameKind.OPENING, opening.SerializeToString())
                call = FrameCall(connection, parse, begun)
                await call.opened()
        except TimeoutError:
            if connection is not None:
                connection.abort("there was no answer")
            reason = f"no answer within {CONNECT_SECONDS:.0f} s"
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, f"{self.host} port {port.port}: {reason}") from None
        except (OSError, ValueError, OverflowError, InvalidInput) as error:  # Also raised for an invalid port or host.
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, f"{self.host} port {port.port}: {error}") from error
        except asyncio.CancelledError:
            if connection is not None:
                connection.abort("the call was cancelled")
            raise
        connection.watch()
        return call

    async def _connect(self, port: int) -> FrameConnection:
        connection = FrameConnection(limit=MAX_FRAME_BYTES, read_bytes=self._read_bytes)
        await self._connect_to(connection, self.host, port, self._context())
        if self._tls is not None and connection.protocol != PROTOCOL:
            connection.abort("another protocol is served there")
            raise OSError("another protocol is served there")
        return connection

    def _context(self) -> ssl.SSLContext | None:
        tls = self._tls
        if tls is None:
            return None
        if self._contexts is None:
            self._contexts = Reloaded(lambda: client_context(tls, PROTOCOL), (tls.ca, tls.cert, tls.key))
        return self._contexts.get()


async def connect_by_tcp(protocol: asyncio.Protocol, host: str, port: int, tls: ssl.SSLContext | None) -> None:
    """Connect by TCP: a `Connect`."""
    await asyncio.get_running_loop().create_connection(lambda: protocol, host, port, ssl=tls)


def rpc_error(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    """Return the error of a call that ended with a status, as gRPC raises it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
