"""Receiving what the client of an append sends: within its time, and ahead of the pipeline if it is little.

A small append is received as a whole before it waits for the pipeline, so that it neither holds the pipeline while its
client sends, nor has to be alone in it (`coranto_broker.group_commit`). What turns out to be larger, or to break a
rule, is replayed once the pipeline is there and goes on from where it was.
"""

from __future__ import annotations

import asyncio
from collections import deque

from coranto.effects import Bytes, Clock
from coranto.errors import CorantoError
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append_fsm import has_parameters, registers_change
from coranto_broker.content import AppendMessage, Content
from coranto_broker.flow_control import AppendUnderflow, FlowControl
from coranto_broker.group_commit import Line, Whole
from coranto_broker.handlers.errors import Source, next_message, require_readable

LATE_SECONDS = 0.25
"""A timer that fires later than this after its time says that this process was busy, not that the client was slow."""

AHEAD_BYTES = 64 << 20
"""Content that a broker holds of appends received ahead. Beyond it, they are received once they have the pipeline."""


_MESSAGES = (Content, pb.AppendRequest)


class Ahead:
    """What one broker has received ahead, and may receive."""

    def __init__(self, each: int) -> None:
        """`each` bounds one append, but for its last message; 0: nothing is received ahead."""
        self.each = each
        self._held = 0

    def open(self, context: Source) -> Inbox:
        return Inbox(context, self)

    @property
    def has_room(self) -> bool:
        return self.each > 0 and self._held + self.each <= AHEAD_BYTES

    def hold(self, size: int) -> None:
        self._held += size


class Inbox:
    """An append's messages after the first, as a `Source` of them. `close` it at the end."""

    def __init__(self, context: Source, ahead: Ahead) -> None:
        self._context = context
        self._ahead = ahead
        self._held = 0
        self._messages: deque[AppendMessage | CorantoError | None] = deque()

    async def read(self) -> AppendMessage | None:
        """The next message, or None at the end of the stream. Raises what receiving it raised."""
        if not self._messages:
            return await next_message(self._context, pb.AppendRequest)
        found = self._messages.popleft()
        if isinstance(found, CorantoError):
            raise found
        return found

    async def receive(self, request: pb.AppendRequest, line: Line, min_rate: int, clock: Clock) -> Whole | None:
        """Receive ahead what may soon stand in `line`.

        Returns an append that is whole, and follows the rules that do not depend on its journal.
        """
        if not self._ahead.has_room:
            return None
        self._hold(self._ahead.each)
        line.coming += 1
        flow = FlowControl()
        flow.start(min_rate, 0, clock.monotonic())
        watchdog = Watchdog(flow, clock)
        contents: list[Bytes] = []
        size = 0
        try:
            while size <= self._ahead.each:
                message = await watchdog.read(self._context)
                self._messages.append(message)
                if message is None or has_parameters(message):
                    return None
                if not message.content:
                    break
                contents.append(message.content)
                size += len(message.content)
                flow.chunk(len(message.content))
            else:
                self._hold(size - self._held)
                return None
            if (message := await watchdog.read(self._context)) is not None:
                self._messages.append(message)
                return None
            self._messages.append(None)
        except AppendUnderflow as problem:
            # Its journal may have another reason to refuse it, which says more.
            self._messages.append(problem)
            return None
        finally:
            line.coming -= 1
            watchdog.close()
        self._hold(size - self._held)
        if not size and registers_change(request):
            return None
        return Whole(b"".join(contents), len(contents))

    def close(self) -> None:
        """Nothing is held any more."""
        self._hold(-self._held)

    def _hold(self, change: int) -> None:
        self._held += change
        self._ahead.hold(change)


class Watchdog:
    """Reads a client's messages, and raises AppendUnderflow when they come too slowly.

    It costs one timer for the whole append, not one per message.
    """

    def __init__(self, flow: FlowControl, clock: Clock) -> None:
        self._flow = flow
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._reading = False
        self._underflow: AppendUnderflow | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    async def read(self, source: Source) -> AppendMessage | None:
        """The client's next message, or None at the end of its stream."""
        self._reading = True
        try:
            message = await source.read()
        except asyncio.CancelledError:
            if self._underflow is None or self._task is None or self._task.uncancel() > 0:
                raise
            raise self._underflow from None
        finally:
            self._reading = False
        if not isinstance(message, _MESSAGES):
            self._flow.tick(self._clock.monotonic())
            require_readable(message)
            return None
        if message.content:  # What else there is comes once, at the end; while it does not come the timer looks.
            self._flow.tick(self._clock.monotonic())
        return message

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        seconds = self._flow.seconds_until_underflow()
        if seconds != float("inf"):
            self._due = self._loop.time() + seconds
            self._timer = self._loop.call_at(self._due, self._check)

    def _check(self) -> None:
        now = self._clock.monotonic()
        if not self._reading or self._loop.time() - self._due > LATE_SECONDS:
            self._flow.forgive(now)
        try:
            self._flow.tick(now)
        except AppendUnderflow as underflow:
            self._underflow = underflow
            assert self._task is not None
            self._task.cancel()
            return
        self._arm()
