"""Appends whose content is given all at once, and that are retried after failures that applied nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from coranto.client.append_stream import MAX_CONTENT_BYTES
from coranto.client.appender import MAX_MESSAGE_BYTES, Appender
from coranto.client.dispatch import Dispatcher
from coranto.client.reader import TRANSIENT
from coranto.client.retry import Retry, wait_or_raise
from coranto.client.small_append import append_small
from coranto.client.values import AppendResult
from coranto.effects import Clock
from coranto.errors import AppendOutcomeUnknown, CorantoError
from coranto.wire import protocol_pb2 as pb


class PreparedAppend:
    """An append that waits for its content. Call `begin` if there is time until then, and later `commit`.

    Made by `JournalClient.prepare`. Abort an append that was begun and is not committed.
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
    ) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._parameters = parameters
        self._retry = Retry(retry_timeout)
        self._retry_unknown = retry_unknown
        self._registers = registers
        self._begun: Appender | None = None

    def begin(self) -> None:
        """Open the call, so that it is under way while content is made. Any error is left to `commit`.

        Does nothing if content may go over a stream, which is open already.
        """
        append = self._appender()
        try:
            if self._dispatcher.may_stream(self._parameters.journal):
                return
            append.begin()
        except CorantoError:
            return
        self._begun = append

    def abort(self) -> None:
        """Abort a begun append, unless `commit` goes on with it."""
        if self._begun is not None:
            self._begun.abort()

    async def commit(self, content: bytes | Sequence[bytes]) -> AppendResult:
        """Append content and commit it, wholly or not at all. Call it once. Raises as `JournalClient.append` does.

        After a cancellation the outcome is unknown.
        """
        may_repeat = False
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
                return replace(result, may_repeat=True) if may_repeat else result

    async def _attempt(self, content: bytes | Sequence[bytes]) -> AppendResult:
        append, self._begun = self._begun, None
        try:
            small = _small(content) if append is None else None
            if small is not None and self._dispatcher.streams_appends:
                result = await append_small(self._dispatcher, self._parameters, small, registers=self._registers)
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
                append.abort()  # If it has not ended, for example when `content` has the wrong type.
            raise

    def _appender(self) -> Appender:
        return Appender(self._dispatcher, self._parameters, may_proxy=False, registers=self._registers)

    async def _wait(self, error: CorantoError) -> None:
        await wait_or_raise(self._retry, self._clock, error)


def _small(content: bytes | Sequence[bytes]) -> bytes | None:
    """Return content that may go over a stream, in one piece; None if it is too large."""
    if isinstance(content, bytes):
        return content if len(content) <= MAX_CONTENT_BYTES else None
    return b"".join(content) if sum(map(len, content)) <= MAX_CONTENT_BYTES else None


def _joined(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the pieces, with small ones joined, so that each does not cost a message of its own."""
    together: list[bytes] = []
    size = 0
    for piece in pieces:
        if together and size + len(piece) > MAX_MESSAGE_BYTES:
            yield b"".join(together)
            together, size = [], 0
        together.append(piece)
        size += len(piece)
    yield together[0] if len(together) == 1 else b"".join(together)
