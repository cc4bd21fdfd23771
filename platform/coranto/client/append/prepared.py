"""Appends of complete content, with retries."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import grpc.aio

from coranto.client.append.appender import MAX_MESSAGE_BYTES, Appender
from coranto.client.append.outcome import checked, failed_commit, outcome_unknown, subject_of
from coranto.client.append.stream import MAX_CONTENT_BYTES, NotSent
from coranto.client.call_ends import cancelled_from_outside
from coranto.client.dispatch import Dispatcher
from coranto.client.reader import TRANSIENT
from coranto.client.retry import Retry, wait_or_raise
from coranto.client.values import AppendResult
from coranto.effects import Clock
from coranto.errors import AppendOutcomeUnknown, CorantoError, Unavailable
from coranto.security.tokens import Capability
from coranto.tracing import TraceSpan
from coranto.wire import protocol_pb2 as pb


class PreparedAppend:
    """An append from `JournalClient.prepare`, whose content is given to `commit`.

    `begin` opens the call early. After `begin`, either commit or abort.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        clock: Clock,
        parameters: pb.AppendRequest,
        retry_timeout: float,
        *,
        retry_unknown: bool = False,
        registers: bool = True,
        within: TraceSpan | None = None,
    ) -> None:
        """The append's span is a child of `within`, by default of the current span."""
        self._dispatcher = dispatcher
        self._clock = clock
        self._parameters = parameters
        self._retry = Retry(retry_timeout)
        self._retry_unknown = retry_unknown
        self._registers = registers
        self._begun: Appender | None = None
        tracer = dispatcher.tracer
        self._span = None if tracer is None else tracer.span("append", parameters.journal, "CLIENT", within=within)

    def begin(self) -> None:
        """Open the call early. Only `commit` raises errors. Does nothing if the content may use a stream."""
        append = self._appender()
        try:
            if self._dispatcher.may_stream(self._parameters.journal):
                return
            append.begin()
        except CorantoError:
            return
        self._begun = append

    def abort(self) -> None:
        """Abort an append that was begun, unless `commit` has taken it over."""
        if self._begun is not None:
            self._begun.abort()
        if self._span is not None:
            self._span.end(status="rolled back")

    async def commit(self, content: bytes | Sequence[bytes]) -> AppendResult:
        """Append content atomically. Call it once. Raises the errors of `JournalClient.append`.

        After a cancellation the outcome is unknown.
        """
        may_repeat = False
        try:
            while True:
                try:
                    result = await self._attempt(content)
                except AppendOutcomeUnknown as error:
                    if not self._retry_unknown:
                        raise
                    may_repeat = True
                    await self._wait(error)
                except TRANSIENT as error:
                    await self._wait(error)
                else:
                    break
        except BaseException as error:
            if self._span is not None:
                self._span.end(error, attempts=self._retry.failures + 1)
            raise
        if self._span is not None:
            begin, end = result.begin, result.end
            self._span.end(begin=begin, end=end, bytes=end - begin, attempts=self._retry.failures + 1)
        return replace(result, may_repeat=True) if may_repeat else result

    async def _attempt(self, content: bytes | Sequence[bytes]) -> AppendResult:
        append, self._begun = self._begun, None
        try:
            small = _small(content) if append is None else None
            if small is not None and self._dispatcher.streams_appends:
                result = await _append_small(
                    self._dispatcher, self._parameters, small, self._span, registers=self._registers
                )
                if result is not None:
                    return result
            append = append or self._appender()
            if isinstance(content, bytes):
                return await append.commit(content)
            for piece in _joined(content):
                await append.write(piece)
            return await append.commit()
        except BaseException:
            if append is not None:
                append.abort()
            raise

    def _appender(self) -> Appender:
        return Appender(self._dispatcher, self._parameters, may_proxy=False, registers=self._registers, span=self._span)

    async def _wait(self, error: CorantoError) -> None:
        await wait_or_raise(self._retry, self._clock, error)


async def _append_small(
    dispatcher: Dispatcher, parameters: pb.AppendRequest, content: bytes, span: TraceSpan | None, *, registers: bool
) -> AppendResult | None:
    """Append content over the stream to the primary. Returns None if the broker serves no streams.

    A broker that is not the primary refuses the append. Raises the errors of `Appender.commit`.
    """
    journal, subject, length = parameters.journal, subject_of(parameters), len(content)
    chosen = await dispatcher.connected_to_primary(subject, journal)
    parameters.do_not_proxy = chosen.routed
    if not chosen.tokens.are_ready:
        await chosen.tokens.ready()
    metadata = chosen.tokens.for_journal(Capability.APPEND, journal)
    closed = Unavailable(f"{subject}: the connection to {chosen.endpoint} was closed")
    sending = False
    try:
        stream = await chosen.connection.append_streams.get(metadata)
        if stream is None:
            return None
        sending = True
        encoded = await stream.append(parameters, content, metadata, "" if span is None else span.traceparent)
    except NotSent as error:
        raise Unavailable(f"{subject}: {chosen.endpoint} could not serve it ({error})") from None
    except grpc.aio.AioRpcError as error:
        raise (failed_commit(chosen, subject, length, error) if sending else chosen.failure(subject, error)) from error
    except asyncio.CancelledError:
        if cancelled_from_outside():
            raise
        raise (outcome_unknown(subject, length, closed) if sending else closed) from None
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    response = pb.AppendResponse.FromString(encoded)
    return checked(chosen, response, subject, journal, length, digest, registers=registers)


def _small(content: bytes | Sequence[bytes]) -> bytes | None:
    """Return the content as one piece; None if it is too large for a stream."""
    if isinstance(content, bytes):
        return content if len(content) <= MAX_CONTENT_BYTES else None
    return b"".join(content) if sum(map(len, content)) <= MAX_CONTENT_BYTES else None


def _joined(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the pieces, with small ones joined into one message."""
    together: list[bytes] = []
    size = 0
    for piece in pieces:
        if together and size + len(piece) > MAX_MESSAGE_BYTES:
            yield b"".join(together)
            together, size = [], 0
        together.append(piece)
        size += len(piece)
    yield together[0] if len(together) == 1 else b"".join(together)
