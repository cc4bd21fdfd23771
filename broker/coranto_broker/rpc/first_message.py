"""The first message of a client's stream, and its deadline.

A silent stream names no journal and no client, and holds memory as long as its connection lasts.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from coranto_broker.rpc.deadlines import DeadlineQueue
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.rpc.source import MessageSource

FIRST_MESSAGE_SECONDS: Final = 60.0
"""The time limit for the first message. Clients open a stream when they have something to send, or just before."""


class SilentStream(RolledBack):
    """A stream was opened, but its first message did not come in time."""

    def __init__(self) -> None:
        super().__init__(
            f"nothing was sent for {FIRST_MESSAGE_SECONDS:g} seconds after the stream was opened, so it was closed and "
            "nothing was applied. Open it when the first message is ready."
        )


class _Wait:
    """Cancels the current task after FIRST_MESSAGE_SECONDS without a message."""

    __slots__ = ("_task", "closed", "due", "late")

    def __init__(self, deadlines: DeadlineQueue) -> None:
        self._task = asyncio.current_task()
        self.due = asyncio.get_running_loop().time() + FIRST_MESSAGE_SECONDS
        self.closed = self.late = False
        deadlines.add(self)

    def check(self) -> None:
        assert self._task is not None
        self.late = True
        self._task.cancel()

    def is_over(self) -> bool:
        """Return True, and undo the cancellation, if this deadline is its only cause."""
        return self.late and self._task is not None and self._task.uncancel() == 0

    def close(self) -> None:
        self.closed = True
        self._task = None


async def first_message(source: MessageSource, deadlines: DeadlineQueue) -> Any:
    """Read the first message of `source`. `deadlines` must be for first messages only. Raises SilentStream."""
    wait = _Wait(deadlines)
    try:
        return await source.read()
    except asyncio.CancelledError:
        if wait.is_over():
            raise SilentStream from None
        raise
    finally:
        wait.close()
