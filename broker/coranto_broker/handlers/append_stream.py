"""The RPC AppendStream: many small appends over one call, each with its own decision and answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import grpc

from coranto.errors import InvalidInput
from coranto.member import call_errors
from coranto.security.admission import caller_of
from coranto.security.tokens import HEADER, LEEWAY_SECONDS, Capability, Claims, bearer_of
from coranto.wire.append_stream_pb2 import AppendAnswers, AppendBatch, StreamedAppend
from coranto_broker.append.entry import StreamOrder, recognize
from coranto_broker.append.overload import ITEM_BYTES, STREAM_APPENDS, STREAM_BYTES, Admission, StreamOverloaded
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.states import State
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.handlers.append import forward_buffered
from coranto_broker.handlers.errors import Context, log_failure
from coranto_broker.handlers.refusals import is_acceptable
from coranto_broker.quotas import AppendQuotaExceeded
from coranto_broker.rpc.first_message import first_message
from coranto_broker.rpc.source import InstantSink, require_readable

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

MAX_CONTENT_BYTES: Final = 1 << 20
"""The maximum content of one append, which must fit into a batch."""
ANSWER_BYTES: Final = 256 << 10
"""The bytes of answers in one message. An answer has all registers of its journal, and clients limit message sizes."""
_NOW_BYTES: Final = 32 << 10
"""The bytes of answers in one message that `write_now` sends. They no longer count as held once sent."""
MAX_TOKENS: Final = 1024
MAX_ORDERS: Final = 1024
_TURN_APPENDS: Final = 64
_Outcome = AppendOutcome | bytes | Exception


async def serve(broker: Broker, context: Context, admission: Admission) -> None:
    """Serve a stream until its client ends it. If the client disconnects, unproposed appends are dropped.

    Raises StreamOverloaded if the stream holds too much memory (`coranto_broker.append.overload`), and
    QuotaExceeded if its caller has too many open streams.
    """
    first = await first_message(context, broker.receive_budget.first_message_deadlines)
    require_readable(first)
    if not isinstance(first, AppendBatch) or first.appends:
        raise InvalidInput("the first message of the stream must be empty", field="AppendBatch.appends")
    stream = _Stream(broker, context, admission)
    with broker.quotas.stream(stream.caller):
        await stream.serve()


class _Tokens:
    """The claims of the tokens of a stream's appends. Each token is verified once."""

    def __init__(self, broker: Broker, context: Context) -> None:
        self._broker = broker
        self._context = context
        self._known: OrderedDict[str, Claims] = OrderedDict()
        self._epoch = broker.authorizer.epoch

    def claims_of(self, authorization: str) -> Claims:
        """Return the claims of an append. Raises Unauthenticated and PermissionDenied."""
        authorizer = self._broker.authorizer
        if authorizer.admits_all:
            return UNRESTRICTED
        if self._epoch != authorizer.epoch:
            self._known.clear()
            self._epoch = authorizer.epoch
        found = self._known.get(authorization)
        if found is None or (found is not UNRESTRICTED and found.exp + LEEWAY_SECONDS <= self._broker.clock.now()):
            metadata = self._context.invocation_metadata() or ()
            given = [authorization] if authorization else [value for name, value in metadata if name == HEADER]
            found = self._known[authorization] = authorizer.claims_of(bearer_of(given), Capability.APPEND)
            if len(self._known) > MAX_TOKENS:
                self._known.popitem(last=False)
        return found


class _Ready(NamedTuple):
    """An unsent answer: an encoded response, or a status code and its text. `size` is its held bytes."""

    number: int
    size: int
    response: bytes = b""
    code: int = 0
    error: str = ""


class _Stream:
    """The appends and answers of one stream."""

    def __init__(self, broker: Broker, context: Context, admission: Admission) -> None:
        self._broker = broker
        self._budget = broker.receive_budget
        self._context = context
        self._sink = cast("InstantSink", context)
        self._admission = admission
        self._tokens = _Tokens(broker, context)
        claims = self._tokens.claims_of("")  # The call itself must be authorized to append.
        self.caller = caller_of(claims, context.peer()) if broker.quotas.apply_to(claims) else ""
        """The caller whose quota the appends use; empty if there is none."""
        self._orders: dict[str, StreamOrder] = {}  # By journal.
        self._appends: dict[int, QueuedAppend | None] = {}  # Unanswered appends by id; None before validation.
        self._forwarding: set[asyncio.Task[None]] = set()
        self._ready: deque[_Ready] = deque()
        self._sends_soon = self._sending = False
        self._largest = 0  # The largest answer, as an estimate for further ones.
        self.held = 0
        """The held bytes (see `coranto_broker.append.overload`)."""
        self.waits_since = 0.0
        self._given_up: StreamOverloaded | None = None  # The error that ends the stream, if any.
        self._task = asyncio.current_task()
        self._is_ready, self._has_capacity = asyncio.Event(), asyncio.Event()
        self._exits = self._ended = self._closed = False

    async def serve(self) -> None:
        """Serve the stream until its client ends it. Raises StreamOverloaded."""
        broker, context = self._broker, self._context
        broker.append_streams[self] = None
        await context.write(AppendAnswers(closing=broker.is_stopping, frames=broker.frames))
        sending = asyncio.create_task(self.send())
        try:
            while isinstance(batch := await context.read(), AppendBatch):
                await self.take_all(batch)
            require_readable(batch)
            self._ended = True
            self._is_ready.set()
            await sending
        except asyncio.CancelledError:
            if self._given_up is None or self._task is None or self._task.uncancel() > 0:
                raise
            raise self._given_up from None
        except StreamOverloaded as error:
            self._given_up = error
            raise
        finally:
            if self._given_up is not None:
                broker.metrics.append_streams_ended.labels(self._given_up.reason).inc()
            broker.append_streams.pop(self, None)
            sending.cancel()
            self._close()

    async def take_all(self, batch: AppendBatch) -> None:
        """Start the appends of a message as capacity allows, and return when there is capacity for another message.

        Raises InvalidInput for an id that is in use, and StreamOverloaded.
        """
        sizes = [len(append.content) + ITEM_BYTES for append in batch.appends]
        self._hold(sum(sizes))
        self._budget.require_capacity(self)
        refusal = None
        if self.caller:
            content = sum(sizes) - len(sizes) * ITEM_BYTES
            try:
                await self._broker.quotas.admit_appends(self.caller, len(sizes), content)
            except AppendQuotaExceeded as error:
                refusal = error
        for number, append in enumerate(batch.appends, 1):
            if self._appends and self._admission.is_full:
                await self._wait_for_turn()
            self.take(append, sizes[number - 1], refusal)
            if number % _TURN_APPENDS == 0:
                await asyncio.sleep(0)
                await self.wait_for_capacity(sum(sizes[number:]))
        await self.wait_for_capacity()

    def take(self, append: StreamedAppend, size: int, refusal: AppendQuotaExceeded | None = None) -> None:
        """Start an append of `size` held bytes, or answer it with `refusal`. Raises InvalidInput for an id in use."""
        if append.id in self._appends:
            raise InvalidInput(f"append {append.id} of this stream is not answered yet", field="StreamedAppend.id")
        self._appends[append.id] = None
        self._admission.enter_in_turn()
        answer: bytes | Exception | None = refusal
        if answer is None:
            try:
                answer = self._begin(append, size)
            except Exception as error:  # noqa: BLE001  # The error fails only this append.
                answer = error
        if answer is not None:
            self._answer(append.id, append.request.journal, size, answer)

    def _begin(self, append: StreamedAppend, size: int) -> bytes | None:
        """Validate an append and enqueue it, or return its response. Raises its error."""
        request, broker, content = append.request, self._broker, append.content
        begun = broker.clock.monotonic()
        if request.content:
            raise InvalidInput("content belongs in StreamedAppend.content", field="StreamedAppend.request.content")
        if len(content) > MAX_CONTENT_BYTES:
            raise InvalidInput(
                f"{len(content)} bytes are too many for a stream, which accepts {MAX_CONTENT_BYTES}; use Append",
                field="StreamedAppend.content",
            )
        claims = self._tokens.claims_of(append.authorization)
        queued = QueuedAppend(request, claims, content, begun, partial(self._settled, append.id, size))
        if not recognize(broker.appends, queued):
            if not is_acceptable(broker, request, request.journal, claims):
                return broker.journal_not_found()
            if not request.journal:
                raise InvalidInput("an append must name its journal", field="AppendRequest.journal")
        if broker.tracer is not None and append.traceparent:
            queued.span = broker.tracer.continued("append", request.journal, append.traceparent)
        order = self._orders.get(request.journal)
        if order is None:
            if len(self._orders) >= MAX_ORDERS:
                self._orders = {journal: each for journal, each in self._orders.items() if not each.is_idle}
            order = self._orders[request.journal] = StreamOrder(broker.appends)
        self._appends[append.id] = queued
        order.add(queued)
        return None

    def _settled(self, number: int, size: int, append: QueuedAppend) -> None:
        """Answer a settled append, or forward it."""
        if append.state is not State.PROXY:
            self._end(number, size, append, append.outcome)
        elif not self._closed:
            task = asyncio.create_task(self._forward(number, size, append))
            self._forwarding.add(task)
            task.add_done_callback(self._forwarding.discard)

    async def _forward(self, number: int, size: int, append: QueuedAppend) -> None:
        outcome: _Outcome
        try:
            outcome = await forward_buffered(self._broker, append)
        except Exception as error:  # noqa: BLE001  # The error fails only this append.
            append.state, outcome = State.ERROR, error
            if append.span is not None:
                append.span.end(error)
        self._end(number, size, append, outcome)

    def _end(self, number: int, size: int, append: QueuedAppend, outcome: _Outcome | None) -> None:
        assert outcome is not None
        self._broker.appends.ended(append)
        self._orders[append.request.journal].ended()
        self._answer(number, append.request.journal, size, outcome)

    def _answer(self, number: int, journal: str, size: int, outcome: _Outcome) -> None:
        if self._closed:
            return
        self._admission.leave()
        self._appends.pop(number, None)
        if isinstance(outcome, AppendOutcome):
            try:
                outcome = outcome.encode()
            except Exception as error:  # noqa: BLE001  # The error fails only this append.
                outcome = error
        if isinstance(outcome, bytes):
            ready = _Ready(number, len(outcome) + ITEM_BYTES, outcome)
        else:
            code: grpc.StatusCode = log_failure(outcome, "AppendStream", self._context, journal)
            text = call_errors.public_text(outcome)
            ready = _Ready(number, len(text) + ITEM_BYTES, code=code.value[0], error=text)
        self._ready.append(ready)
        self._largest = max(self._largest, ready.size)
        self._hold(ready.size - size)
        if self._sending or self._ended or not self._sink.can_write_now:
            self._is_ready.set()
        elif not self._sends_soon:
            self._sends_soon = True
            asyncio.get_running_loop().call_soon(self._send_soon)
        self._has_capacity.set()
        try:
            self._budget.require_capacity(self)
        except StreamOverloaded as error:
            self.give_up(error)

    async def _wait_for_turn(self) -> None:
        """Wait while admission is full and this stream has appends under way."""
        with self._admission.waiting(self._has_capacity):
            while self._appends and self._admission.is_full:
                self._has_capacity.clear()
                await self._has_capacity.wait()

    def _hold(self, more: int) -> None:
        self.held += more
        self._budget.held += more

    async def wait_for_capacity(self, unread: int = 0) -> None:
        """Wait while too much is held, so that flow control slows the client down.

        `unread` are the held bytes of received appends that have not been started.
        """
        while (self._appends or self._ready) and (
            self.held - unread + len(self._appends) * self._largest > STREAM_BYTES
            or len(self._appends) + len(self._ready) > STREAM_APPENDS
            or self._budget.is_full
        ):
            self._has_capacity.clear()
            await self._has_capacity.wait()

    async def send(self) -> None:
        """Send answers until the stream has ended and all are sent, those that are ready together in one message."""
        while self._appends or not self._ended or self._ready:
            await self._is_ready.wait()
            self._is_ready.clear()
            self._sending = True
            while self._ready or self._exits:
                answers, taken = self._next_answers(ANSWER_BYTES)
                self._budget.watch(self)
                await self._context.write(answers)
                self._budget.unwatch(self)
                self._hold(-sum([each.size for each in taken]))
                self._has_capacity.set()
            self._sending = False

    def _send_soon(self) -> None:
        """Send the ready answers with `write_now`. If the client is slow, leave them to `send`."""
        self._sends_soon = False
        while self._ready and not self._sending and not self._closed:
            answers, taken = self._next_answers(_NOW_BYTES)
            if not self._sink.write_now(answers):
                self._exits = answers.closing or self._exits
                self._ready.extendleft(reversed(taken))
                self._is_ready.set()
                return
            self._hold(-sum([each.size for each in taken]))
        self._has_capacity.set()

    def _next_answers(self, most: int) -> tuple[AppendAnswers, list[_Ready]]:
        """Remove the answers of the next message, about `most` bytes, from the queue."""
        answers, taken, size = AppendAnswers(closing=self._exits), list[_Ready](), 0
        self._exits = False
        while self._ready and size < most:
            ready = self._ready.popleft()
            answers.answers.add(id=ready.number, response=ready.response, code=ready.code, error=ready.error)
            size += ready.size - ITEM_BYTES
            taken.append(ready)
        return answers, taken

    def give_up(self, error: StreamOverloaded) -> None:
        """End the stream with an error. Further calls have no effect."""
        if self._given_up is None and not self._closed and self._task is not None:
            self._given_up = error
            self._task.cancel()

    def announce_end(self) -> None:
        """Ask the client to send further appends elsewhere, since this broker is about to exit."""
        self._exits = True
        self._is_ready.set()

    def _close(self) -> None:
        """Drop all unproposed appends."""
        self._closed = True
        for order in self._orders.values():
            order.close()
        for append in list(self._appends.values()):
            self._admission.leave()
            if append is not None:
                append.leave()
                if append.span is not None:
                    append.span.end(asyncio.CancelledError())
        for task in self._forwarding:
            task.cancel()
        self._budget.unwatch(self)
        self._hold(-self.held)
