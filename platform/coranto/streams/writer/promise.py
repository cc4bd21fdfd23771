"""A future that may be waited for without being cancelled."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


class Promise(asyncio.Future[T]):
    """As `asyncio.shield` around a future, but who waits goes on in the turn of the loop after it is done.

    With a shield that takes a turn more, which every commit would wait for.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._waiters: list[asyncio.Future[None]] = []

    async def outcome(self) -> T:
        """The result, or the error that was set. Cancelling this leaves the future as it is."""
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
        # Behind the callbacks of the future itself, which are called before whoever waits goes on.
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
