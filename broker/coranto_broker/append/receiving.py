"""Receiving what the client of an append sends: within its time, and ahead of the pipeline if it is little.

A small append is received as a whole before it waits for the pipeline, so that it neither holds the pipeline while its
client sends, nor has to be alone in it (`coranto_broker.append.group_commit`). What turns out to be larger, or to break
a rule, is replayed once the pipeline is there and goes on from where it was.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence

from coranto.effects import Bytes, Clock
from coranto.errors import CorantoError
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.fsm import has_parameters, registers_change
from coranto_broker.replication.flow_control import BURST_SECONDS, FlowControl
from coranto_broker.replication.waiting_appends import Line, Whole
from coranto_broker.rpc.content import AppendMessage, Content
from coranto_broker.rpc.deadlines import Rota
from coranto_broker.rpc.rolled_back import AppendUnderflow
from coranto_broker.rpc.source import Source, next_message, require_readable

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
        self.silent = Rota()
        """Of streams whose first message has not come."""
        self.held = 0
        """Bytes that are held, or may be."""

    def open(self, context: Source) -> Inbox:
        return Inbox(context, self)


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
        each = ahead.each
        if not 0 < each <= AHEAD_BYTES - ahead.held:
            return None
        self._held = each
        ahead.held += each
        line.expect()
        credit = FirstCredit(min_rate, clock, ahead.rota)
        contents: list[Bytes] = []
        size = 0
        try:
            while size <= each:
                message = await read()
                if type(message) is not Content:
                    message = _message(message)
                    messages.append(message)
                    if message is None or has_parameters(message):
                        return None
                else:
                    messages.append(message)
                content = message.content
                if not content:
                    break
                credit.earn(len(content))
                contents.append(content)
                size += len(content)
            else:
                self._held = size
                ahead.held += size - each
                return None
            message = _message(await read())
            messages.append(message)
            if message is not None:
                return None
        except asyncio.CancelledError:
            underflow = credit.underflow()
            if underflow is None:
                raise
            messages.append(underflow)  # Its journal may have another reason to refuse it, which says more.
            return None
        except AppendUnderflow as problem:
            messages.append(problem)
            return None
        finally:
            line.came()
            credit.close()
        self._held = size
        ahead.held += size - each
        if not size and registers_change(request):
            return None
        return Whole(contents[0] if len(contents) == 1 else b"".join(contents), len(contents))

    def close(self) -> None:
        """Nothing is held any more."""
        self._ahead.held -= self._held
        self._held = 0


def _message(message: object) -> AppendMessage | None:
    """What was read, in case it is a message; None at the end. Raises InvalidInput for bytes that are neither."""
    if isinstance(message, _MESSAGES):
        return message
    require_readable(message)
    return None


class FirstCredit:
    """Looks at a client that is being received ahead, once its first credit may be used up.

    Nearly all are done by then, and cost no more than a note of when they sent what. The others get a `Watchdog`.
    """

    __slots__ = ("_begun", "_clock", "_earned", "_min_rate", "_task", "_watchdog", "closed", "due")

    def __init__(self, min_rate: int, clock: Clock, rota: Rota) -> None:
        self._min_rate = min_rate
        self._clock = clock
        self._begun = clock.monotonic()
        self._earned: list[tuple[float, int]] = []
        self._watchdog: Watchdog | None = None
        self.closed = False
        if min_rate:
            self._task = asyncio.current_task()
            self.due = asyncio.get_running_loop().time() + BURST_SECONDS
            rota.add(self)

    def earn(self, size: int) -> None:
        """So much has come. Raises AppendUnderflow for one that has a watchdog, and comes too late."""
        if self._watchdog is None:
            self._earned.append((self._clock.monotonic(), size))
        else:
            self._watchdog.earn(size)

    def check(self) -> None:
        flow = FlowControl()
        flow.start(self._min_rate, 0, self._begun)
        assert self._task is not None
        self._watchdog = Watchdog(flow, self._clock, task=self._task, due=self.due)
        self._watchdog.reading = True  # All the time: what is done between two messages takes none.
        self._watchdog.check(self._earned)

    def underflow(self) -> AppendUnderflow | None:
        """As that of `Watchdog`."""
        return self._watchdog.underflow() if self._watchdog is not None else None

    def close(self) -> None:
        self.closed = True
        self._task = None
        if self._watchdog is not None:
            self._watchdog.close()


class Watchdog:
    """Reads a client's messages, and raises AppendUnderflow when they come too slowly.

    It costs no timer, but for a client that takes longer than its first credit lasts; then one for the whole append.
    """

    __slots__ = ("_clock", "_flow", "_loop", "_task", "_timer", "_underflow", "closed", "due", "reading")

    def __init__(
        self,
        flow: FlowControl,
        clock: Clock,
        rota: Rota | None = None,
        task: asyncio.Task[object] | None = None,
        due: float = math.inf,
    ) -> None:
        """Of the current task, at which it looks first when `rota` says; or of `task`, whose look was `due`."""
        self._flow = flow
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._task = task or asyncio.current_task()
        self._underflow: AppendUnderflow | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.reading = False
        """Whether it is the client that we wait for."""
        self.closed = False
        self.due = due
        seconds = flow.seconds_until_underflow()
        if rota is not None and seconds != math.inf:
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
                self._tick()
            return message
        self._tick()
        require_readable(message)
        return None

    def earn(self, size: int) -> None:
        """So much was read. Raises AppendUnderflow."""
        self._tick()
        self._flow.chunk(size)

    def _tick(self) -> None:
        """Let time pass. Raises AppendUnderflow, but for time in which we should have looked and did not come to it."""
        now = self._clock.monotonic()
        if self._is_late():
            self._flow.forgive(now)
        self._flow.tick(now)

    def _is_late(self) -> bool:
        return self._loop.time() - self.due > LATE_SECONDS

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

    def check(self, earned: Sequence[tuple[float, int]] = ()) -> None:
        """Look whether the client is too slow, now that its credit may be used up; `earned` is what it sent, and when.

        That has not been told by `earn`.
        """
        flow, now = self._flow, self._clock.monotonic()
        busy = not self.reading or self._is_late()
        try:
            for at, size in (*earned, (now, 0)):
                if busy:
                    flow.forgive(at)
                flow.tick(at)
                if size:
                    flow.chunk(size)
        except AppendUnderflow as underflow:
            self._underflow = underflow
            assert self._task is not None
            self._task.cancel()
            return
        self.due = self._loop.time() + flow.seconds_until_underflow()
        self._timer = self._loop.call_at(self.due, self.check)
