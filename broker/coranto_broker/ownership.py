"""Exclusive ownership that passes from task to task.

A replica has one spool and one pipeline, and each has one owner at a time (seed 001 "Components"). A wait for either
fails when the resolution that led to the replica is invalidated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from coranto.errors import Unavailable

T = TypeVar("T")


class Invalidated(Exception):
    """The resolution of a waiting task is outdated; resolve again. Internal to the broker."""


class Signal:
    """An event that fires once. It wakes tasks that wait for it, and fails futures that were added to it."""

    def __init__(self) -> None:
        self.fired = False
        # Ordered, because simulations must be deterministic.
        self._waiters: dict[asyncio.Future[object], None] = {}

    def fire(self) -> None:
        self.fired = True
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(Invalidated())

    def add(self, waiter: asyncio.Future[object]) -> None:
        """Fail `waiter` with Invalidated when the signal fires. The signal must not have fired yet."""
        self._waiters[waiter] = None

    def discard(self, waiter: asyncio.Future[object]) -> None:
        self._waiters.pop(waiter, None)

    async def wait(self) -> None:
        """Return once the signal has fired."""
        if self.fired:
            return
        waiter: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.add(waiter)
        try:
            await waiter
        except Invalidated:
            return
        finally:
            self.discard(waiter)


class Waiters:
    """The waiters for a recurring event. True while there are any."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[object], None] = {}  # Ordered, too.

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def wake(self) -> None:
        """End all current waits."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, until: Signal | None, seconds: float | None = None) -> None:
        """Return at the next `wake`, or after `seconds`. Raises Invalidated if `until` has fired, or fires first."""
        if until is not None and until.fired:
            raise Invalidated
        waiter: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        if until is not None:
            until.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return
        finally:
            self._waiting.pop(waiter, None)
            if until is not None:
                until.discard(waiter)


class Slot(Generic[T]):
    """A slot for one object, empty while a task owns the object. Waiters are served first-in, first-out."""

    def __init__(self) -> None:
        """Create an empty slot. The creator of the object is its first owner, and hands it over with `put`."""
        self._value: list[T] = []  # At most one.
        self._refusal = ""
        self._waiters: deque[asyncio.Future[object]] = deque()

    @property
    def at_rest(self) -> T | None:
        """The object, or None while it has an owner. A caller may use it without ownership until its next await."""
        return self._value[0] if self._value else None

    def take_at_rest(self) -> T:
        """Take ownership of the object while it has no owner (`at_rest`)."""
        return self._value.pop()

    async def take(self, until: Signal | None = None) -> T:
        """Take ownership of the object; give it back with `put`. Raises Invalidated if `until` fires first.

        Does not suspend if the object has no owner. Raises Unavailable if the object was refused (`refuse`). A
        cancelled call does not keep the object.
        """
        if until is not None and until.fired:
            raise Invalidated
        if self._value:
            return self._value.pop()
        if self._refusal:
            raise Unavailable(self._refusal)
        waiter: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if until is not None:
            until.add(waiter)
        try:
            return await waiter  # type: ignore[return-value]  # Only `put` sets a result.
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.put(waiter.result())  # type: ignore[arg-type]  # `put` came just before the cancellation.
            raise
        finally:
            if until is not None:
                until.discard(waiter)

    def refuse(self, problem: str) -> None:
        """Fail all waiters, and all later ones until the next `put`, with Unavailable and this text."""
        self._refusal = problem
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(Unavailable(problem))

    def put(self, value: T) -> None:
        """Give the object to the next waiter, or keep it."""
        self._refusal = ""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(value)
                return
        assert not self._value  # There is only one object, and the caller just owned it.
        self._value.append(value)
