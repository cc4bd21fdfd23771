"""The ends of gRPC calls: errors and cancellations that have several causes."""

from __future__ import annotations

import asyncio

import grpc.aio

CALL_ENDED = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
"""The errors that gRPC raises on sending to an ended call. Only awaiting the call reliably tells why it ended."""


def cancelled_from_outside() -> bool:
    """Return True if this task was cancelled, not its call by a closing channel. For handlers of CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
