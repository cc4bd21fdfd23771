"""The bounds on what streams of appends hold, for clients that send and do not read.

A stream *holds* its appends without an answer, and its answers that the network has not taken: their bytes, and
ITEM_BYTES for each. There is one rule in three steps:

1. A stream that holds STREAM_BYTES or STREAM_APPENDS is not read until it holds less.
2. While all streams of the broker hold more than MAX_BUFFERED_BYTES, each is read only when it holds nothing, and a few
   appends at a time. So every client continues, slowly.
3. A client that takes no answer for ANSWER_TIMEOUT_SECONDS, during step 2 for SHORT_ANSWER_TIMEOUT_SECONDS, loses its
   stream. A stream that holds more than SMALL_BYTES is ended when all of them exceed MAX_HELD_BYTES.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from coranto.errors import CorantoError
from coranto_broker.append.receiving import MAX_BUFFERED_BYTES, ReceiveBudget

STREAM_BYTES: Final = 8 << 20
STREAM_APPENDS: Final = 4096
ITEM_BYTES: Final = 512
"""The bytes that each append, and each answer, counts beside its content."""
SMALL_BYTES: Final = 64 << 10
MAX_HELD_BYTES: Final = 256 << 20
ANSWER_TIMEOUT_SECONDS: Final = 30.0
SHORT_ANSWER_TIMEOUT_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.5


class HoldsTooMuch(CorantoError):
    """A stream of appends was ended because its client makes the broker hold too much."""

    retriable = True
    reason: str


_UNKNOWN: Final = "The outcome of appends without an answer is unknown."


class AnswersUnread(HoldsTooMuch):
    """A client does not read the answers to its appends."""

    reason = "answers unread"

    def __init__(self, seconds: float, held: int) -> None:
        super().__init__(
            f"the client has taken no answers for {seconds:g} seconds, while this broker holds {held} bytes for its "
            f"stream of appends, so the stream was ended. Read answers while you append. {_UNKNOWN}"
        )


class TooMuchHeld(HoldsTooMuch):
    """The streams of a broker hold too much, and this one is among those that do."""

    reason = "too many bytes"

    def __init__(self, held: int, total: int) -> None:
        super().__init__(
            f"streams of appends make this broker hold {total} bytes, more than {MAX_HELD_BYTES}, and {held} of them "
            f"are this stream's, so it was ended. Slow down, read answers, and try again later. {_UNKNOWN}"
        )


REASONS: Final = (AnswersUnread.reason, TooMuchHeld.reason)
"""The reasons for which streams are ended, as a metric names them."""


class HoldingStream(Protocol):
    """A stream, as its broker's watch sees it."""

    waits_since: float
    """The event loop's time since which an answer waits for the network to take it."""

    @property
    def held(self) -> int: ...

    def give_up(self, error: HoldsTooMuch) -> None:
        """End the stream with an error."""
        ...


class AnswerWatch:
    """Watches the clients of one broker that have answers to take. It needs a timer only while there are some."""

    def __init__(self, budget: ReceiveBudget) -> None:
        self._budget = budget
        self._waiting: dict[HoldingStream, None] = {}  # In the order in which they began to wait.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """True while all streams hold so much that each may hold little more."""
        return self._budget.held > MAX_BUFFERED_BYTES

    def begin(self, stream: HoldingStream) -> None:
        """Note that an answer of a stream begins to wait for the network."""
        loop = asyncio.get_running_loop()
        stream.waits_since = loop.time()
        self._waiting[stream] = None
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_SECONDS, self._look)

    def end(self, stream: HoldingStream) -> None:
        """Note that nothing of a stream waits any more. It may be called again."""
        self._waiting.pop(stream, None)

    def require_room(self, stream: HoldingStream) -> None:
        """Raise TooMuchHeld if a stream is to be ended, because all hold too much and it holds some of it."""
        if self._budget.held > MAX_HELD_BYTES and stream.held > SMALL_BYTES:
            raise TooMuchHeld(stream.held, self._budget.held)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        limit = SHORT_ANSWER_TIMEOUT_SECONDS if self.is_full else ANSWER_TIMEOUT_SECONDS
        for stream in list(self._waiting):
            waits = loop.time() - stream.waits_since
            if waits < limit:
                break
            del self._waiting[stream]
            stream.give_up(AnswersUnread(round(waits, 1), stream.held))
        if self._waiting:
            self._timer = loop.call_later(_LOOK_SECONDS, self._look)
