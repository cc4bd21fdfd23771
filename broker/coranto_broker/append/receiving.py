"""Receiving an append's messages from its client: in time and, if the append is small, ahead of the pipeline.

A small append is buffered before it waits in its journal's queue. So it does not hold the pipeline while its client
sends, and may share a proposal (`coranto_broker.append.queue`). If the append turns out to be larger, or breaks a rule,
its messages so far are replayed once it has the pipeline, and the rest is read from there.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sized

from coranto.effects import Bytes, Clock
from coranto.errors import CorantoError
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import registers as of_registers
from coranto_broker.append.queued_append import BufferedContent
from coranto_broker.replication.flow_control import BURST_SECONDS, FlowControl
from coranto_broker.rpc.content import AppendMessage, ContentMessage
from coranto_broker.rpc.deadlines import DeadlineQueue
from coranto_broker.rpc.rolled_back import AppendUnderflow
from coranto_broker.rpc.source import MessageSource, next_message, require_readable

LATE_SECONDS = 0.25
"""The most (in seconds) that a timer may be late. Beyond it, this process was busy and the client is not to blame."""

GATHER_SECONDS = 0.002
"""The longest time that a proposal waits for appends that are being received."""

MAX_FRUITLESS = 6
"""A limit on backoff. Each such wait in a row without effect, up to this number, about doubles how many are skipped."""

MAX_BUFFERED_BYTES = 64 << 20
"""Most content that a broker holds of appends received ahead. Beyond it, appends first wait for the pipeline."""


_MESSAGES = (ContentMessage, pb.AppendRequest)


class ReceiveBudget:
    """The budget of one broker for content received ahead, and its use."""

    def __init__(self, bytes_per_append: int) -> None:
        """`bytes_per_append` bounds the bytes of one append, except for its last message. 0: receive nothing ahead."""
        self.bytes_per_append = bytes_per_append
        self.deadlines = DeadlineQueue()
        self.first_message_deadlines = DeadlineQueue()
        """The deadlines of streams whose first message has not come."""
        self.held = 0
        """Bytes held or reserved."""

    def open(self, context: MessageSource) -> Inbox:
        return Inbox(context, self)


class Arrivals:
    """The appends that are being received and may soon be in a queue."""

    def __init__(self, queue: Sized) -> None:
        self._queue = queue
        self.coming = 0
        """Their number."""
        self._waiter: asyncio.Future[None] | None = None  # Of the proposal that waits for them.
        self._fruitless = 0  # The number of waits in a row without an arrival, for example because a client is slow.
        self._passes = 0  # The number of proposals that must not wait, for this reason.

    def expect(self) -> None:
        """Note that an append is being received. Call `came` afterwards in any case."""
        self.coming += 1

    def came(self) -> None:
        """Note that an expected append is about to be in the queue, or never will."""
        self.coming -= 1
        if not self.coming:
            self._let_go()

    async def gathered(self) -> None:
        """Wait briefly for expected appends. For the queue's committer, before it proposes.

        Without load this takes no time. Under load it makes batches larger, and one large batch costs less than two
        small ones.
        """
        if not self.coming:
            return
        if self._passes:
            self._passes -= 1
            return
        before = len(self._queue)
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(GATHER_SECONDS, self._let_go)
        try:
            await self._waiter
        finally:
            self._waiter = None
            timer.cancel()
        self._fruitless = 0 if len(self._queue) > before else min(self._fruitless + 1, MAX_FRUITLESS)
        self._passes = (1 << self._fruitless) - 1

    def _let_go(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Inbox:
    """A `MessageSource` of an append's messages after the first. `close` it at the end."""

    def __init__(self, context: MessageSource, budget: ReceiveBudget) -> None:
        self._context = context
        self._budget = budget
        self._held = 0
        self.deadlines = budget.deadlines
        self._messages: deque[AppendMessage | CorantoError | None] = deque()

    async def read(self) -> AppendMessage | None:
        """Return the next message, or None at the end of the stream. Raises the error of receiving it."""
        if not self._messages:
            return await next_message(self._context, pb.AppendRequest)
        found = self._messages.popleft()
        if isinstance(found, CorantoError):
            raise found
        return found

    async def receive(
        self, request: pb.AppendRequest, arrivals: Arrivals, min_rate: int, clock: Clock
    ) -> BufferedContent | None:
        """Receive the append's messages ahead, before it is in the queue of these `arrivals`.

        Returns its content if that is complete and follows the rules that do not depend on its journal; otherwise None.
        """
        budget, messages, read = self._budget, self._messages, self._context.read
        each = budget.bytes_per_append
        if not 0 < each <= MAX_BUFFERED_BYTES - budget.held:
            return None
        self._held = each
        budget.held += each
        arrivals.expect()
        guard = MinRateGuard(min_rate, clock, budget.deadlines)
        contents: list[Bytes] = []
        size = 0
        try:
            while size <= each:
                message = await read()
                if type(message) is not ContentMessage:
                    message = _message(message)
                    messages.append(message)
                    if message is None or has_parameters(message):
                        return None
                else:
                    messages.append(message)
                content = message.content
                if not content:
                    break
                guard.earn(len(content))
                contents.append(content)
                size += len(content)
            else:
                self._held = size
                budget.held += size - each
                return None
            message = _message(await read())
            messages.append(message)
            if message is not None:
                return None
        except asyncio.CancelledError:
            underflow = guard.underflow()
            if underflow is None:
                raise
            messages.append(underflow)  # Its journal may refuse it with a better reason.
            return None
        except AppendUnderflow as problem:
            messages.append(problem)
            return None
        finally:
            arrivals.came()
            guard.close()
        self._held = size
        budget.held += size - each
        if not size and of_registers.change(request):
            return None
        return BufferedContent(contents[0] if len(contents) == 1 else b"".join(contents), len(contents))

    def close(self) -> None:
        """Return the reserved bytes to the budget."""
        self._budget.held -= self._held
        self._held = 0


def has_parameters(message: AppendMessage) -> bool:
    """Return True if a message of the stream holds anything but content."""
    return not isinstance(message, ContentMessage) and len(message.ListFields()) > bool(message.content)


def _message(message: object) -> AppendMessage | None:
    """Return a message as read, or None at the end. Raises InvalidInput for bytes that are not a message."""
    if isinstance(message, _MESSAGES):
        return message
    require_readable(message)
    return None


class MinRateGuard:
    """Cancels the current task, or raises AppendUnderflow, if its client sends too slowly.

    Nearly all clients are done before their first credit may be used up. A slower one gets a timer of its own then.
    """

    closed = False
    due = math.inf
    _underflow: AppendUnderflow | None = None
    _timer: asyncio.TimerHandle | None = None
    _task: asyncio.Task[object] | None = None

    def __init__(self, min_rate: int, clock: Clock, deadlines: DeadlineQueue, flow: FlowControl | None = None) -> None:
        """`flow` accounts for the client's bytes, and has begun with its `min_rate`.

        Without it, only their times and sizes are noted until the first check, which costs less.
        """
        self._min_rate = min_rate
        self._clock = clock
        self._flow = flow
        self._begun = clock.monotonic()
        self._earned: list[tuple[float, int]] = []  # While there is no flow.
        self.reading = flow is None
        """True while we wait for the client. Without a flow, work between two messages takes no time."""
        if min_rate:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            self.due = self._loop.time() + BURST_SECONDS
            deadlines.add(self)

    async def read(self, source: MessageSource) -> AppendMessage | None:
        """Return the client's next message, or None at the end of its stream. Raises AppendUnderflow."""
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
            if message.content:  # An empty message comes once, at the end. The timer covers the wait for it.
                self._tick()
            return message
        self._tick()
        require_readable(message)
        return None

    def earn(self, size: int) -> None:
        """Note that `size` bytes were read. Raises AppendUnderflow."""
        if self._flow is None:
            self._earned.append((self._clock.monotonic(), size))
        else:
            self._tick()
            self._flow.chunk(size)

    def _tick(self) -> None:
        """Charge the client for the time passed, except when our own check is late. Raises AppendUnderflow."""
        assert self._flow is not None
        now = self._clock.monotonic()
        if self._is_late():
            self._flow.forgive(now)
        self._flow.tick(now)

    def _is_late(self) -> bool:
        return self._task is not None and self._loop.time() - self.due > LATE_SECONDS

    def underflow(self) -> AppendUnderflow | None:
        """Return the underflow that caused a cancellation, which the caller catches. None if it has another cause."""
        if self._underflow is None or self._task is None or self._task.uncancel() > 0:
            return None
        return self._underflow

    def close(self) -> None:
        self.closed = True
        self._task = None
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Cancel the task if the client is too slow, now that its credit may be used up. Else set the next check."""
        flow, now, busy = self._flow, self._clock.monotonic(), not self.reading or self._is_late()
        if flow is None:
            flow = self._flow = FlowControl()
            flow.start(self._min_rate, 0, self._begun)
        earned, self._earned = self._earned, []
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
