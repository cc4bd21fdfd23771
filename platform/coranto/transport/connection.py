"""One connection that carries frames in order, with backpressure in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from coranto.transport.frames import PREFACE, Frame, FrameDecoder, FrameError, FrameKind, encode_frame
from coranto.wire.frames_pb2 import FrameEnd

OPENING_BYTES: Final = 1 << 16
"""The maximum size in bytes of a frame before the call is opened. Most of it is the token."""

READ_BYTES: Final = 1 << 20
"""The number of unread bytes after which a connection pauses receiving."""

FRAME_BYTES: Final = 128
"""The bytes that each received frame counts in addition to its payload, to limit empty frames."""

FRAME_SECONDS: Final = 60.0
"""The minimum time for an opened call to receive the rest of a frame."""

WRITE_BYTES: Final = 1 << 20
"""The number of unsent bytes after which `write` waits."""

MAX_SIGNS: Final = 16
"""The maximum number of pings and pongs in one received piece. A client sends one ping per minute."""

SILENT_SECONDS: Final = 60.0
"""The time without data from the peer before a ping, and again before the connection is closed."""

_SIGNS: Final = (FrameKind.PING, FrameKind.PONG)
_INVALID: Final = 3  # gRPC's INVALID_ARGUMENT
_GONE_MILLISECONDS: Final = 120_000
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class FrameFault(enum.Enum):
    """The faults of the peer of a connection."""

    NO_FRAMES = "its bytes are not frames, or the frames are too long or too many"
    LATE = "it began a frame and did not complete it"
    HELD = "the connections of the server hold too many unread bytes, this one included"


class FrameConnection(asyncio.Protocol):
    """A connection, from either side. Only one task at a time may be in `read`, and one in `write`."""

    def __init__(
        self,
        *,
        limit: int | None = None,
        on_lost: Callable[[], object] | None = None,
        read_bytes: int = READ_BYTES,
        write_bytes: int | None = None,
    ) -> None:
        """Create a connection. Without a `limit`, only one frame of OPENING_BYTES is accepted until `opened`.

        `limit` is the maximum payload of a frame. `on_lost` is called when the connection is lost. Receiving pauses
        after `read_bytes` unread bytes, and `write` waits after `write_bytes` (by default WRITE_BYTES) unsent bytes.
        """
        self._read_bytes = read_bytes
        self._write_bytes = WRITE_BYTES if write_bytes is None else write_bytes
        self._decoder = FrameDecoder(OPENING_BYTES, most=1) if limit is None else FrameDecoder(limit)
        self._opened = limit is not None
        self._on_lost = on_lost
        self._budget: FrameBudget | None = None
        self._held = 0
        self._transport: asyncio.Transport | None = None
        self._frames: deque[Frame] = deque()
        self._unread = 0
        self._reading_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._on_ready: Callable[[], object] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._watch: asyncio.TimerHandle | None = None
        self._has_received = True
        self._overdue = False  # A frame was incomplete at the last check, and no frame was completed since.
        self._ends = False
        self._lost = asyncio.Event()
        self.problem: str | None = None
        """The reason for the end of receiving; None while the connection is open."""
        self.fault: FrameFault | None = None
        """The fault of the peer that ended the connection, if any."""

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._write_bytes)
        _prepare(self._transport.get_extra_info("socket"))
        self._transport.write(PREFACE)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        if self._ends:
            return
        try:
            self._take(self._decoder.feed(data))
        except FrameError as error:
            self.problem, self.fault = str(error), FrameFault.NO_FRAMES
            self.end(FrameEnd(code=_INVALID, details=self.problem).SerializeToString())
            self._wake()
            return
        if self._budget is not None:
            self._account()
        if self._unread > self._read_bytes and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
        if self._frames:
            self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.problem = self.problem or (f"the connection broke: {exc}" if exc else "the connection was closed")
        if self._watch is not None:
            self._watch.cancel()
        self._lost.set()
        self._account()
        if self._on_lost is not None:
            self._on_lost()
        self._writable.set()
        self._wake()

    # -- Use -----------------------------------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """The address of the peer, as gRPC writes it."""
        found: Any = self._transport.get_extra_info("peername") if self._transport is not None else None
        if not found:
            return "unknown"
        return f"ipv6:[{found[0]}]:{found[1]}" if ":" in found[0] else f"ipv4:{found[0]}:{found[1]}"

    @property
    def protocol(self) -> str | None:
        """The protocol that TLS negotiated (ALPN); None without TLS."""
        tls: Any = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        return tls.selected_alpn_protocol() if tls is not None else None

    def opened(self, limit: int, budget: FrameBudget) -> None:
        """Accept any number of frames of up to `limit` bytes. `budget` limits the held bytes of all connections."""
        self._opened = True
        self._decoder.limit, self._decoder.most = limit, math.inf
        self._budget = budget
        self._account()
        if not self._lost.is_set():
            self._watch = asyncio.get_running_loop().call_later(FRAME_SECONDS, self._check_progress)

    def watch(self) -> None:
        """Ping the peer while it is silent, and close the connection if it stays silent."""
        self._has_received = False
        self._watch = asyncio.get_running_loop().call_later(SILENT_SECONDS, self._check_silence, False)

    async def read(self) -> Frame | None:
        """Return the next frame, or None once the connection is lost and all frames have been read."""
        while (frame := self.take()) is None:
            if self.problem is not None:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return frame

    def when_ready(self, ready: Callable[[], object]) -> None:
        """Call `ready` whenever frames can be taken or the connection is lost. No task may then `read`."""
        self._on_ready = ready
        if self._frames or self.problem is not None:
            ready()

    def take(self) -> Frame | None:
        """Return the next received frame, or None."""
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self._unread = max(0, self._unread - len(frame.payload) - FRAME_BYTES)
        if self._reading_paused and self._unread <= self._read_bytes // 2:
            self._reading_paused = self._overdue = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        if self._budget is not None:
            self._account()
        return frame

    async def write(self, kind: FrameKind, payload: bytes) -> bool:
        """Send a frame, and wait while the peer is slow. Returns False if the connection is lost."""
        if self.problem is not None or self._ends:
            return False
        self._send(kind, payload)
        if not self._writable.is_set():
            await self._writable.wait()
        return True

    def write_now(self, kind: FrameKind, payload: bytes) -> bool:
        """Send a frame and return True, or return False if sending would block. No task may be in `write`."""
        if self.problem is not None or self._ends or not self._writable.is_set():
            return False
        self._send(kind, payload)
        return True

    def end(self, payload: bytes) -> None:
        """Send the last frame, and ignore further input until the peer closes the connection.

        If this side closed the connection while input arrives, the kernel could discard sent bytes.
        """
        if not self._ends and self._transport is not None and not self._transport.is_closing():
            self._send(FrameKind.END, payload)
            if self._reading_paused:
                self._reading_paused = False
                self._transport.resume_reading()
        self._ends = True

    async def closed(self) -> None:
        """Wait until the connection is lost."""
        await self._lost.wait()

    def abort(self, problem: str) -> None:
        """Close the connection immediately. `problem` is the reason that readers get."""
        self._break(problem)

    # -- Internals -----------------------------------------------------------------------------------------------------

    def _take(self, frames: list[Frame]) -> None:
        """Queue frames for `read`, and answer pings. Raises FrameError for too many pings and pongs."""
        if frames:
            self._overdue = False
        signs = ping_sent = 0
        for frame in frames:
            if self._opened and frame.kind in _SIGNS:
                signs += 1
                ping_sent += frame.kind == FrameKind.PING
            else:
                self._frames.append(frame)
                self._unread += len(frame.payload) + FRAME_BYTES
        if signs > MAX_SIGNS:
            raise FrameError(f"{signs} pings and pongs arrived together, which are more than {MAX_SIGNS}")
        # A peer that does not read its pongs gets no more of them.
        if ping_sent and self._writable.is_set():
            self._send(FrameKind.PONG, b"")

    def _send(self, kind: FrameKind, payload: bytes) -> None:
        assert self._transport is not None
        for piece in encode_frame(kind, payload):
            self._transport.write(piece)

    def _break(self, problem: str) -> None:
        is_known = self.problem is not None
        self.problem = self.problem or problem
        self._ends = True
        if self._transport is not None:
            self._transport.abort()
        if not is_known:  # `_wake` may call this again.
            self._wake()

    def _wake(self) -> None:
        if self._on_ready is not None:
            self._on_ready()
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _check_silence(self, ping_sent: bool) -> None:
        if self.problem is not None:
            return
        if not self._has_received and ping_sent:
            self._break(f"the other side was silent for {2 * SILENT_SECONDS:.0f} s")
            return
        is_ping_due = not self._has_received
        if is_ping_due:
            self._send(FrameKind.PING, b"")
        self._has_received = False
        self._watch = asyncio.get_running_loop().call_later(SILENT_SECONDS, self._check_silence, is_ping_due)

    def _check_progress(self) -> None:
        """Close the connection if a frame has been incomplete since the last check."""
        begun = self._decoder.held > 0 and not self._reading_paused
        if begun and self._overdue:
            self._refuse(FrameFault.LATE, f"the rest of a frame did not arrive within {FRAME_SECONDS:.0f} s")
            return
        self._overdue = begun
        self._watch = asyncio.get_running_loop().call_later(FRAME_SECONDS, self._check_progress)

    def _refuse(self, fault: FrameFault, problem: str) -> None:
        self.fault = self.fault or fault
        self._break(problem)

    def _account(self) -> None:
        """Update the budget, and end the connection if it exceeds the budget."""
        if self._budget is None:
            return
        held = 0 if self._lost.is_set() else self._decoder.held + self._unread
        self._budget.held += held - self._held
        self._held = held
        if held > OPENING_BYTES and self._budget.held > self._budget.most:
            self._refuse(FrameFault.HELD, "the connections hold too many unread bytes")


class FrameBudget:
    """The total bytes that the connections of a server hold, and their limit."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0


def _prepare(connected: Any) -> None:
    """Set the socket to send small frames immediately, and to detect lost peers."""
    if not isinstance(connected, socket.socket) and not hasattr(connected, "setsockopt"):
        return
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _GONE_MILLISECONDS)):
        if hasattr(socket, name):  # Depends on the system.
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for level, option, value in options:
        with contextlib.suppress(OSError):  # The connection works without them.
            connected.setsockopt(level, option, value)
