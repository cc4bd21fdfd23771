"""Limits of a broker's appends: on the appends under way, and on the memory that appends and their answers hold.

Appends that arrive faster than they complete would queue with growing delays, until their clients time out with unknown
outcomes. A unary append beyond the limit is refused immediately, so its client knows that it was not applied.

A stream of appends is slowed down instead: at the limit it waits until there is room, or until its own appends are
done, since one append of each stream is always admitted. So streams do not starve each other, and a wait always ends,
because appends under way do not depend on waiting streams.

A stream *holds* its unanswered appends and its unsent answers: their bytes, and ITEM_BYTES for each. Clients may send
and not read, so there are bounds in three steps:

1. A stream that holds STREAM_BYTES or STREAM_APPENDS is not read until it holds less.
2. While all streams of the broker hold more than MAX_BUFFERED_BYTES, each is read only when it holds nothing, and a few
   appends at a time. So every client progresses, slowly.
3. A client that accepts no answer for ANSWER_TIMEOUT_SECONDS, during step 2 for SHORT_ANSWER_TIMEOUT_SECONDS, loses its
   stream. When all streams exceed MAX_HELD_BYTES, streams that hold more than SMALL_BYTES are ended.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import structlog

from coranto.effects import Clock
from coranto.errors import CorantoError
from coranto_broker.fast_counters import FastCounter
from coranto_broker.metrics import UnderWay
from coranto_broker.rpc.deadlines import DeadlineQueue
from coranto_broker.rpc.rolled_back import TooManyAppends

LOG_SECONDS: Final = 1.0
"""The interval of log lines about refusals."""
STREAM_BYTES: Final = 8 << 20
STREAM_APPENDS: Final = 4096
ITEM_BYTES: Final = 512
"""The bytes that count for each append and each answer in addition to its content."""
SMALL_BYTES: Final = 64 << 10
MAX_BUFFERED_BYTES: Final = 64 << 20
"""The maximum content that a broker buffers. Beyond it, appends wait for the pipeline before they are received."""
MAX_HELD_BYTES: Final = 256 << 20
ANSWER_TIMEOUT_SECONDS: Final = 30.0
SHORT_ANSWER_TIMEOUT_SECONDS: Final = 1.0
_CHECK_SECONDS: Final = 0.5
ANSWERS_UNREAD: Final = "answers unread"
TOO_MANY_BYTES: Final = "too many bytes"
REASONS: Final = (ANSWERS_UNREAD, TOO_MANY_BYTES)
"""The reasons for ending streams, as labels of a metric."""
_log = structlog.get_logger(__name__)


class Admission:
    """Counts the appends under way, and refuses appends beyond the limit."""

    def __init__(self, most: int, under_way: UnderWay, refused: FastCounter, waits: FastCounter, clock: Clock) -> None:
        """`most` is the limit of `under_way`; 0: none. `refused` counts refused appends, `waits` waits of streams."""
        self._most = most or math.inf
        self._under_way = under_way
        self._refused = refused
        self._waits = waits
        self._clock = clock
        self._logged_at = -math.inf
        self._unlogged = 0
        self._waiting: OrderedDict[asyncio.Event, None] = OrderedDict()

    @property
    def is_full(self) -> bool:
        """True at the limit."""
        return self._under_way.count >= self._most

    def enter(self) -> None:
        """Count an append; call `leave` when it is done. At the limit, raise TooManyAppends instead."""
        count = self._under_way.count
        if count < self._most:
            self._under_way.count = count + 1
            return
        self._refused.value += 1
        self._unlogged += 1
        now = self._clock.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            _log.warning("admission.appends_refused", under_way=count, refused=self._unlogged)
            self._logged_at, self._unlogged = now, 0
        raise TooManyAppends(count)

    def enter_in_turn(self) -> None:
        """Count an append of a stream that has none under way, or that has waited while `is_full`."""
        self._under_way.count += 1

    @contextmanager
    def waiting(self, has_capacity: asyncio.Event) -> Iterator[None]:
        """Set `has_capacity` when there is capacity, while a stream waits in the block. Streams are served in order."""
        self._waiting[has_capacity] = None
        self._waits.value += 1
        try:
            yield
        finally:
            del self._waiting[has_capacity]
            self._wake()

    def leave(self) -> None:
        self._under_way.count -= 1
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        """Wake the stream that has waited longest, if there is capacity. When its wait ends, it wakes the next one."""
        if self._waiting and not self.is_full:
            next(iter(self._waiting)).set()


class StreamOverloaded(CorantoError):
    """A stream of appends was ended because it holds too much memory of the broker."""

    retriable = True

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{text} The outcome of appends without an answer is unknown.")
        self.reason = reason


class BoundedStream(Protocol):
    """A stream that `ReceiveBudget` watches."""

    waits_since: float
    """The event loop's time when the oldest unsent answer began to wait."""

    @property
    def held(self) -> int: ...

    def give_up(self, error: StreamOverloaded) -> None:
        """End the stream with an error."""
        ...


class ReceiveBudget:
    """The memory that one broker uses for received appends and their answers. Watches streams with unread answers."""

    def __init__(self, bytes_per_append: int) -> None:
        """`bytes_per_append` bounds a buffered append, except for its last message; 0 disables buffering."""
        self.bytes_per_append = bytes_per_append
        self.deadlines = DeadlineQueue()
        self.first_message_deadlines = DeadlineQueue()
        """The deadlines of streams without a first message."""
        self.held = 0
        """Bytes held or reserved."""
        self._waiting: dict[BoundedStream, None] = {}  # Longest wait first.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """True while step 2 applies."""
        return self.held > MAX_BUFFERED_BYTES

    def watch(self, stream: BoundedStream) -> None:
        """Watch a stream with an answer that waits for the network."""
        loop = asyncio.get_running_loop()
        stream.waits_since = loop.time()
        self._waiting[stream] = None
        if self._timer is None:
            self._timer = loop.call_later(_CHECK_SECONDS, self._check)

    def unwatch(self, stream: BoundedStream) -> None:
        """Stop watching a stream. Further calls have no effect."""
        self._waiting.pop(stream, None)

    def require_capacity(self, stream: BoundedStream) -> None:
        """Raise StreamOverloaded if a stream must end because all streams hold too much."""
        if self.held > MAX_HELD_BYTES and stream.held > SMALL_BYTES:
            raise StreamOverloaded(
                TOO_MANY_BYTES,
                f"streams of appends hold {self.held} bytes of this broker, more than {MAX_HELD_BYTES}, and "
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
