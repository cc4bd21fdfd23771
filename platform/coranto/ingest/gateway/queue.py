"""Queue of requests that wait for their commit, in the order of arrival. Pure, except for their futures.

A request is *taken* for an attempt to commit. While the outcome of an attempt is unknown, its requests are part of each
later attempt, with the same numbers. So the number of a gateway's last committed request shows which requests are
committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coranto.ingest.webhook.keys import ANY_BODY, DeduplicationWindow


class Committed(NamedTuple):
    """The answer to a request whose events are in the stream."""

    is_duplicate: bool


class KeyUsed(Exception):
    """A request has the same key as another request, but a different body."""


class WindowFull(Exception):
    """The window of keys is full."""


class GatewayEnded(Exception):
    """The gateway ended before the outcome of a request was known."""


@dataclass(eq=False, slots=True)
class Request:
    """A request with its encoded events. `digest` is None for a request without a key."""

    id: bytes
    digest: bytes | None
    keys: Sequence[str]
    """The routing keys of the events."""
    events: Sequence[bytes]
    dead_letters: Sequence[Mapping[str, object]]
    size: int
    done: asyncio.Future[Committed] = field(init=False)
    """The outcome. Set by `put`, which runs on the loop; a request may be made in any thread."""
    number: int = 0
    """The request's number at this gateway; 0 until it is taken."""
    waiting: int = 0
    """The number of callers that wait for the outcome."""

    def fits(self, digest: bytes) -> bool:
        """Return True if a request with the same key and a body of this digest is a duplicate of this one."""
        return ANY_BODY in (self.digest, digest) or self.digest == digest


class RequestQueue:
    """Requests that are not committed. Calls `release` with the size of each request that leaves the queue."""

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
        """The number of requests with a key."""
        return len(self._keyed)

    def put(self, request: Request) -> Request:
        """Add a request, unless the queue has one with its key. Returns the queued request.

        Raises KeyUsed if the queued request has a different body.
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

    def remove_waiter(self, request: Request) -> None:
        """Remove a waiting caller. Drops a request that was not taken and has no more callers."""
        request.waiting -= 1
        if not request.waiting and not request.number and not request.done.done():
            self._queue.remove(request)
            request.done.cancel()
            self._forget(request)

    def take(self, max_bytes: int, keys: DeduplicationWindow) -> list[Request]:
        """Return requests of about `max_bytes` bytes for an attempt. Answers requests whose keys are known."""
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

    def resolve_committed(self, number: int, keys: DeduplicationWindow) -> None:
        """Answer taken requests that are committed: by this gateway up to `number`, or by others, as `keys` shows."""
        taken, self._taken = self._taken, []
        for request in taken:
            if request.number <= number:
                self._end(request, Committed(False))
            elif not self._is_known(request, keys):
                self._taken.append(request)
        if self._taken:
            self.grown.set()

    def fail(self) -> None:
        """End all requests with GatewayEnded."""
        for request in [*self._taken, *self._queue]:
            self._end(request, GatewayEnded())
        self._taken, self._queue = [], deque()

    def _is_known(self, request: Request, keys: DeduplicationWindow) -> bool:
        """Answer a request if its key is known. Returns False if not."""
        digest = None if request.digest is None else keys.get(request.id)
        if digest is None:
            return False
        self._end(request, Committed(True) if request.fits(digest) else KeyUsed())
        return True

    def _end(self, request: Request, answer: Committed | Exception) -> None:
        self._forget(request)
        if isinstance(answer, Exception):
            request.done.set_exception(answer)
            request.done.exception()  # Mark it as retrieved, since no caller may be waiting.
        else:
            request.done.set_result(answer)

    def _forget(self, request: Request) -> None:
        if request.digest is not None:
            del self._keyed[request.id]
        self._release(request.size)
