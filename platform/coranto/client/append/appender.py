"""One append: content is streamed to the broker, and commits wholly or not at all.

On the wire: a first message with the parameters, then messages of content, then one empty message, then the half-close.
Until the empty message is sent, no broker can commit. So a failure before it means that nothing was applied. After a
failure between it and the broker's answer, the append may have been applied, because a broker cannot always tell a
broken connection from the half-close.
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
    """An append under way. Use as `async with client.appender(journal) as append:`.

    The call starts with the first `write` or with `commit`. Leaving the block without a commit rolls back.
    Not for use by several tasks at once.
    """

    def __init__(
        self, dispatcher: Dispatcher, parameters: pb.AppendRequest, *, may_proxy: bool = True, registers: bool = True
    ) -> None:
        """`parameters` is the first message, well-formed. The appender owns it during the append.

        Without `registers` the registers of the result are not validated, for callers that rarely use them.
        Without `may_proxy` a broker that was wrongly taken for the primary refuses the append, instead of passing it
        on, for callers that then retry at the primary.
        """
        self._dispatcher = dispatcher
        self._parameters = parameters
        self._may_proxy = may_proxy
        self._registers = registers
        self._journal = parameters.journal
        self._subject = subject_of(parameters)
        self._state = _State.IDLE
        self._way: ChosenConnection | None = None
        self._call: Call | None = None
        self._ending: PeerStatus | None = None
        self._introduced = False  # The parameters were sent.
        self._asked = False  # The empty message may have been sent.
        self._digest = hashlib.sha1(usedforsecurity=False)
        self._length = 0

    async def __aenter__(self) -> Appender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def length(self) -> int:
        """The number of bytes written so far."""
        return self._length

    def begin(self) -> None:
        """Open the call before the first `write`, if this needs no waiting. Raises the errors of the first `write`."""
        if self._call is None:
            way = self._dispatcher.to_primary(self._journal)
            if way.routed or not self._dispatcher.has_choice:
                self._open(way)

    async def write(self, content: bytes) -> None:
        """Send content, and wait while the broker is slow to accept it. Empty content sends no content.

        Raises the broker's refusal (StatusError, RpcFailed) or Unavailable. Then nothing was applied, and the append
        has ended. Cancelling rolls the append back.
        """
        self._require(_State.IDLE, _State.STREAMING)
        await self._send(self._messages(content))

    async def commit(self, content: bytes = b"") -> AppendResult:
        """Commit the written content, with `content` behind it, and return its offsets. No content at all is a barrier.

        Raises the broker's refusal or Unavailable when nothing was applied. Raises AppendOutcomeUnknown when the
        broker's answer was lost, and CorruptData when the answer disagrees with the written content. After a
        cancellation the outcome is unknown too.
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
            raise self._failed_commit(await self._told(error)) from error
        except asyncio.CancelledError:
            self.abort()
            if cancelled_from_outside():
                raise
            raise outcome_unknown(self._subject, self._length, self._closed()) from None
        self._state = _State.ENDED
        result = self._checked(response)
        self._state = _State.COMMITTED
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

    def _open(self, way: ChosenConnection) -> Call:
        self._way = way
        self._parameters.do_not_proxy = way.routed and not self._may_proxy
        self._call = way.stub.Append(metadata=way.tokens.about(Capability.APPEND, self._journal))
        self._ending = PeerStatus(self._call)
        self._state = _State.STREAMING
        return self._call

    async def _opened(self) -> Call:
        return self._open(await self._dispatcher.connected_to_primary(self._subject, self._journal))

    async def _send(self, messages: Iterable[pb.AppendRequest]) -> Call:
        """Send messages, after the parameters. Raises the errors of `write`."""
        try:
            call = self._call or await self._opened()
            if not self._introduced:
                self._introduced = True
                await call.write(self._parameters)
            for message in messages:
                self._asked = message is _COMMIT and not call.done()
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
        """Return the reason for which the broker ended the call before the half-close was sent."""
        call, way = self._call, self._way
        assert call is not None
        assert way is not None
        self._state = _State.ENDED
        try:
            response = await call
        except grpc.aio.AioRpcError as error_of_call:
            failure = await self._told(error_of_call)
            return self._failed_commit(failure) if self._asked else way.failure(self._subject, failure)
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            return self._ended(self._closed())
        finally:
            call.cancel()
        way.answered(response.status, response.header)
        refusal = append_failure(response, self._subject)
        return refusal or CorruptData(f"{self._subject}: the broker answered OK before the commit was sent ({error})")

    async def _told(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Return the broker's status of a call that failed with `error`, if the broker tells one."""
        assert self._ending is not None
        return await self._ending.told(error)

    def _failed_commit(self, error: grpc.aio.AioRpcError) -> CorantoError:
        """Return the error of an append whose empty message may have been sent."""
        assert self._way is not None
        return failed_commit(self._way, self._subject, self._length, error)

    def _ended(self, failure: CorantoError) -> CorantoError:
        """Return the error of an append whose call ended without the broker's answer."""
        return outcome_unknown(self._subject, self._length, failure) if self._asked else failure

    def _closed(self) -> Unavailable:
        way = self._way or self._dispatcher.to_primary(self._journal)
        return Unavailable(f"{self._subject}: the connection to {way.endpoint} was closed")

    def _checked(self, response: pb.AppendResponse) -> AppendResult:
        assert self._way is not None
        return checked(
            self._way,
            response,
            self._subject,
            self._journal,
            self._length,
            self._digest.digest(),
            registers=self._registers,
        )


def _pieces(content: bytes) -> Iterator[bytes]:
    if len(content) <= MAX_MESSAGE_BYTES:
        if content:
            yield content
        return
    view = memoryview(content)
    for begin in range(0, len(content), MAX_MESSAGE_BYTES):
        yield bytes(view[begin : begin + MAX_MESSAGE_BYTES])
