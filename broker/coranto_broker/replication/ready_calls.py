"""Open calls over frames to peers, for the next pipeline of a journal.

A pipeline begins over gRPC. If its appends are frequent, a frame connection is opened in the background to each peer
that supports frames, and then the pipeline is replaced. So no append waits for a connection, and journals with few
appends have no frame connections.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import grpc.aio
import structlog

from coranto.security.call_tokens import Metadata
from coranto.transport.calls import FrameCall, FrameDialer
from coranto.wire import protocol_pb2 as pb
from coranto.wire.frames_pb2 import FramePort

READY_SECONDS: Final = 10.0
"""The lifetime of a call that no pipeline takes."""

AGAIN_SECONDS: Final = 60.0
"""The minimum time between two attempts for the same journal, and after a failure for the same peer."""

_MAX_REMEMBERED: Final = 4096
_log = structlog.get_logger(__name__)
_Key = tuple[str, str]


class ReadyCalls:
    """Replicate calls over frames, by the peer's endpoint and the journal."""

    def __init__(self, dialer_of: Callable[[str], FrameDialer | None]) -> None:
        """`dialer_of` returns the dialer to an endpoint, or None if it does not support frames."""
        self._dialer_of = dialer_of
        self._ready: dict[_Key, tuple[FrameCall[Any], asyncio.TimerHandle, Callable[[], None]]] = {}
        self._again: OrderedDict[str | _Key, float] = OrderedDict()
        self._unreachable: set[str] = set()
        self._dialing: set[asyncio.Task[None]] = set()
        self._wanted: dict[_Key, Callable[[], None]] = {}  # The callbacks of calls that are being opened.

    def take(self, endpoint: str, journal: str) -> FrameCall[Any] | None:
        """Return an open call, which the caller then owns, or None."""
        found = self._ready.pop((endpoint, journal), None)
        if found is None:
            return None
        found[1].cancel()
        return found[0] if found[0].is_open else None

    def prepare(
        self, endpoint: str, journal: str, port: FramePort, metadata: Metadata | None, ready: Callable[[], None]
    ) -> None:
        """Open a call in the background, unless an attempt was recent.

        `ready` is called when no other call for the journal is being opened.
        """
        now, key = asyncio.get_running_loop().time(), (endpoint, journal)
        if now < max(self._again.get(endpoint, -math.inf), self._again.get(key, -math.inf)):
            return
        self._wait(key)
        dialer = self._dialer_of(endpoint)
        if dialer is not None:
            self._wanted[key] = ready
            task = asyncio.create_task(self._open(dialer, key, port, metadata), name=f"frames to {endpoint}")
            self._dialing.add(task)
            task.add_done_callback(self._dialing.discard)

    def replace_callback(self, endpoint: str, journal: str, ready: Callable[[], None]) -> None:
        """Replace the callback of `prepare`, if the call is still being opened."""
        if (endpoint, journal) in self._wanted:
            self._wanted[endpoint, journal] = ready

    async def close(self) -> None:
        """Close all calls that no pipeline has taken."""
        for task in self._dialing:
            task.cancel()
        await asyncio.gather(*self._dialing, return_exceptions=True)
        for key in list(self._ready):
            self._expire(key)

    async def _open(self, dialer: FrameDialer, key: _Key, port: FramePort, metadata: Metadata | None) -> None:
        endpoint = key[0]
        try:
            call = await dialer.open("Replicate", port, metadata, pb.ReplicateResponse.FromString)
        except grpc.aio.AioRpcError as error:
            self._wait(endpoint)
            if endpoint not in self._unreachable:
                self._unreachable.add(endpoint)
                _log.info("replication.frames_unreachable", endpoint=endpoint, port=port.port, reason=error.details())
        else:
            self._unreachable.discard(endpoint)
            self._expire(key)
            timer = asyncio.get_running_loop().call_later(READY_SECONDS, self._expire, key)
            self._ready[key] = call, timer, self._wanted[key]
        finally:
            del self._wanted[key]
        self._announce(key[1])

    def _announce(self, journal: str) -> None:
        """Call the callbacks of a journal's open calls, unless other calls for it are being opened.

        The next pipeline takes all open calls of a journal, so they are announced together.
        """
        if all(waiting != journal for _, waiting in self._wanted):
            for ready in [ready for key, (_, _, ready) in self._ready.items() if key[1] == journal]:
                ready()

    def _wait(self, about: str | _Key) -> None:
        """Prevent further attempts for AGAIN_SECONDS."""
        self._again[about] = asyncio.get_running_loop().time() + AGAIN_SECONDS
        self._again.move_to_end(about)
        while len(self._again) > _MAX_REMEMBERED:
            self._again.popitem(last=False)

    def _expire(self, key: _Key) -> None:
        found = self._ready.pop(key, None)
        if found is not None:
            found[1].cancel()
            found[0].cancel()
