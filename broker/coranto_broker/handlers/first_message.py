"""The first message of a client's stream, which has to come within its time.

A stream that says nothing is of no journal and no client that could be told apart, and holds memory for as long as its
connection lasts.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from coranto_broker.rpc.deadlines import Rota
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.rpc.source import Source

FIRST_MESSAGE_SECONDS: Final = 60.0
"""Clients open a stream when they have something to say, or at most a moment before."""


class SilentStream(RolledBack):
    """A stream was opened, and nothing came."""

    def __init__(self) -> None:
        super().__init__(
            f"nothing was sent for {FIRST_MESSAGE_SECONDS:g} seconds after the stream was opened, so it was closed and "
            "nothing was applied. Open it when the first message is there."
        )


class _Wait:
    """Cancels the current task at its time, unless the message has come by then."""

    __slots__ = ("_task", "closed", "due", "late")

    def __init__(self, rota: Rota) -> None:
        self._task = asyncio.current_task()
        self.due = asyncio.get_running_loop().time() + FIRST_MESSAGE_SECONDS
        self.closed = self.late = False
        rota.add(self)

    def check(self) -> None:
        assert self._task is not None
        self.late = True
        self._task.cancel()

    def is_over(self) -> bool:
        """Whether a cancellation, which is to be caught, has no other cause than this."""
        return self.late and self._task is not None and self._task.uncancel() == 0

    def close(self) -> None:
        self.closed = True
        self._task = None


async def first_message(source: Source, rota: Rota) -> Any:
    """What `source` reads first. `rota` is for such waits alone. Raises SilentStream."""
    wait = _Wait(rota)
    try:
        return await source.read()
    except asyncio.CancelledError:
        if wait.is_over():
            raise SilentStream from None
        raise
    finally:
        wait.close()
