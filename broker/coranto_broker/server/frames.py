"""The server of the frame transport: accepts connections, and serves one call on each.

Handlers are the same for frames and gRPC: `FrameContext` has the parts of gRPC's context that they use. Until a client
has opened a call with this broker's key, its connection may buffer little, and only for OPENING_SECONDS.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from coranto.effects import Entropy
from coranto.errors import InvalidInput
from coranto.security.tokens import HEADER
from coranto.transport.connection import READ_BYTES, FrameBudget, FrameConnection, FrameFault
from coranto.transport.frames import FrameKind
from coranto.wire.frames_pb2 import FrameEnd, FrameOpening, FramePort
from coranto_broker.server.frame_listener import AcceptedConnection, FrameListener

OPENING_SECONDS: Final = 10.0
"""The time limit for a connection's TLS handshake and opening together."""

MAX_CONNECTIONS: Final = 4096
"""The maximum number of connections. Refused clients continue to use gRPC."""

MAX_UNOPENED: Final = 256
"""The maximum number of connections that have not opened a call."""

MAX_HELD_BYTES: Final = 256 << 20
"""The maximum unread bytes over all connections of one method. Appends cannot starve replication this way."""

WRITE_BYTES: Final = 1 << 15
"""The unsent bytes of a connection above which its handler waits. Responses are small, and clients are many."""

LINGER_SECONDS: Final = 5.0
"""The time that a client has to close its connection after the call has ended."""

REFUSALS_SECONDS: Final = 10.0
"""The minimum time between two log entries of refusals."""

_REFUSED_SECONDS: Final = 0.05  # The pause after each refusal, so that a flood of connections waits in the kernel.
_FULL_SECONDS: Final = 0.5  # The pause before a failed accept is retried.
_log = structlog.get_logger(__name__)


class FrameRefusal(enum.StrEnum):
    """The reasons why the broker refuses or ends connections: label values of its metric."""

    TOO_MANY = "too many connections"
    NOT_OPENED = "not opened"
    NO_OPENING = "no opening"
    WRONG_KEY = "wrong key"
    UNKNOWN_METHOD = "unknown method"
    NO_FRAMES = "no frames"
    LATE = "late"
    HELD = "too many bytes"


_FAULTS: Final[Mapping[FrameFault, FrameRefusal]] = {
    FrameFault.NO_FRAMES: FrameRefusal.NO_FRAMES,
    FrameFault.LATE: FrameRefusal.LATE,
    FrameFault.HELD: FrameRefusal.HELD,
}
_STATUSES: Final[Mapping[FrameRefusal, grpc.StatusCode]] = {
    FrameRefusal.NO_OPENING: grpc.StatusCode.INVALID_ARGUMENT,
    FrameRefusal.WRONG_KEY: grpc.StatusCode.FAILED_PRECONDITION,
    FrameRefusal.UNKNOWN_METHOD: grpc.StatusCode.UNIMPLEMENTED,
}


@dataclass(frozen=True, slots=True)
class FrameMethod:
    """A method that is served over frames: the parser of its requests, and its handler, as for gRPC."""

    parse: Callable[[bytes], object]
    serve: Callable[[Any, Any], Awaitable[None]]


class _Ended(Exception):
    """The call's status has been sent."""


class FrameContext:
    """A call over frames, with the parts of gRPC's `ServicerContext` that handlers use."""

    can_write_now = True

    def __init__(self, connection: FrameConnection, opening: FrameOpening, parse: Callable[[bytes], object]) -> None:
        self._connection = connection
        self._parse = parse
        given = ((HEADER, opening.authorization), ("user-agent", opening.user_agent))
        self._metadata = tuple((name, value) for name, value in given if value)
        self._half_closed = False

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return self._connection.peer

    async def read(self) -> object:
        """Return the next message, or EOF after the last. Raises InvalidInput for other frames or a lost connection."""
        if self._half_closed:
            return grpc.aio.EOF
        frame = await self._connection.read()
        if frame is None:
            raise InvalidInput(self._connection.problem or "the connection was closed", field="frame")
        if frame.kind == FrameKind.MESSAGE:
            return self._parse(frame.payload)
        if frame.kind == FrameKind.END:
            self._half_closed = True
            return grpc.aio.EOF
        raise InvalidInput(f"a frame of kind {frame.kind} is not allowed within a call", field="frame")

    async def write(self, message: Message) -> None:
        await self._connection.write(FrameKind.MESSAGE, message.SerializeToString())

    def write_now(self, message: Message) -> bool:
        return self._connection.write_now(FrameKind.MESSAGE, message.SerializeToString())

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with a status."""
        end(self._connection, code, details)
        raise _Ended


def end(connection: FrameConnection, code: grpc.StatusCode, details: str = "") -> None:
    """Send a call's status, and close its connection."""
    connection.end(FrameEnd(code=code.value[0], details=details[:8000]).SerializeToString())


class FrameServer:
    """Listens for connections, and serves one call on each."""

    def __init__(
        self,
        methods: Mapping[str, FrameMethod],
        listener: FrameListener,
        *,
        max_message_bytes: int,
        entropy: Entropy = os.urandom,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """`read_bytes` bounds the unread bytes of a connection."""
        self._methods = methods
        self._listener = listener
        self._max_message_bytes = max_message_bytes
        self._read_bytes = read_bytes
        self._key = entropy(16)
        self._budgets = {name: FrameBudget(MAX_HELD_BYTES) for name in methods}
        self._unlogged = 0
        self._logged_at = -math.inf
        self._serving: set[asyncio.Task[None]] = set()
        self._under_way: Counter[str] = Counter()
        self._unopened = 0
        self._accepting: asyncio.Task[None] | None = None
        self.on_refusal: Callable[[str], None] = lambda reason: None
        """Called with the reason when a connection is refused, or is ended because its client is at fault."""

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._serving)

    @property
    def unopened(self) -> int:
        """The number of connections that have not opened a call."""
        return self._unopened

    def held(self, method: str) -> int:
        """Return the bytes that a method's connections have received and its handlers have not read."""
        return self._budgets[method].held

    def under_way(self, method: str) -> int:
        """Return the number of calls of a method in flight."""
        return self._under_way[method]

    def start(self) -> FramePort:
        """Start accepting connections, and return the port and its key for clients."""
        self._accepting = asyncio.create_task(self._accept(), name="accept frame connections")
        return FramePort(port=self._listener.port, key=self._key)

    async def stop(self, grace: float) -> None:
        """Stop accepting connections. Calls have `grace` seconds to end, and are then cancelled."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=grace)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                accepted = await self._listener.accept()
            except OSError as error:
                _log.warning("frames.accept_failed", error=str(error))
                await asyncio.sleep(_FULL_SECONDS)
                continue
            if len(self._serving) >= MAX_CONNECTIONS or self._unopened >= MAX_UNOPENED:
                self._note_refusal(FrameRefusal.TOO_MANY, "there are too many connections")
                accepted.close()  # Its client continues to use gRPC.
                await asyncio.sleep(_REFUSED_SECONDS)
                continue
            self._unopened += 1
            task = asyncio.create_task(self._serve(accepted))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, accepted: AcceptedConnection) -> None:
        """Serve a connection until its call has ended. If the connection is lost, the call is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        connection = FrameConnection(on_lost=task.cancel, read_bytes=self._read_bytes, write_bytes=WRITE_BYTES)
        try:
            try:
                call = await self._open(connection, accepted)
            finally:
                self._unopened -= 1
            if call is not None:
                name, method, called = call
                self._under_way[name] += 1
                try:
                    await self._run(connection, method, called)
                finally:
                    self._under_way[name] -= 1
            async with asyncio.timeout(LINGER_SECONDS):
                await connection.closed()
        except TimeoutError:
            return
        except Exception:  # noqa: BLE001  # The error ends only this connection.
            _log.exception("frames.call_failed", client=connection.peer)
        finally:
            if connection.fault is not None:
                self._note_refusal(_FAULTS[connection.fault], connection.problem or "", connection.peer)
            connection.abort("the call has ended")

    async def _open(
        self, connection: FrameConnection, accepted: AcceptedConnection
    ) -> tuple[str, FrameMethod, FrameContext] | None:
        """Wait for the handshake and the opening, and return the call. None if the client is refused or gone."""
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                await accepted.attach(connection)
                frame = await connection.read()
        except (OSError, TimeoutError) as error:  # The handshake failed, or no opening came in time.
            self._note_refusal(FrameRefusal.NOT_OPENED, f"it was not opened: {error or 'nothing came in time'}")
            return None
        if frame is None:
            return None
        try:
            opening = FrameOpening.FromString(frame.payload) if frame.kind == FrameKind.OPENING else None
        except DecodeError:
            opening = None
        method = self._methods.get(opening.method) if opening is not None else None
        if opening is None:
            self._refuse(connection, FrameRefusal.NO_OPENING, "the first frame must open a call")
        elif not hmac.compare_digest(opening.key, self._key):
            reason = "this is not the broker that announced this port"
            self._refuse(connection, FrameRefusal.WRONG_KEY, reason)
        elif method is None:
            reason = f"{opening.method[:80]!r} is not served over frames"
            self._refuse(connection, FrameRefusal.UNKNOWN_METHOD, reason)
        else:
            connection.opened(self._max_message_bytes, self._budgets[opening.method])
            await connection.write(FrameKind.OPENED, b"")
            return opening.method, method, FrameContext(connection, opening, method.parse)
        return None

    def _refuse(self, connection: FrameConnection, reason: FrameRefusal, words: str) -> None:
        end(connection, _STATUSES[reason], words)
        self._note_refusal(reason, words, connection.peer)

    def _note_refusal(self, reason: FrameRefusal, words: str, client: str = "") -> None:
        """Count a refused client. Log the reason and the refusals since the last entry, every REFUSALS_SECONDS."""
        self.on_refusal(reason)
        self._unlogged += 1
        now = asyncio.get_running_loop().time()
        if now >= self._logged_at + REFUSALS_SECONDS:
            _log.info("frames.refused", reason=words, client=client, refused=self._unlogged)
            self._unlogged, self._logged_at = 0, now

    async def _run(self, connection: FrameConnection, method: FrameMethod, context: FrameContext) -> None:
        try:
            await method.serve(None, context)
        except _Ended:
            return
        except Exception:  # noqa: BLE001  # The error ends only this call.
            _log.exception("frames.call_failed", client=context.peer())
            end(connection, grpc.StatusCode.UNKNOWN, "the broker failed; its log says why")
            return
        end(connection, grpc.StatusCode.OK)
