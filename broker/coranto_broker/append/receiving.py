"""Receiving an append's messages from its client, at a minimum rate.

A small append is buffered before it is enqueued. So it does not hold the pipeline while its client sends, and may join
a batch (`coranto_broker.append.queue`). If the append is larger or invalid, its messages so far are replayed when it
owns the pipeline, and the rest is read then: in STREAM_CONTENT, each message goes to all replicas immediately.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sized
from contextlib import closing

from coranto.effects import Bytes, Clock
from coranto.errors import CorantoError, InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import registers as of_registers
from coranto_broker.append.decision import TORN_LINE, Refuse, is_torn, judge_content
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.host import AppendHost
from coranto_broker.append.overload import MAX_BUFFERED_BYTES, ReceiveBudget
from coranto_broker.append.queued_append import QueuedAppend
from coranto_broker.append.states import AppendEvent
from coranto_broker.replication.flow_control import BURST_SECONDS, FlowControl
from coranto_broker.replication.pipeline import rolled_back
from coranto_broker.replication.resolver import Resolution
from coranto_broker.rpc.content import AppendMessage, ContentMessage
from coranto_broker.rpc.rolled_back import AppendUnderflow
from coranto_broker.rpc.source import MessageSource, next_message
from coranto_broker.spool.spool import Hash, new_sum

LATE_SECONDS = 0.25
"""The delay of a timer above which this process counts as busy, and the client is not charged."""

GATHER_SECONDS = 0.002
"""The maximum time that a proposal waits for appends that are being received."""

MAX_EMPTY_WAITS = 6
"""The limit of the backoff: each further wait without an arrival, up to this number, about doubles the skips."""

THROTTLE_QUANTUM_SECONDS = 0.05


class Arrivals:
    """The appends that are being received and may soon be enqueued."""

    def __init__(self, queue: Sized) -> None:
        self._queue = queue
        self.coming = 0
        """The number of these appends."""
        self._waiter: asyncio.Future[None] | None = None  # Of a waiting proposal.
        self._empty_waits = 0  # Waits in a row without an arrival, for example because a client is slow.
        self._skips = 0  # The next proposals that skip the wait.

    def expect(self) -> None:
        """Count an append that is being received. Call `arrived` afterwards in any case."""
        self.coming += 1

    def arrived(self) -> None:
        """Count an expected append that is about to be enqueued, or was dropped."""
        self.coming -= 1
        if not self.coming:
            self._wake()

    async def wait_for_arrivals(self) -> None:
        """Wait briefly for expected appends before a proposal. For the queue's committer.

        Returns immediately without load. Under load, it makes batches larger, and so more efficient.
        """
        if not self.coming:
            return
        if self._skips:
            self._skips -= 1
            return
        before = len(self._queue)
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(GATHER_SECONDS, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            timer.cancel()
        self._empty_waits = 0 if len(self._queue) > before else min(self._empty_waits + 1, MAX_EMPTY_WAITS)
        self._skips = (1 << self._empty_waits) - 1

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Inbox:
    """The messages of an append after the first. `close` it at the end."""

    def __init__(self, context: MessageSource, budget: ReceiveBudget, min_rate: int, clock: Clock) -> None:
        """`min_rate` is the client's minimum rate in bytes per second, or 0."""
        self._context = context
        self.budget = budget
        self.min_rate = min_rate
        self.clock = clock
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

    async def receive(self, append: QueuedAppend, arrivals: Arrivals) -> None:
        """Receive an append's messages before it is enqueued in the queue of `arrivals`.

        Sets `append.content` if it is complete, and valid regardless of the journal.
        """
        budget, most = self.budget, self.budget.bytes_per_append
        if not 0 < most <= MAX_BUFFERED_BYTES - budget.held:
            return
        self._held = most
        budget.held += most
        arrivals.expect()
        messages, contents, size = list[AppendMessage | CorantoError | None](), list[Bytes](), 0
        guard = MinRateGuard(self)
        try:
            while size <= most:
                messages.append(message := await guard.read())
                if message is None or has_parameters(message):
                    return
                if not message.content:
                    break
                contents.append(message.content)
                size += len(message.content)
            else:
                return
            messages.append(message := await guard.read())
            if message is not None or (not size and of_registers.change(append.request)):
                return
            append.content = contents[0] if len(contents) == 1 else b"".join(contents)
            append.total_chunks = len(contents)
        except AppendUnderflow as problem:
            messages.append(problem)  # The journal may have a more important reason to refuse the append.
        finally:
            guard.close()
            self._messages.extend(messages)
            self._held = size
            budget.held += size - most
            arrivals.arrived()

    def close(self) -> None:
        """Return the reserved bytes to the budget."""
        self.budget.held -= self._held
        self._held = 0


def has_parameters(message: AppendMessage) -> bool:
    """Return True if a message has fields other than content."""
    return not isinstance(message, ContentMessage) and len(message.ListFields()) > bool(message.content)


class MinRateGuard:
    """Reads messages of an inbox, and raises AppendUnderflow if the client sends too slowly. `close` it at the end.

    Nearly all clients complete within their initial credit. So reads are only recorded until the first check, when the
    credit may be used up. A slower client then gets its own timer. Only the time of reads is charged.
    """

    closed = False
    due = math.inf
    _underflow: AppendUnderflow | None = None
    _timer: asyncio.TimerHandle | None = None
    _task: asyncio.Task[object] | None = None

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._clock = inbox.clock
        self._flow: FlowControl | None = None
        self._reads: list[tuple[float, float, int]] = []  # Begin, end and bytes of reads since the last check.
        self._begun = inbox.clock.monotonic()
        self._reading_since: float | None = None
        if inbox.min_rate:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            self.due = self._loop.time() + BURST_SECONDS
            inbox.budget.deadlines.add(self)

    async def read(self) -> AppendMessage | None:
        """Return the client's next message, or None at the end of its stream. Raises AppendUnderflow."""
        if not self._inbox.min_rate:
            return await self._inbox.read()
        if (underflow := self._underflow) is not None:
            raise underflow
        begin = self._reading_since = self._clock.monotonic()
        try:
            message = await self._inbox.read()
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
            flow.start(self._inbox.min_rate, 0, self._begun)
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


class ContentStream:
    """The content of one append so far: the range [begin, end) after the committed content."""

    def __init__(self, fsm: AppendFsm) -> None:
        """`fsm` owns the pipeline, in STREAM_CONTENT."""
        assert fsm.held.pipeline is not None
        self.fsm = fsm
        fsm.is_streaming = True
        self.append = fsm.append
        self.pipeline = fsm.held.pipeline
        self.begin = self.end = self.pipeline.spool.end
        # In an empty fragment, the spool's sum of the fragment is also the append's sum.
        self._sum: Hash | None = new_sum() if self.pipeline.spool.fragment.length else None
        self._is_committing = self._is_torn = False

    async def receive(self, host: AppendHost, flow: FlowControl) -> Refuse | None:
        """Send the client's messages to all replicas. Return None at a commit, or the refusal. Raises other errors."""
        assert self.append.inbox is not None
        with closing(MinRateGuard(self.append.inbox)) as guard:
            while (message := await guard.read()) is not None:
                if size := len(message.content):
                    await host.quotas.pace_append(self.append.caller, size)
                    await charge(host, self.append, flow, size)
                if (refusal := self.client_sent(message)) is not None:
                    return refusal
                if (error := self.pipeline.error) is not None:
                    raise rolled_back(error)
                await self.pipeline.drain()  # Slow replicas, the local one included, catch up.
            await self.pipeline.written()
            return self.client_ended()

    def client_sent(self, message: AppendMessage) -> Refuse | None:
        """Send a message of the client to all replicas, or refuse it. Raises InvalidInput."""
        content, refusal = message.content, None
        if self._is_committing:
            raise InvalidInput("expected the end of the stream after the empty message that commits")
        if has_parameters(message):
            raise InvalidInput("only the first message may hold more than content", field="AppendRequest.content")
        if not content:
            self._is_committing = True
        elif self.fsm.decided is None:
            refusal = Refuse(pb.INDEX_HAS_GREATER_OFFSET, self.pipeline.spool.registers)
        else:
            refusal = self._judge(len(content))
            if refusal is None:
                self._write(content)
        self.append.transition(AppendEvent.CLIENT_SENT)
        return refusal

    def client_ended(self) -> Refuse | None:
        """Handle the end of the client's stream. Raises InvalidInput without a commit."""
        if not self._is_committing:
            raise InvalidInput("unexpected EOF: an empty message commits, and none was sent")
        if self._is_torn:
            return Refuse(pb.NOT_ALLOWED, self.pipeline.spool.registers, TORN_LINE)
        return self._judge(0) if self.end == self.begin else None

    def sum_in(self, proposal: Fragment) -> bytes:
        """Return the SHA-1 of the content that `proposal` commits."""
        # The sum of an empty append is the SHA-1 of no bytes, unlike the sum of an empty fragment.
        return proposal.sum if self._sum is None and self.end > self.begin else (self._sum or new_sum()).digest()

    def _write(self, content: Bytes) -> None:
        """Send content to all replicas. The pipeline's `error` has failures."""
        self.pipeline.write(self.end - self.begin, content)
        if self._sum is not None:
            self.pipeline.spool.hash(self._sum, content)
        self.end += len(content)
        self._is_torn = is_torn(content, self.pipeline.whole_lines)

    def _judge(self, length: int) -> Refuse | None:
        spec, pipeline = self.append.resolved.spec, self.pipeline
        return judge_content(self.append.request, spec, length, pipeline.spool.registers, pipeline.refusal)


def start_flow(host: AppendHost, resolution: Resolution) -> FlowControl:
    """Start the flow control of an append, with its journal's maximum rate."""
    max_rate = resolution.spec.max_append_rate
    if host.max_append_rate:
        max_rate = min(max_rate or host.max_append_rate, host.max_append_rate)
    flow = resolution.require_replica.flow_control
    flow.start(0, max_rate, host.clock.monotonic())
    return flow


async def charge(host: AppendHost, append: QueuedAppend, flow: FlowControl, size: int) -> None:
    """Account for a chunk, and wait while the journal exceeds its rate."""
    invalidated = append.resolved.invalidated
    flow.tick(host.clock.monotonic())
    flow.chunk(size)
    while flow.throttled:
        await host.clock.sleep(min(flow.seconds_until_paid(), THROTTLE_QUANTUM_SECONDS))
        flow.tick(host.clock.monotonic())
        if invalidated is not None and invalidated.fired:
            flow.lift()
    append.delayed_chunks = flow.delayed_chunks
    if append.content is None:
        append.total_chunks = flow.total_chunks
