"""A network between named nodes: messages take time, links are cut and restored, connections break.

It behaves like TCP: a message over a cut link is held, and arrives after the link is restored unless the connection was
closed before. A cut may be one-way. Nothing is duplicated or reordered within a connection.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from coranto.testing.sim.timeline import Process, Timeline

T = TypeVar("T")


class TimedOut(Exception):
    """Raised when no answer came in time. The request may or may not have arrived."""


@dataclass(slots=True)
class Delays:
    """Ranges of message delays, in seconds. `congestion` is the share of messages with a delay in `congested`."""

    usual: tuple[float, float] = (0.0002, 0.002)
    congested: tuple[float, float] = (0.02, 0.3)
    congestion: float = 0.01


class Network:
    """A network with all its links. Nodes need not be declared."""

    def __init__(self, loop: Timeline, rng: random.Random, delays: Delays | None = None) -> None:
        self.loop = loop
        self.rng = rng
        self.delays = delays or Delays()
        self.held = 0
        """The number of messages that had to wait for a restored link."""
        self._cuts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._held: defaultdict[tuple[str, str], deque[Callable[[], None]]] = defaultdict(deque)
        self._on_cut: dict[Callable[[str, str], None], None] = {}
        self._on_restore: dict[Callable[[str, str], None], None] = {}

    def delay(self) -> float:
        low, high = self.delays.congested if self.rng.random() < self.delays.congestion else self.delays.usual
        return self.rng.uniform(low, high)

    def is_cut(self, source: str, target: str) -> bool:
        return self._cuts.get((source, target), 0) > 0

    def cut(self, source: str, target: str) -> Callable[[], None]:
        """Hold all messages from `source` to `target`. Return a function that ends this cut. Cuts may overlap."""
        self._cuts[source, target] += 1
        for observer in list(self._on_cut):
            observer(source, target)
        restored = False

        def restore() -> None:
            nonlocal restored
            if not restored:
                restored = True
                self._restore_link(source, target)

        return restore

    def cut_both(self, one: str, other: str) -> Callable[[], None]:
        """Cut both directions. Return a function that ends both cuts."""
        restores = (self.cut(one, other), self.cut(other, one))

        def restore() -> None:
            for each in restores:
                each()

        return restore

    def observe(self, on_cut: Callable[[str, str], None], on_restore: Callable[[str, str], None]) -> Callable[[], None]:
        """Call the functions when a link is cut or restored. Return a function that stops the calls."""
        self._on_cut[on_cut] = None
        self._on_restore[on_restore] = None

        def stop() -> None:
            self._on_cut.pop(on_cut, None)
            self._on_restore.pop(on_restore, None)

        return stop

    def send(self, source: str, target: str, deliver: Callable[[], None], *, not_before: float = 0.0) -> float:
        """Call `deliver` once the message has arrived. Return the time of arrival, unless a cut link delays it."""
        at = max(self.loop.time() + self.delay(), not_before)
        self.loop.later(at - self.loop.time(), self._arrive, source, target, deliver)
        return at

    async def request(self, source: str, target: str, serve: Callable[[], T], timeout: float) -> T:
        """Send a request, let `serve` handle it when it arrives, and return the answer once it has arrived.

        Raises the errors of `serve`, and TimedOut after `timeout` seconds. The request is still delivered if the
        process that sent it dies, or the call is cancelled.
        """
        answer: asyncio.Future[T] = self.loop.create_future()

        def fail(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        def succeed(result: T) -> None:
            if not answer.done():
                answer.set_result(result)

        def arrived() -> None:
            try:
                result = serve()
            except Exception as error:  # noqa: BLE001  # The exception is the answer.
                self.send(target, source, functools.partial(fail, error))
            else:
                self.send(target, source, functools.partial(succeed, result))

        self.send(source, target, arrived)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise TimedOut(f"no answer from {target} within {timeout} seconds") from None

    def _arrive(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        if self.is_cut(source, target) or self._held.get((source, target)):
            self._held[source, target].append(deliver)
            self.held += 1
            return
        deliver()

    def _restore_link(self, source: str, target: str) -> None:
        self._cuts[source, target] -= 1
        if self._cuts[source, target]:
            return
        for observer in list(self._on_restore):
            observer(source, target)
        self.loop.later(self.delay(), self._release, source, target)

    def _release(self, source: str, target: str) -> None:
        """Deliver held messages, in order."""
        held = self._held.get((source, target))
        while held and not self.is_cut(source, target):
            held.popleft()()
        if not held:
            self._held.pop((source, target), None)


class Lane:
    """One direction of a connection: messages arrive in order of sending, until it is closed."""

    def __init__(self, network: Network, source: str, target: str, deliver: Callable[[Any], None]) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._deliver = deliver
        self._last = 0.0
        self._queue: deque[Any] = deque()
        self.closed = False

    def send(self, message: Any) -> None:
        if self.closed:
            return
        self._queue.append(message)
        # An arrival delivers the oldest message, not a specific one: arrivals at equal times may run in any order.
        self._last = self._network.send(self._source, self._target, self._arrived, not_before=self._last)

    def close(self) -> None:
        """Drop all messages that have not arrived."""
        self.closed = True
        self._queue.clear()

    def _arrived(self) -> None:
        if not self.closed and self._queue:
            self._deliver(self._queue.popleft())


class Endpoints:
    """The registry of listening processes by endpoint."""

    def __init__(self) -> None:
        self._listeners: dict[str, tuple[str, Process, Any]] = {}
        self._awaited: dict[str, list[asyncio.Event]] = {}

    def listen(self, endpoint: str, node: str, process: Process, service: Any) -> None:
        """Register a process that serves calls to `endpoint` until it dies."""
        self._listeners[endpoint] = node, process, service
        for waiting in self._awaited.pop(endpoint, []):
            waiting.set()
        process.on_death.append(lambda: self.close(endpoint, process))

    def close(self, endpoint: str, process: Process) -> None:
        found = self._listeners.get(endpoint)
        if found is not None and found[1] is process:
            del self._listeners[endpoint]

    async def wait_for(self, endpoint: str) -> None:
        """Wait until a process listens at `endpoint`."""
        while self.find(endpoint) is None:
            listens = asyncio.Event()
            waiting = self._awaited.setdefault(endpoint, [])
            waiting.append(listens)
            try:
                await listens.wait()
            finally:
                if listens in waiting:
                    waiting.remove(listens)

    def find(self, endpoint: str) -> tuple[str, Process, Any] | None:
        return self._listeners.get(endpoint)
