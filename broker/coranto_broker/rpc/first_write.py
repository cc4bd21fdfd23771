"""Contexts of gRPC calls, among them one that can be aborted while its first message is being sent.

grpc.aio sends a call's headers with its first message. If the sender is cancelled during that, as when a token expires,
grpc.aio considers the headers unsent, sends them again with the call's status, and fails. The client gets no status,
and waits forever.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn, Protocol


class EndingCall(Protocol):
    """The part of gRPC's `ServicerContext` that this module needs."""

    async def read(self) -> Any: ...

    async def write(self, message: Any, /) -> None: ...

    async def abort(self, code: Any, details: str = "", /) -> NoReturn: ...


class GrpcContext:
    """A wrapper of a gRPC context that implements `InstantSink`, like the context of a call over frames."""

    can_write_now = False

    def __init__(self, context: EndingCall) -> None:
        self._context = context
        self.read = context.read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Send a message."""
        await self._context.write(message)

    def write_now(self, message: Any) -> bool:
        """Send nothing, and return False: gRPC cannot send without waiting."""
        return False


class WholeFirstWrite(GrpcContext):
    """A context whose cancelled first `write` continues; `abort` waits for it."""

    def __init__(self, context: EndingCall) -> None:
        super().__init__(context)
        self._first: asyncio.Task[None] | None = None

    async def write(self, message: Any) -> None:
        if self._first is None:
            self._first = asyncio.create_task(self._write(message))
            await asyncio.shield(self._first)
        else:
            await self._context.write(message)

    async def abort(self, code: Any, details: str = "") -> NoReturn:
        """End the call with a status, after its first message."""
        if self._first is not None and not self._first.done():
            try:
                await asyncio.wait((self._first,))
            finally:
                self._first.cancel()  # No effect unless this wait was cancelled.
        await self._context.abort(code, details)

    async def _write(self, message: Any) -> None:
        await self._context.write(message)
