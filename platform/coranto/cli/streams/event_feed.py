"""A feed of events from a command's own thread, which waits for input, to a stream's writer on the event loop.

An event costs one queue entry instead of a future shared between threads, so bulk input is written at nearly the
writer's speed.
"""

from __future__ import annotations

import functools
import threading
from asyncio import Future
from collections.abc import Callable
from typing import Any, Final

from coranto.client.handover import CallQueue
from coranto.errors import InvalidInput
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.streams.writer.units import EventPosition

MAX_IN_FLIGHT: Final = 4096
"""The maximum number of events in flight."""


class EventFeed:
    """Feeds events to a writer, and counts those that become durable. Call `add` and `finish` from one thread.

    `late` is called, at most once per wait, when no event has become durable for `stall_timeout` seconds.
    """

    def __init__(self, writer: StreamWriter[Any], *, stall_timeout: float, late: Callable[[], None]) -> None:
        self.given = 0
        self.durable = 0
        self.repeated = 0
        self._writer = writer
        self._stall_timeout = stall_timeout
        self._late = late
        self._calls = CallQueue()
        self._settled = 0
        self._failure: tuple[int, BaseException] | None = None
        self._change = threading.Condition()
        self._awaited = False

    def add(self, key: str, event: Any, sequence: int | None) -> None:
        """Feed an event, then wait if too many are in flight. Raises the failure of an earlier event."""
        self._check()
        self.given += 1
        self._calls.put(functools.partial(self._write, self.given, key, event, sequence))
        if self.given - self._settled >= MAX_IN_FLIGHT:
            self._await(MAX_IN_FLIGHT // 2)

    def finish(self) -> None:
        """Wait until all events are durable. Raises the first failure."""
        self._await(0)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            number, error = self._failure
            if isinstance(error, InvalidInput):
                raise InvalidInput(f"line {number}: {error}") from error
            raise error

    def _await(self, left: int) -> None:
        """Wait until at most `left` events are in flight, or one has failed."""
        with self._change:
            self._awaited = True
            is_reported = False
            while self.given - self._settled > left and self._failure is None:
                before = self._settled
                if not self._change.wait(self._stall_timeout) and self._settled == before and not is_reported:
                    is_reported = True
                    self._late()
            self._awaited = False

    # -- On the loop ---------------------------------------------------------------------------------------------------

    def _write(self, number: int, key: str, event: Any, sequence: int | None) -> None:
        try:
            done = self._writer.write_event(key, event, sequence=sequence)
        except Exception as error:  # noqa: BLE001 - raised again in the other thread
            self._fail(number, error)
        else:
            done.add_done_callback(functools.partial(self._resolve, number))

    def _resolve(self, number: int, done: Future[EventPosition]) -> None:
        error = done.exception()
        if error is not None:
            self._fail(number, error)
            return
        self.durable += 1
        self.repeated += done.result().deduplicated
        self._report_progress()

    def _fail(self, number: int, error: BaseException) -> None:
        if self._failure is None or number < self._failure[0]:
            self._failure = number, error
        self._report_progress()

    def _report_progress(self) -> None:
        self._settled += 1
        if self._awaited:
            with self._change:
                self._change.notify()
