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
        self.rota = Rota()
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
        ahead, messages, read = self._ahead, self._messages, self._context.read
        if not ahead.has_room:
            return None
        self._hold(ahead.each)
        line.expect()
        flow = FlowControl()
        flow.start(min_rate, 0, clock.monotonic())
        watchdog = Watchdog(flow, clock, ahead.rota)
        contents: list[Bytes] = []
        size = 0
        try:
            watchdog.reading = True  # All the time: what is done between two messages takes none.
            while size <= ahead.each:
                message = await read()
                if not isinstance(message, Content):
                    message = watchdog.other(message)
                    if message is None or has_parameters(message):
                        messages.append(message)
                        return None
                content = message.content
                if not content:
                    break
                flow.tick(clock.monotonic())
                flow.chunk(len(content))
                messages.append(message)
                contents.append(content)
                size += len(content)
            else:
                self._hold(size - self._held)
                return None
            messages.append(message)
            if (message := watchdog.other(await read())) is not None:
                messages.append(message)
                return None
            messages.append(None)
        except asyncio.CancelledError:
            underflow = watchdog.underflow()
            if underflow is None:
                raise
            messages.append(underflow)  # Its journal may have another reason to refuse it, which says more.
            return None
        except AppendUnderflow as problem:
            messages.append(problem)
            return None
        finally:
            line.came()
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


class Rota:
    """The first looks at clients. All are due as long after they were asked for, so one timer does for all of them."""

    def __init__(self) -> None:
        self._waiting: deque[Watchdog] = deque()
        self._armed = False

    def add(self, watchdog: Watchdog) -> None:
        """Have this look at its client at its time, unless it is closed by then."""
        waiting = self._waiting
        while waiting and waiting[0].closed:
            waiting.popleft()
        waiting.append(watchdog)
        if not self._armed:
            self._arm(asyncio.get_running_loop())

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._armed = True
        loop.call_at(self._waiting[0].due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = self._waiting
        self._armed = False
        while waiting and (waiting[0].closed or waiting[0].due <= loop.time()):
            watchdog = waiting.popleft()
            if not watchdog.closed:
                watchdog.check()
        if waiting:
            self._arm(loop)


class Watchdog:
    """Reads a client's messages, and raises AppendUnderflow when they come too slowly.

    It costs no timer, but for a client that takes longer than its first credit lasts; then one for the whole append.
    """

    __slots__ = ("_clock", "_flow", "_loop", "_task", "_timer", "_underflow", "closed", "due", "reading")

    def __init__(self, flow: FlowControl, clock: Clock, rota: Rota) -> None:
        self._flow = flow
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._underflow: AppendUnderflow | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.reading = False
        """Whether it is the client that we wait for."""
        self.closed = False
        seconds = flow.seconds_until_underflow()
        if seconds != float("inf"):
            self.due = self._loop.time() + seconds
            rota.add(self)

    async def read(self, source: Source) -> AppendMessage | None:
        """The client's next message, or None at the end of its stream."""
        self.reading = True
        try:
            message = await source.read()
        except asyncio.CancelledError:
            underflow = self.underflow()
            if underflow is None:
                raise
            raise underflow from None
        finally:
            self.reading = False
        if isinstance(message, _MESSAGES):
            if message.content:  # What else there is comes once, at the end; while it does not come the timer looks.
                self._flow.tick(self._clock.monotonic())
            return message
        return self.other(message)

    def other(self, message: object) -> AppendMessage | None:
        """What was read, in case it is a message; None at the end. Raises InvalidInput for bytes that are neither."""
        if isinstance(message, _MESSAGES):
            return message
        self._flow.tick(self._clock.monotonic())
        require_readable(message)
        return None

    def underflow(self) -> AppendUnderflow | None:
        """What a cancellation, which is to be caught, was caused by; None if it has another cause, too."""
        if self._underflow is None or self._task is None or self._task.uncancel() > 0:
            return None
        return self._underflow

    def close(self) -> None:
        self.closed = True
        self._task = None
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Look whether the client is too slow, now that its credit may be used up."""
        now = self._clock.monotonic()
        if not self.reading or self._loop.time() - self.due > LATE_SECONDS:
            self._flow.forgive(now)
        try:
            self._flow.tick(now)
        except AppendUnderflow as underflow:
            self._underflow = underflow
            assert self._task is not None
            self._task.cancel()
            return
        self.due = self._loop.time() + self._flow.seconds_until_underflow()
        self._timer = self._loop.call_at(self.due, self.check)
