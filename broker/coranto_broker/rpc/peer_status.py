"""The status of a forwarded call that its peer ends while we still send.

Sending then fails, and grpc.aio gives the call an error of its own in place of the peer's status, before or after that
has arrived. The peer's status says more: whether the call was refused, and that nothing of it was applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

MOST_SECONDS: Final = 1.0
"""The time that a peer's status is waited for. It is on its way when sending fails."""

_OF_GRPC: Final = (grpc.StatusCode.INTERNAL, "Internal error from Core")
T = TypeVar("T")


class PeerStatus:
    """The status with which the peer ends a call, even if grpc.aio replaces it."""

    def __init__(self, call: grpc.aio.Call) -> None:
        """Watch a call that has just begun."""
        self._status: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._ended)

    async def told(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Return the peer's error of a call that failed with `error`, or `error` if the peer says nothing."""
        if (error.code(), error.details()) != _OF_GRPC:
            return error
        try:
            async with asyncio.timeout(MOST_SECONDS):
                return await self._status
        except TimeoutError:
            return error

    def _ended(self, call: Any) -> None:
        """Keep the present status. grpc.aio calls this whenever it sets one."""
        code, details = _value_of(call.code()), _value_of(call.details())
        if not self._status.done() and code is not grpc.StatusCode.OK and (code, details) != _OF_GRPC:
            self._status.set_result(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))


def _value_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the value of a coroutine that does not suspend, as those do that tell the status of a call that ended."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    coroutine.close()
    raise RuntimeError("the status of a call that has ended must be known")
