"""Causes of the end of a gRPC call, where errors and cancellations are ambiguous."""

from __future__ import annotations

import asyncio

import grpc.aio

CALL_ENDED = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
"""The errors that gRPC raises when a message is sent on an ended call. Await the call for the actual error."""


def cancelled_from_outside() -> bool:
    """Return True if a CancelledError means that this task was cancelled, and not its call by a closing channel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
