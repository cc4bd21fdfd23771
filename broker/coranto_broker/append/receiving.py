"""Receiving an append's messages from its client, at a minimum rate and, if the append is small, ahead of the pipeline.

A small append is buffered before it is enqueued. So it does not hold the pipeline while its client sends, and may join
a batch (`coranto_broker.append.queue`). If the append is larger or invalid, its messages so far are replayed when it
owns the pipeline, and the rest is read then.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sized

from coranto.effects import Bytes, Clock
from coranto.errors import CorantoError
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import registers as of_registers
from coranto_broker.append.queued_append import BufferedContent
from coranto_broker.replication.flow_control import BURST_SECONDS, FlowControl
from coranto_broker.rpc.content import AppendMessage, ContentMessage
from coranto_broker.rpc.deadlines import DeadlineQueue
from coranto_broker.rpc.rolled_back import AppendUnderflow
from coranto_broker.rpc.source import MessageSource, next_message

LATE_SECONDS = 0.25
"""The lateness of a timer that shows that this process was busy, so that its client is not charged."""

GATHER_SECONDS = 0.002
"""The longest wait of a proposal for appends that are being received."""

MAX_FRUITLESS = 6
"""The limit of backoff: each fruitless wait in a row, up to this number, about doubles the number of skipped waits."""

MAX_BUFFERED_BYTES = 64 << 20
"""The most content that a broker receives ahead. Beyond it, appends first wait for the pipeline."""


class ReceiveBudget:
    """The budget of one broker for content that is received ahead, and its use."""

    def __init__(self, bytes_per_append: int) -> None:
        """`bytes_per_append` bounds the bytes of an append, except for its last message. 0 disables receiving ahead."""
        self.bytes_per_append = bytes_per_append
        self.deadlines = DeadlineQueue()
        self.first_message_deadlines = DeadlineQueue()
        """The deadlines of streams without a first message."""
        self.held = 0
        """Bytes held or reserved."""


class Arrivals:
    """The appends that are being received and may soon be enqueued."""

    def __init__(self, queue: Sized) -> None:
        self._queue = queue
        self.coming = 0
        """Their number."""
        self._waiter: asyncio.Future[None] | None = None  # Of a waiting proposal.
        self._fruitless = 0  # Waits in a row without an arrival, for example because a client is slow.
        self._passes = 0  # The next proposals that skip the wait.

    def expect(self) -> None:
        """Count an append that is being received. Call `came` afterwards in any case."""
        self.coming += 1

    def came(self) -> None:
        """Note that an expected append is about to be enqueued, or was dropped."""
        self.coming -= 1
        if not self.coming:
            self._let_go()

    async def gathered(self) -> None:
        """Wait briefly for expected appends before a proposal. For the queue's committer.

        Without load this takes no time. Under load it makes batches larger, which costs less.
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
    """The messages of an append after the first. `close` it at the end."""

    def __init__(self, context: MessageSource, budget: ReceiveBudget, min_rate: int, clock: Clock) -> None:
        """`min_rate` is the client's minimum rate in bytes per second, or 0."""
        self._context = context
        self._budget = budget
        self._min_rate = min_rate
        self._clock = clock
        self._held = 0
        self._messages: deque[AppendMessage | CorantoError | None] = deque()  # Received, and to be replayed.

    async def read(self) -> AppendMessage | None:
        """Return the next message, or None at the end. Raises the error of receiving it."""
        if not self._messages:
            return await next_message(self._context, pb.AppendRequest)
        found = self._messages.popleft()
        if isinstance(found, CorantoError):
            raise found
        return found

    def guard(self) -> MinRateGuard:
        """Begin to require the minimum rate."""
        return MinRateGuard(self.read, self._min_rate, self._clock, self._budget.deadlines)

    async def receive(self, request: pb.AppendRequest, arrivals: Arrivals) -> BufferedContent | None:
        """Receive the append's messages before it is enqueued in the queue of `arrivals`.

        Returns its content if that is complete and valid for any journal; otherwise None.
        """
        budget, most = self._budget, self._budget.bytes_per_append
        if not 0 < most <= MAX_BUFFERED_BYTES - budget.held:
            return None
        self._held = most
        budget.held += most
        arrivals.expect()
        guard, messages, contents, size = self.guard(), list[AppendMessage | CorantoError | None](), list[Bytes](), 0
        try:
            while size <= most:
                messages.append(message := await guard.read())
                if message is None or has_parameters(message):
                    return None
                if not message.content:
                    break
                contents.append(message.content)
                size += len(message.content)
            else:
                return None
            messages.append(message := await guard.read())
            if message is not None or (not size and of_registers.change(request)):
                return None
        except AppendUnderflow as problem:
            messages.append(problem)  # Its journal may have a more important reason to refuse it.
            return None
        finally:
            guard.close()
            self._messages.extend(messages)
            self._held = size
            budget.held += size - most
            arrivals.came()
        return BufferedContent(contents[0] if len(contents) == 1 else b"".join(contents), len(contents))

    def close(self) -> None:
        """Return the reserved bytes to the budget."""
        self._budget.held -= self._held
        self._held = 0


def has_parameters(message: AppendMessage) -> bool:
    """Return True if a message has fields other than content."""
    return not isinstance(message, ContentMessage) and len(message.ListFields()) > bool(message.content)


class MinRateGuard:
    """Reads messages of a client, and raises AppendUnderflow if it sends too slowly.

    Nearly all clients complete within their initial credit. So reads are only recorded, until the first check when the
    credit may be used up. A slower client then gets a timer of its own. Only the time of reads is charged.
    """

    closed = False
    due = math.inf
    _underflow: AppendUnderflow | None = None
    _timer: asyncio.TimerHandle | None = None
    _task: asyncio.Task[object] | None = None

    def __init__(
        self,
        read: Callable[[], Awaitable[AppendMessage | None]],
        min_rate: int,
        clock: Clock,
        deadlines: DeadlineQueue,
    ) -> None:
        self._read = read
        self._min_rate = min_rate
        self._clock = clock
        self._flow: FlowControl | None = None
        self._reads: list[tuple[float, float, int]] = []  # Begin, end and bytes of reads since the last check.
        self._begun = clock.monotonic()
        self._reading_since: float | None = None
        if min_rate:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            self.due = self._loop.time() + BURST_SECONDS
            deadlines.add(self)

    async def read(self) -> AppendMessage | None:
        """Return the client's next message, or None at the end of its stream. Raises AppendUnderflow."""
        if not self._min_rate:
            return await self._read()
        if (underflow := self._underflow) is not None:
            raise underflow
        begin = self._reading_since = self._clock.monotonic()
        try:
            message = await self._read()
        except asyncio.CancelledError:
            if self._underflow is None or self._task is None or self._task.uncancel() > 0:
                raise
            raise self._underflow from None
        finally:
            self._reading_since = None
        if message is not None and message.content:  # The timer covers the wait for the empty message at the end.
            self._reads.append((begin, self._clock.monotonic(), len(message.content)))
        return message

    def close(self) -> None:
        self.closed = True
        self._task = None
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Cancel the task if the client has used up its credit. Otherwise schedule the next check."""
        now, since, flow = self._clock.monotonic(), self._reading_since, self._flow
        is_late = self._loop.time() - self.due > LATE_SECONDS
        if flow is None:
            flow = self._flow = FlowControl()
            flow.start(self._min_rate, 0, self._begun)
        reads, self._reads = self._reads, []
        try:
            for begin, end, size in (*reads, (now if since is None else since, now, 0)):
                flow.forgive(end if is_late else begin)
                flow.tick(end)
                if size:
                    flow.chunk(size)
        except AppendUnderflow as underflow:
            self._underflow = underflow
            if since is not None and self._task is not None:
                self._task.cancel()
            return
        self.due = self._loop.time() + flow.seconds_until_underflow()
        self._timer = self._loop.call_at(self.due, self.check)
