"""The requests that wait for their commit, in the order of their arrival. Pure, but for their futures.

A request is *taken* for an attempt to commit. As long as the outcome of an attempt is unknown, the requests of it are
part of each later attempt, with the same numbers. So the number of a gateway's last committed request says which of
them are committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coranto.ingest.webhook.keys import ANY_BODY, KeyWindow


class Committed(NamedTuple):
    """The answer to a request whose events are in the stream."""

    is_duplicate: bool


class KeyUsed(Exception):
    """A request has the key of another one, and another body."""


class WindowFull(Exception):
    """No more keys can be remembered."""


class GatewayEnded(Exception):
    """The gateway ended before the outcome of a request was known."""


@dataclass(eq=False, slots=True)
class Request:
    """A request with its encoded events. `digest` is None for one without a key."""

    id: bytes
    digest: bytes | None
    keys: Sequence[str]
    """The routing keys of the events."""
    events: Sequence[bytes]
    letters: Sequence[Mapping[str, object]]
    size: int
    done: asyncio.Future[Committed] = field(init=False)
    """The outcome, from `put` on. A request is made in any thread."""
    number: int = 0
    """Its number among the requests of this gateway; 0 until it is taken."""
    waiting: int = 0
    """The number of callers that wait for it."""

    def fits(self, digest: bytes) -> bool:
        """Return True if a request of this key, with a body of this digest, is this request."""
        return ANY_BODY in (self.digest, digest) or self.digest == digest


class RequestQueue:
    """Requests that are not committed. `release` is called with the size of each request that leaves."""

    def __init__(self, release: Callable[[int], object]) -> None:
        self._release = release
        self._queue: deque[Request] = deque()
        self._taken: list[Request] = []
        self._keyed: dict[bytes, Request] = {}
        self._last = 0
        self.grown = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue) + len(self._taken)

    @property
    def keys(self) -> int:
        """The number of keys of these requests."""
        return len(self._keyed)

    def put(self, request: Request) -> Request:
        """Add a request, unless one of its key is there already. Returns the one that is there.

        Raises KeyUsed if that has another body.
        """
        if request.digest is not None:
            there = self._keyed.get(request.id)
            if there is not None:
                self._release(request.size)
                if not there.fits(request.digest):
                    raise KeyUsed
                return there
            self._keyed[request.id] = request
        request.done = asyncio.get_running_loop().create_future()
        self._queue.append(request)
        self.grown.set()
        return request

    def leave(self, request: Request) -> None:
        """Note that a caller no longer waits. Without callers, a request that was not taken is dropped."""
        request.waiting -= 1
        if not request.waiting and not request.number and not request.done.done():
            self._queue.remove(request)
            request.done.cancel()
            self._forget(request)

    def take(self, max_bytes: int, keys: KeyWindow) -> list[Request]:
        """Return requests of about `max_bytes` bytes for an attempt. Requests whose keys are known get their answer."""
        size = sum(each.size for each in self._taken)
        while self._queue and (not self._taken or size + self._queue[0].size <= max_bytes):
            request = self._queue.popleft()
            if not self._is_known(request, keys):
                self._last += 1
                request.number = self._last
                self._taken.append(request)
                size += request.size
        if not self._queue:
            self.grown.clear()
        return list(self._taken)

    def settle(self, number: int, keys: KeyWindow) -> None:
        """Answer taken requests that are committed: up to a number by this gateway, others by their keys."""
        taken, self._taken = self._taken, []
        for request in taken:
            if request.number <= number:
                self._end(request, Committed(False))
            elif not self._is_known(request, keys):
                self._taken.append(request)
        if self._taken:
            self.grown.set()

    def fail(self) -> None:
        """Give up all requests."""
        for request in [*self._taken, *self._queue]:
            self._end(request, GatewayEnded())
        self._taken, self._queue = [], deque()

    def _is_known(self, request: Request, keys: KeyWindow) -> bool:
        """Answer a request whose key is known."""
        digest = None if request.digest is None else keys.get(request.id)
        if digest is None:
            return False
        self._end(request, Committed(True) if request.fits(digest) else KeyUsed())
        return True

    def _end(self, request: Request, answer: Committed | Exception) -> None:
        self._forget(request)
        if isinstance(answer, Exception):
            request.done.set_exception(answer)
            request.done.exception()  # Perhaps no caller waits any more.
        else:
            request.done.set_result(answer)

    def _forget(self, request: Request) -> None:
        if request.digest is not None:
            del self._keyed[request.id]
        self._release(request.size)
