"""The memory bounds of streams of appends, for clients that send and do not read.

A stream *holds* its unanswered appends and its unsent answers: their bytes, and ITEM_BYTES for each. The bounds have
three steps:

1. A stream that holds STREAM_BYTES or STREAM_APPENDS is not read until it holds less.
2. While all streams of the broker hold more than MAX_BUFFERED_BYTES, each is read only when it holds nothing, and a few
   appends at a time. So every client progresses, slowly.
3. A client that accepts no answer for ANSWER_TIMEOUT_SECONDS, during step 2 for SHORT_ANSWER_TIMEOUT_SECONDS, loses its
   stream. When all streams exceed MAX_HELD_BYTES, streams that hold more than SMALL_BYTES are ended.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from coranto.errors import CorantoError
from coranto_broker.append.receiving import MAX_BUFFERED_BYTES, ReceiveBudget

STREAM_BYTES: Final = 8 << 20
STREAM_APPENDS: Final = 4096
ITEM_BYTES: Final = 512
"""The bytes that each append and each answer counts in addition to its content."""
SMALL_BYTES: Final = 64 << 10
MAX_HELD_BYTES: Final = 256 << 20
ANSWER_TIMEOUT_SECONDS: Final = 30.0
SHORT_ANSWER_TIMEOUT_SECONDS: Final = 1.0
_CHECK_SECONDS: Final = 0.5


ANSWERS_UNREAD: Final = "answers unread"
TOO_MANY_BYTES: Final = "too many bytes"
REASONS: Final = (ANSWERS_UNREAD, TOO_MANY_BYTES)
"""The reasons for ending streams, as labels of a metric."""


class StreamOverloaded(CorantoError):
    """A stream of appends was ended because it holds too much memory of the broker."""

    retriable = True

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{text} The outcome of appends without an answer is unknown.")
        self.reason = reason


class BoundedStream(Protocol):
    """A stream that `AnswerWatch` watches."""

    waits_since: float
    """The event loop's time when the oldest unsent answer began to wait."""

    @property
    def held(self) -> int: ...

    def give_up(self, error: StreamOverloaded) -> None:
        """End the stream with an error."""
        ...


class AnswerWatch:
    """Watches the clients of one broker that have unread answers."""

    def __init__(self, budget: ReceiveBudget) -> None:
        self._budget = budget
        self._waiting: dict[BoundedStream, None] = {}  # The longest wait first.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """True while step 2 applies."""
        return self._budget.held > MAX_BUFFERED_BYTES

    def begin(self, stream: BoundedStream) -> None:
        """Begin to watch a stream, one of whose answers waits for the network."""
        loop = asyncio.get_running_loop()
        stream.waits_since = loop.time()
        self._waiting[stream] = None
        if self._timer is None:
            self._timer = loop.call_later(_CHECK_SECONDS, self._check)

    def end(self, stream: BoundedStream) -> None:
        """End watching a stream. Further calls have no effect."""
        self._waiting.pop(stream, None)

    def require_room(self, stream: BoundedStream) -> None:
        """Raise StreamOverloaded if a stream must end because all streams hold too much."""
        if self._budget.held > MAX_HELD_BYTES and stream.held > SMALL_BYTES:
            raise StreamOverloaded(
                TOO_MANY_BYTES,
                f"streams of appends hold {self._budget.held} bytes of this broker, more than {MAX_HELD_BYTES}, and "
                f"{stream.held} of them are this stream's, so it was ended. Slow down, read answers, and try again "
                "later.",
            )

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        limit = SHORT_ANSWER_TIMEOUT_SECONDS if self.is_full else ANSWER_TIMEOUT_SECONDS
        for stream in list(self._waiting):
            waits = loop.time() - stream.waits_since
            if waits < limit:
                break
            del self._waiting[stream]
            text = (
                f"the client has read no answers for {round(waits, 1):g} seconds, while this broker holds "
                f"{stream.held} bytes for its stream of appends, so the stream was ended. Read answers while you "
                "append."
            )
            stream.give_up(StreamOverloaded(ANSWERS_UNREAD, text))
        if self._waiting:
            self._timer = loop.call_later(_CHECK_SECONDS, self._check)
