"""Many small appends over one call to one of Coranto's brokers.

A unary call costs a broker several times as much as a small append. So appends share a stream: one message has all
appends of a turn of the event loop, and another has all their answers. Gazette's brokers do not serve such streams.

If a stream breaks, the outcome is unknown for exactly the appends that were sent and not answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import grpc
import grpc.aio

from coranto.client.call_ends import CALL_ENDED
from coranto.security.call_tokens import Metadata
from coranto.transport.calls import MessageCall, rpc_error
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswer, AppendAnswers, AppendBatch, StreamedAppend

MAX_CONTENT_BYTES: Final = 1 << 16
"""The largest content that goes over a stream. Larger appends gain nothing, and would delay small ones."""

WINDOW_BYTES: Final = 4 << 20
"""The maximum bytes in flight: sent, and not answered."""

JOURNAL_BYTES: Final = WINDOW_BYTES // 4
"""One journal's share of the window, so that a stalled journal does not delay others."""

MIN_BYTES: Final = 4 << 10
"""The minimum bytes that an append takes of the window, which also limits the appends in flight to 1,024."""

CLOSE_SECONDS: Final = 1.0
"""The longest wait for a broker to end a stream after this client ended it. Then the call is cancelled."""

_BATCH_BYTES: Final = 1 << 20
_SPLIT_ANSWERS: Final = 16
"""Fewer answers than this are delivered together, because smaller messages would cost more than they gain."""
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

_ENDED_IN_ORDER: Final = "the broker ended the stream"


class NotSent(Exception):
    """The stream ended before an append was sent on it, so that nothing was applied."""


@dataclass(slots=True)
class _JournalAppends:
    """The unsent appends of one journal, and its bytes in flight."""

    unsent: deque[tuple[StreamedAppend, asyncio.Future[AppendAnswer]]] = field(default_factory=deque)
    sent_bytes: int = 0


class _SentAppend(NamedTuple):
    done: asyncio.Future[AppendAnswer]
    journal: str
    length: int


class AppendStream:
    """An open stream. It sends appends in the order of the calls of `append`."""

    def __init__(self, call: MessageCall[AppendAnswers]) -> None:
        """The broker has answered the first message of `call`."""
        self._call = call
        self._journals: dict[str, _JournalAppends] = {}
        self._sent: dict[int, _SentAppend] = {}
        self._sent_bytes = 0
        self._last_id = 0
        self._more = asyncio.Event()
        self._closing = False
        self._idle: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten: AppendBatch | None = None  # A batch that `write_now` did not accept.
        self._sends_soon = self._writing = False
        self._writer = asyncio.create_task(self._write())
        call.receive(self._received, self._call_ended)

    @property
    def is_open(self) -> bool:
        """True while the stream accepts appends."""
        return not self._closing

    async def append(
        self, request: pb.AppendRequest, content: bytes, metadata: Metadata | None, traceparent: str = ""
    ) -> bytes:
        """Append `content`, and return the broker's encoded answer. `metadata` authorizes the append.

        `traceparent` is the context of a sampled span, if any.

        Raises NotSent if nothing was applied, and AioRpcError as a unary call would. Without an answer the code is
        UNAVAILABLE, and the outcome is unknown, as it is after a cancellation.
        """
        if self._closing:
            raise NotSent("the stream is closing")
        self._last_id += 1
        append = StreamedAppend(id=self._last_id, content=content)
        append.request.CopyFrom(request)
        if metadata:
            append.authorization = metadata[0][1]
        if traceparent:
            append.traceparent = traceparent
        done: asyncio.Future[AppendAnswer] = asyncio.get_running_loop().create_future()
        self._journals.setdefault(request.journal, _JournalAppends()).unsent.append((append, done))
        self._schedule_send()
        answer = await done
        if answer.code:
            code = _CODES.get(answer.code, grpc.StatusCode.UNKNOWN)
            raise rpc_error(code, answer.error)
        return answer.response

    async def is_idle_within(self, seconds: float) -> bool:
        """Wait at most `seconds` until every append is answered. Return False if some are still unanswered."""
        if self._is_idle:
            return True
        self._idle = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._idle,), timeout=seconds)
        self._idle = None
        return self._is_idle

    def finish(self) -> None:
        """Accept no more appends, and end once all accepted ones are answered."""
        self._closing = True
        self._more.set()

    async def close(self) -> None:
        """End the stream. The outcome of appends without an answer is unknown."""
        self._fail("the connection was closed")
        self.finish()
        # Wait for the broker to end the call: events of gRPC after the end of the event loop are reported as errors.
        await asyncio.wait((self._writer, self._ended), timeout=CLOSE_SECONDS)
        self._call.cancel()
        self._writer.cancel()
        await asyncio.wait((self._writer, self._ended), timeout=CLOSE_SECONDS)

    def _schedule_send(self) -> None:
        """Send appends at the end of this turn of the event loop, as far as the window allows."""
        if self._writing or self._closing or not self._call.can_write_now:
            self._more.set()
        elif not self._sends_soon:
            self._sends_soon = True
            asyncio.get_running_loop().call_soon(self._send_soon)

    def _send_soon(self) -> None:
        """Send appends without waking a task, unless the broker is slow."""
        self._sends_soon = False
        while not self._writing and not self._closing and (batch := self._next_batch()).appends:
            if not self._call.write_now(batch.SerializeToString()):
                self._unwritten, self._writing = batch, True
        if self._writing or self._closing:
            self._more.set()

    async def _write(self) -> None:
        """Send appends while the window has room, until the stream ends."""
        try:
            while True:
                batch, self._unwritten = self._unwritten or self._next_batch(), None
                if batch.appends:
                    self._writing = True
                    await self._call.write(batch)
                elif self._closing and not self._has_unsent:
                    await self._call.done_writing()
                    return
                else:
                    self._writing = False
                    self._more.clear()
                    await self._more.wait()
        except CALL_ENDED:
            self._closing = True  # `_call_ended` gets the reason.

    @property
    def _is_idle(self) -> bool:
        return not self._sent and not self._has_unsent

    def _signal_idle(self) -> None:
        if self._idle is not None and self._is_idle and not self._idle.done():
            self._idle.set_result(None)

    @property
    def _has_unsent(self) -> bool:
        return any(appends.unsent for appends in self._journals.values())

    def _next_batch(self) -> AppendBatch:
        """Remove the appends to send now, in the order of each journal, as far as the window and its share allow."""
        batch, size, full = AppendBatch(), 0, False
        for journal, appends in list(self._journals.items()):
            before = size
            while appends.unsent and not full:
                append, done = appends.unsent[0]
                length = max(append.ByteSize(), MIN_BYTES)
                if done.done():  # Its caller was cancelled before it was sent.
                    appends.unsent.popleft()
                elif appends.sent_bytes and appends.sent_bytes + length > JOURNAL_BYTES:
                    break
                elif (self._sent and self._sent_bytes + length > WINDOW_BYTES) or (
                    size and size + length > _BATCH_BYTES
                ):
                    full = True
                else:
                    appends.unsent.popleft()
                    batch.appends.append(append)
                    self._sent[append.id] = _SentAppend(done, journal, length)
                    self._sent_bytes += length
                    appends.sent_bytes += length
                    size += length
            if size > before:
                # Round robin: the next batch begins with the other journals.
                self._journals[journal] = self._journals.pop(journal)
            elif not appends.unsent and not appends.sent_bytes:
                del self._journals[journal]
            if full:
                break
        return batch

    def _call_ended(self, status: grpc.aio.AioRpcError | None) -> None:
        self.finish()
        self._fail(_ENDED_IN_ORDER if status is None else _describe(status))
        if not self._ended.done():
            self._ended.set_result(None)

    def _received(self, answers: AppendAnswers) -> None:
        first = self._first_part(len(answers.answers))
        self._deliver(answers.answers[:first] if first else answers.answers)
        if first:
            asyncio.get_running_loop().call_soon(self._deliver, answers.answers[first:])
        if answers.closing:
            self.finish()

    def _deliver(self, answers: Iterable[AppendAnswer]) -> None:
        for answer in answers:
            self._answered(answer)
        self._signal_idle()
        if self._has_unsent or self._closing:
            self._schedule_send()

    def _first_part(self, answers: int) -> int:
        """Return the number of a message's answers to deliver one turn of the event loop before the others; 0 for all.

        A message that answers most appends in flight would make broker and client alternate, each waiting for the
        other. So half of the callers continue first. From then on the broker serves one half while the client prepares
        the other.
        """
        if answers < _SPLIT_ANSWERS:
            return 0
        under_way = len(self._sent) + sum(len(appends.unsent) for appends in self._journals.values())
        return answers // 2 if answers >= under_way * 3 // 4 else 0

    def _answered(self, answer: AppendAnswer) -> None:
        sent = self._sent.pop(answer.id, None)
        if sent is None:
            return  # A repeated answer.
        self._sent_bytes -= sent.length
        appends = self._journals[sent.journal]
        appends.sent_bytes -= sent.length
        if not appends.unsent and not appends.sent_bytes:
            del self._journals[sent.journal]
        if not sent.done.done():
            sent.done.set_result(answer)

    def _fail(self, problem: str) -> None:
        sent, self._sent, self._sent_bytes = self._sent, {}, 0
        journals, self._journals = self._journals, {}
        for each in sent.values():
            if not each.done.done():
                code = grpc.StatusCode.UNAVAILABLE.value[0]
                each.done.set_result(AppendAnswer(code=code, error=f"the stream broke before the answer ({problem})"))
        for appends in journals.values():
            for _, done in appends.unsent:
                if not done.done():
                    done.set_exception(NotSent(problem))
        self._signal_idle()


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
