"""Time in a stream: what writers say of the times of their events, and what readers may conclude from it.

A writer *notes a time* (`StreamWriter.note_time`): it says that all events it writes from now on are of that time or a
later one. Times are numbers in whatever unit the writers of a stream agree on; a writer's later times are not smaller.
Each note is a *mark* on the journal `<stream>/marks`, with the positions up to which the writer has written.

Readers add the marks up to *watermarks*: once every writer has noted a time that is at least `lower`, all their earlier
events stand before the largest of their positions, segment by segment. A reader that is past that cut has seen all
events of times below `lower`. Everybody finds the same watermarks, for they depend on the journal of marks alone.

A writer that is silent for `timeout` seconds does not hold time up any more. How long it is silent is told by what
other writers' clocks counted since its last mark, each from one of its own marks to the next: no two clocks are
compared, so one that is ahead does not make the others silent. A step from one mark to the next counts at most half of
`timeout`, so that a clock that is set forward once does not either. Where marks are further apart, it takes more.

Time windows are a weak claim, as good as the writers' clocks and their word.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coranto.client.client import JournalClient
from coranto.errors import CorruptData, CorruptMessage, InvalidInput, JournalNotFound
from coranto.messages.framing import Envelope, JsonObject
from coranto.messages.reading import AsyncReadUncommitted
from coranto.messages.uuids import clock_to_ns
from coranto.streams.model.events import JsonEvents
from coranto.streams.model.frontier import Graph, ancestors, descendants, graph_of
from coranto.streams.model.positions import StreamPosition
from coranto.streams.model.stream import Stream, marks_journal

DEFAULT_TIMEOUT: Final = 120.0
"""Seconds after which a silent writer does not hold up time any more."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A writer's note: its events behind `positions` (offsets by segment number) are of `time` or later.

    It names the segments that it has written to. With `left` the writer writes no more, and does not count from now on.
    """

    writer: str
    time: float
    positions: Mapping[int, int] = field(default_factory=dict)
    left: bool = False

    def to_message(self) -> dict[str, Any]:
        """The mark as a JSON message of the marks' journal."""
        message = {
            "writer": self.writer,
            "time": self.time,
            "positions": {str(n): p for n, p in self.positions.items()},
        }
        return {**message, "left": True} if self.left else message

    @classmethod
    def of(cls, message: JsonObject) -> Mark:
        """The mark of a message. Raises CorruptData."""
        try:
            writer, time = message["writer"], message["time"]
            positions = {int(number): int(offset) for number, offset in message["positions"].items()}
            if not isinstance(writer, str) or isinstance(time, bool) or not isinstance(time, int | float):
                raise TypeError("its writer must be a text and its time a number")
            if not math.isfinite(time) or any(offset < 0 for offset in positions.values()):
                raise ValueError("its time must be finite, and its offsets not negative")
            return cls(writer, time, positions, bool(message.get("left", False)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptData(f"{message!r} is no mark of a writer: {error}") from error


@dataclass(frozen=True, slots=True)
class Watermark:
    """All events of times below `lower` stand before `cut`. No writer had noted a time above `upper` then."""

    lower: float
    upper: float
    cut: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Between which times a reader is. None is unknown: it has passed no watermark, or the last one.

    Events of times below `lower` are all read. What is read so far was written when no writer was past `upper`.
    """

    lower: float | None
    upper: float | None


@dataclass(frozen=True, slots=True)
class _Noted:
    time: float
    written: float
    """By the writer's own clock."""
    counted: float
    """What the writer's clock had counted with this mark."""
    seen: float
    """What had passed with this mark, by the clock that had counted the most."""
    positions: Mapping[int, int]


class Watermarks:
    """Adds up marks, in the order of their journal. Pure."""

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        if not timeout > 0:
            raise InvalidInput(f"{timeout!r} is no time-out; give seconds above 0", field="timeout")
        self._timeout = timeout
        self._writers: dict[str, _Noted] = {}
        self._passed = 0.0  # Seconds, by the clock that counted the most.
        self._found: list[Watermark] = []

    @property
    def found(self) -> tuple[Watermark, ...]:
        """Those that no window was behind of yet, the oldest first."""
        return tuple(self._found)

    def add(self, mark: Mark, written: float) -> Watermark | None:
        """Take in the next mark, written at a time of its writer's clock (Unix seconds).

        Returns the watermark that it brings about, if it does.
        """
        if mark.left:
            self._writers.pop(mark.writer, None)
        else:
            before = self._writers.get(mark.writer)
            positions = _largest(before.positions if before is not None else {}, mark.positions)
            time = max(mark.time, before.time) if before is not None else mark.time
            counted = self._passed
            if before is not None:
                counted = before.counted + min(max(0.0, written - before.written), self._timeout / 2)
            self._passed = max(self._passed, counted)
            self._writers[mark.writer] = _Noted(time, written, counted, self._passed, positions)
        self._writers = {
            writer: noted for writer, noted in self._writers.items() if self._passed - noted.seen <= self._timeout
        }
        if not self._writers:
            return None
        lower = min(noted.time for noted in self._writers.values())
        if self._found and lower <= self._found[-1].lower:
            return None
        cut: dict[int, int] = {}
        for noted in self._writers.values():
            cut = _largest(cut, noted.positions)
        if self._found:
            cut = _largest(self._found[-1].cut, cut)
        watermark = Watermark(lower, max(noted.time for noted in self._writers.values()), cut)
        self._found.append(watermark)
        return watermark

    def window(self, position: StreamPosition, graph: Graph) -> TimeWindow:
        """The window of a reader of these segments at this position. Later ones must not be before it."""
        lower: float | None = None
        for index, watermark in enumerate(self._found):
            if not passed(position, watermark.cut, graph):
                # The last one that was passed is kept, so as to tell the next ones by it.
                del self._found[: max(0, index - 1)]
                return TimeWindow(lower, watermark.upper)
            lower = watermark.lower
        del self._found[:-1]
        return TimeWindow(lower, None)


def passed(position: StreamPosition, cut: Mapping[int, int], graph: Graph) -> bool:
    """Whether a reader has read all that is before a cut in segments of its own, and in those that these came from."""
    before, after = ancestors(graph, position), descendants(graph, position)
    for number, offset in cut.items():
        if number in position:
            if position.segments[number].offset < offset:
                return False
        elif number in after and number not in before and offset > 0:
            return False
    return True


def _largest(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """The larger offset of each segment."""
    return {number: max(one.get(number, 0), other.get(number, 0)) for number in one.keys() | other.keys()}


class TimeWindows:
    """The time windows of one reader of a stream, from the stream's journal of marks."""

    def __init__(self, client: JournalClient, stream: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._client = client
        self._journal = marks_journal(stream)
        self._offset = 0
        self._watermarks = Watermarks(timeout)

    async def at(self, position: StreamPosition, stream: Stream) -> TimeWindow:
        """The window of a position, which is not before that of an earlier call; with all marks that are there now.

        Marks that cannot be read are passed over. Raises what the client's reads raise.
        """
        try:
            head = await self._client.head(self._journal)
        except JournalNotFound:
            return TimeWindow(None, None)  # No writer has noted a time.
        if head > self._offset:
            chunks = self._client.read(self._journal, self._offset, end_offset=head)
            reading: AsyncReadUncommitted[JsonObject] = AsyncReadUncommitted(
                JsonEvents(), self._journal, chunks, self._offset, on_corrupt=lambda error: None
            )
            async with contextlib.aclosing(reading):
                async for envelope in reading:
                    self._take(envelope)
            self._offset = head
        return self._watermarks.window(position, graph_of(stream))

    def _take(self, envelope: Envelope[JsonObject]) -> None:
        with contextlib.suppress(CorruptMessage, CorruptData):
            self._watermarks.add(Mark.of(envelope.message), clock_to_ns(envelope.clock) / 1e9)
