"""Exclusive ownership that is handed from task to task, and given up when the ground shifts.

A replica has one spool and one pipeline, and each has one owner at a time (seed 001 "Components"). Waiting for either
ends when the resolution that led to the replica is invalidated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from coranto.errors import Unavailable

T = TypeVar("T")


class Invalidated(Exception):
    """The awaited thing is no longer the right one; resolve again. Internal to the broker."""


class Signal:
    """Fires once; those who wait on it, or on something else until then, are told."""

    def __init__(self) -> None:
        self.fired = False
        self._waiters: set[asyncio.Future[object]] = set()

    def fire(self) -> None:
        self.fired = True
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(Invalidated())

    def add(self, waiter: asyncio.Future[object]) -> None:
        """Fail `waiter` with Invalidated when the signal fires; it has not fired yet."""
        self._waiters.add(waiter)

    def discard(self, waiter: asyncio.Future[object]) -> None:
        self._waiters.discard(waiter)

    async def wait(self) -> None:
        """Return once it has fired."""
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


class Slot(Generic[T]):
    """Holds one thing, or nothing while somebody owns it. Takers are served in order."""

    def __init__(self) -> None:
        """An empty slot: whoever makes the thing owns it first."""
        self._things: list[T] = []  # At most one.
        self._refusal = ""
        self._takers: deque[asyncio.Future[object]] = deque()

    @property
    def at_rest(self) -> T | None:
        """The thing, while nobody owns it nor waits for it. Whoever does not suspend may use it without owning it."""
        return self._things[0] if self._things else None

    async def take(self, until: Signal | None = None, taker: asyncio.Future[object] | None = None) -> T:
        """Own the thing; give it back with `put`. Raises Invalidated when `until` fires first.

        Does not suspend when the thing is there and nobody waits for it. Otherwise it waits on `taker`, which others
        may fail meanwhile: then that is raised. Raises Unavailable for what was refused.
        """
        if until is not None and until.fired:
            raise Invalidated
        if self._things:
            return self._things.pop()
        if self._refusal:
            raise Unavailable(self._refusal)
        if taker is None:
            taker = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        if until is not None:
            until.add(taker)
        try:
            return await taker  # type: ignore[return-value]  # `put` is what resolves it.
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled() and taker.exception() is None:
                self.put(taker.result())  # type: ignore[arg-type]  # Handed to us just as we were cancelled.
            raise
        finally:
            if until is not None:
                until.discard(taker)

    def refuse(self, problem: str) -> None:
        """Have those who wait, and those who come until the next `put`, get Unavailable with this problem."""
        self._refusal = problem
        takers, self._takers = self._takers, deque()
        for taker in takers:
            if not taker.done():
                taker.set_exception(Unavailable(problem))

    def put(self, thing: T) -> None:
        """Give the thing to the next taker, or leave it here."""
        self._refusal = ""
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(thing)
                return
        assert not self._things  # There is one thing, and we just owned it.
        self._things.append(thing)
