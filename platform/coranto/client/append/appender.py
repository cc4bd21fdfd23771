"""One append over its own call: content is streamed to the broker, and committed atomically.

On the wire: a message with the parameters, messages of content, an empty message, and the half-close. A broker commits
only after the empty message, so a failure before it means that nothing was applied. After it, the outcome is unknown
until the broker's answer, because a broker cannot always distinguish a broken connection from the half-close.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import grpc.aio

from coranto.client.append.outcome import checked, failed_commit, outcome_unknown, subject_of
from coranto.client.call_ends import CALL_ENDED, cancelled_from_outside
from coranto.client.dispatch import ChosenConnection, Dispatcher
from coranto.client.peer_status import PeerStatus
from coranto.client.responses import append_failure
from coranto.client.values import AppendResult
from coranto.errors import CorantoError, CorruptData, InvalidInput, Unavailable
from coranto.security.tokens import Capability
from coranto.tracing import TraceSpan, carried
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    Call = grpc.aio.StreamUnaryCall[pb.AppendRequest, pb.AppendResponse]

MAX_MESSAGE_BYTES = 1 << 20
_COMMIT = pb.AppendRequest()


class _State(enum.Enum):
    IDLE = "idle"
    STREAMING = "streaming"
    COMMITTED = "committed"
    ENDED = "rolled back"


class Appender:
    """One append of streamed content. Use as `async with client.appender(journal) as append:`, from one task.

    The call starts with the first `write` or with `commit`. Leaving the block without a commit rolls back.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        parameters: pb.AppendRequest,
        *,
        may_proxy: bool = True,
        registers: bool = True,
        span: TraceSpan | None = None,
    ) -> None:
        """`parameters` is a well-formed first message, which the appender owns during the append.

        Without `registers` the registers of the result are not validated. Without `may_proxy` a broker that is not the
        primary refuses the append instead of proxying it, for callers that retry at the primary. `span` is the append's
        span, which the caller ends. Without it, the appender makes a span that ends with the block.
        """
        self._dispatcher = dispatcher
        self._parameters = parameters
        self._may_proxy = may_proxy
        self._registers = registers
        self._journal = parameters.journal
        self._subject = subject_of(parameters)
        self._state = _State.IDLE
        self._chosen: ChosenConnection | None = None
        self._call: Call | None = None
        self._ending: PeerStatus | None = None
        self._introduced = False  # The parameters were sent.
        self._may_commit = False  # The empty message may have been sent.
        self._digest = hashlib.sha1(usedforsecurity=False)
        self._length = 0
        if span is None and dispatcher.tracer is not None:
            span = dispatcher.tracer.span("append", self._journal, "CLIENT")
        self._span = span

    async def __aenter__(self) -> Appender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
        if self._span is not None:
            self._span.end(error, bytes=self._length, status=self._state.value)

    @property
    def length(self) -> int:
        """The number of bytes written so far."""
        return self._length

    def begin(self) -> None:
        """Open the call before the first `write`, unless that would have to wait. Raises the errors of `write`."""
        if self._call is None:
            chosen = self._dispatcher.to_primary(self._journal)
            if (chosen.routed or not self._dispatcher.has_choice) and chosen.tokens.are_ready:
                self._open(chosen)

    async def write(self, content: bytes) -> None:
        """Send content, and wait until the broker's flow control accepts it. Empty content opens the call.

        Raises the broker's refusal (StatusError, RpcFailed) or Unavailable. Then the append has ended, and nothing was
        applied. Cancelling rolls the append back.
        """
        self._require(_State.IDLE, _State.STREAMING)
        await self._send(self._messages(content))

    async def commit(self, content: bytes = b"") -> AppendResult:
        """Write `content`, commit, and return the offsets. An append without any content is a barrier.

        Raises the broker's refusal or Unavailable if nothing was applied, AppendOutcomeUnknown if the broker's answer
        was lost, and CorruptData if the answer disagrees with the written content. After a cancellation the outcome is
        unknown.
        """
        self._require(_State.IDLE, _State.STREAMING)
        call = await self._send(self._messages(content, commit=True))
        if call.done():
            raise await self._refusal(None)
        try:
            with contextlib.suppress(*CALL_ENDED):
                await call.done_writing()
            response = await call
        except grpc.aio.AioRpcError as error:
            self._state = _State.ENDED
            raise self._failed_commit(await self._peer_error(error)) from error
        except asyncio.CancelledError:
            self.abort()
            if cancelled_from_outside():
                raise
            raise outcome_unknown(self._subject, self._length, self._closed()) from None
        self._state = _State.ENDED
        assert self._chosen is not None
        digest, registers = self._digest.digest(), self._registers
        result = checked(
            self._chosen, response, self._subject, self._journal, self._length, digest, registers=registers
        )
        self._state = _State.COMMITTED
        if self._span is not None:
            self._span.note(begin=result.begin, end=result.end)
        return result

    def abort(self) -> None:
        """Roll back. Does nothing when the append has already ended."""
        if self._state in (_State.COMMITTED, _State.ENDED):
            return
        self._state = _State.ENDED
        if self._call is not None:
            self._call.cancel()

    def _require(self, *states: _State) -> None:
        if self._state not in states:
            raise InvalidInput(f"{self._subject}: this append is {self._state.value}; begin another one")

    def _open(self, chosen: ChosenConnection) -> Call:
        self._chosen = chosen
        self._parameters.do_not_proxy = chosen.routed and not self._may_proxy
        metadata = chosen.tokens.for_journal(Capability.APPEND, self._journal)
        self._call = chosen.stub.Append(metadata=carried(metadata, self._span))
        self._ending = PeerStatus(self._call)
        self._state = _State.STREAMING
        return self._call

    async def _opened(self) -> Call:
        chosen = await self._dispatcher.connected_to_primary(self._subject, self._journal)
        await chosen.tokens.ready()
        return self._open(chosen)

    async def _send(self, messages: Iterable[pb.AppendRequest]) -> Call:
        """Send the parameters, unless they were sent already, and messages. Raises the errors of `write`."""
        try:
            call = self._call or await self._opened()
            if not self._introduced:
                self._introduced = True
                await call.write(self._parameters)
            for message in messages:
                self._may_commit = message is _COMMIT and not call.done()
                await call.write(message)
            return call
        except CALL_ENDED as error:
            raise await self._refusal(error) from error
        except asyncio.CancelledError:
            self.abort()
            if cancelled_from_outside():
                raise
            raise self._ended(self._closed()) from None

    def _messages(self, content: bytes, *, commit: bool = False) -> Iterator[pb.AppendRequest]:
        for piece in _pieces(content):
            self._digest.update(piece)
            self._length += len(piece)
            yield pb.AppendRequest(content=piece)
        if commit:
            yield _COMMIT

    async def _refusal(self, error: BaseException | None) -> CorantoError:
        """Return the error of a call that the broker ended before the half-close was sent."""
        call, chosen = self._call, self._chosen
        assert call is not None
        assert chosen is not None
        self._state = _State.ENDED
        try:
            response = await call
        except grpc.aio.AioRpcError as error_of_call:
            failure = await self._peer_error(error_of_call)
            return self._failed_commit(failure) if self._may_commit else chosen.failure(self._subject, failure)
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            return self._ended(self._closed())
        finally:
            call.cancel()
        chosen.answered(response.status, response.header)
        refusal = append_failure(response, self._subject)
        return refusal or CorruptData(f"{self._subject}: the broker answered OK before the commit was sent ({error})")

    async def _peer_error(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        assert self._ending is not None
        return await self._ending.error_of(error)

    def _failed_commit(self, error: grpc.aio.AioRpcError) -> CorantoError:
        """Return the error of an append whose empty message may have been sent."""
        assert self._chosen is not None
        return failed_commit(self._chosen, self._subject, self._length, error)

    def _ended(self, failure: CorantoError) -> CorantoError:
        """Return the error of an append whose call ended without the broker's answer."""
        return outcome_unknown(self._subject, self._length, failure) if self._may_commit else failure

    def _closed(self) -> Unavailable:
        chosen = self._chosen or self._dispatcher.to_primary(self._journal)
        return Unavailable(f"{self._subject}: the connection to {chosen.endpoint} was closed")


def _pieces(content: bytes) -> Iterator[bytes]:
    if len(content) <= MAX_MESSAGE_BYTES:
        if content:
            yield content
        return
    view = memoryview(content)
    for begin in range(0, len(content), MAX_MESSAGE_BYTES):
        yield bytes(view[begin : begin + MAX_MESSAGE_BYTES])
