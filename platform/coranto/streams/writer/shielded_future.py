"""A future that outlives the cancellation of its waiters."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


class ShieldedFuture(asyncio.Future[T]):
    """A future with the effect of `asyncio.shield`, whose waiters continue one turn of the loop after it is done.

    A shield would add one more turn to every commit.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._waiters: list[asyncio.Future[None]] = []

    async def outcome(self) -> T:
        """Wait for the result and return it, or raise the error. A cancellation does not change the future."""
        if not self.done():
            waiter: asyncio.Future[None] = self.get_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self.result()

    def set_result(self, result: T) -> None:
        super().set_result(result)
        self._release()

    def set_exception(self, exception: type[BaseException] | BaseException) -> None:
        super().set_exception(exception)
        self._release()

    def cancel(self, msg: object = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._release()
        return cancelled

    def _release(self) -> None:
        # After the callbacks of the future itself, so that these run before the waiters continue.
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
