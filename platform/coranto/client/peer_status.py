"""The status of a call that its peer ends while this side still sends.

Sending then fails, and grpc.aio may replace the peer's status by its own error. Only the peer's status shows whether
the call was refused, so that nothing was applied.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from coranto.transport.calls import rpc_error

MAX_SECONDS: Final = 5.0
"""The longest wait for a peer's status, which is in transit when sending fails."""

_OF_GRPC: Final = (grpc.StatusCode.INTERNAL, "Internal error from Core")
T = TypeVar("T")


class PeerStatus:
    """The status that the peer ends a call with, even if grpc.aio replaces it."""

    def __init__(self, call: grpc.aio.Call) -> None:
        """Watch a call that has just begun."""
        self._status: grpc.aio.AioRpcError | None = None
        self._arrived: asyncio.Event | None = None
        call.add_done_callback(self._ended)

    async def error_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Return the peer's error of a call that failed with `error`, or `error` if the peer sent none."""
        if (error.code(), error.details()) != _OF_GRPC:
            return error
        if self._status is None:
            self._arrived = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_SECONDS):
                    await self._arrived.wait()
        return self._status or error

    def _ended(self, call: Any) -> None:
        """Keep the peer's status. grpc.aio calls this for each status that it sets."""
        code = _value_of(call.code())
        if code is grpc.StatusCode.OK or self._status is not None:
            return
        details = _value_of(call.details())
        if (code, details) != _OF_GRPC:
            self._status = rpc_error(code, details)
            if self._arrived is not None:
                self._arrived.set()


def _value_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the value of a coroutine that does not suspend, such as `code()` of a call that has ended."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    coroutine.close()
    raise RuntimeError("the status of a call that has ended must be known")
