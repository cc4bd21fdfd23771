"""Time in a stream: the times of events that writers note, and the watermarks that readers derive from them.

A writer *notes a time* (`StreamWriter.note_time`) to declare that all events it writes from now on have that time or a
later one. Times are numbers in any unit that the writers of a stream share. A writer's times never decrease. Each
note is a *mark* in the journal `<stream>/marks`, with the ends of the writer's writes.

Readers combine the marks into *watermarks*. Once every writer has noted a time of at least `lower`, all their earlier
events are before a cut: the largest of their positions in each segment. A reader past this cut has read all events of
times below `lower`. All readers find the same watermarks, because these depend on the journal of marks only.

A writer that is silent for `timeout` seconds no longer holds back the watermark. Its silence is measured by the time
that other writers' clocks counted since its last mark, each between its own consecutive marks. Two clocks are never
compared, so a clock that is ahead does not make other writers seem silent. The step between two marks counts at most
half of `timeout`, so setting a clock forward once does not either. If marks are further apart, it takes longer to
detect a silent writer. A step that began before a writer's mark counts in full. So a writer whose marks are at most
half of `timeout` apart is never considered silent.

Time windows are only as accurate as the writers' clocks and the times that writers note.
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
"""Seconds after which a silent writer no longer holds back the watermark."""


@dataclass(frozen=True, slots=True)
class TimeMark:
    """A writer's note: its events after `positions` (offsets by segment number) have `time` or a later time.

    `positions` has the segments that the writer has written to. With `left`, the writer has stopped writing, and is
    ignored from then on.
    """

    writer: str
    time: float
    positions: Mapping[int, int] = field(default_factory=dict)
    left: bool = False

    def to_message(self) -> dict[str, Any]:
        """Return the mark as a JSON message for the journal of marks."""
        message = {
            "writer": self.writer,
            "time": self.time,
            "positions": {str(n): p for n, p in self.positions.items()},
        }
        return {**message, "left": True} if self.left else message

    @classmethod
    def of(cls, message: JsonObject) -> TimeMark:
        """Decode the mark in a message. Raises CorruptData."""
        try:
            writer, time = message["writer"], message["time"]
            positions = {int(number): int(offset) for number, offset in message["positions"].items()}
            if not isinstance(writer, str) or isinstance(time, bool) or not isinstance(time, int | float):
                raise TypeError("its writer must be a text and its time a number")
            if not math.isfinite(time) or any(offset < 0 for offset in positions.values()):
                raise ValueError("its time must be finite, and its offsets not negative")
            return cls(writer, time, positions, bool(message.get("left", False)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptData(f"{message!r} is not a writer's mark: {error}") from error


@dataclass(frozen=True, slots=True)
class Watermark:
    """All events of times below `lower` are before `cut`. When found, no writer had noted a time above `upper`."""

    lower: float
    upper: float
    cut: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """The range of times that a reader has reached.

    All events of times below `lower` are read; it is None if the reader has passed no watermark yet. Everything read so
    far was written when no writer was past `upper`; it is None if the reader has passed the last known watermark.
    """

    lower: float | None
    upper: float | None


@dataclass(frozen=True, slots=True)
class _Noted:
    time: float
    written: float
    """The time of writing the mark, by the writer's own clock."""
    counted: float
    """The seconds that the writer's clock had counted at this mark."""
    seen: float
    """The seconds that had passed at this mark, by the clock that had counted the most."""
    positions: Mapping[int, int]


class Watermarks:
    """The watermarks of a stream, computed from its marks in the order of their journal. Pure."""

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        if not timeout > 0:
            raise InvalidInput(f"{timeout!r} is not a timeout; give seconds above 0", field="timeout")
        self._timeout = timeout
        self._writers: dict[str, _Noted] = {}
        self._passed = 0.0  # Seconds, by the clock that counted the most.
        self._found: list[Watermark] = []

    @property
    def found(self) -> tuple[Watermark, ...]:
        """The watermarks that are still needed for later windows, the oldest first."""
        return tuple(self._found)

    def add(self, mark: TimeMark, written: float) -> Watermark | None:
        """Add the next mark. `written` is the time of its writer's clock at the write, in Unix seconds.

        Returns the new watermark, if the mark completes one.
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
        """Return the time window of a reader at this position. Positions of later calls must not be before it."""
        lower: float | None = None
        for index, watermark in enumerate(self._found):
            if not passed(position, watermark.cut, graph):
                # Keep the last watermark that was passed: later windows and marks are compared with it.
                del self._found[: max(0, index - 1)]
                return TimeWindow(lower, watermark.upper)
            lower = watermark.lower
        del self._found[:-1]
        return TimeWindow(lower, None)


def passed(position: StreamPosition, cut: Mapping[int, int], graph: Graph) -> bool:
    """Return True if a reader has read everything before a cut, in its own segments and in the segments before them."""
    before, after = ancestors(graph, position), descendants(graph, position)
    for number, offset in cut.items():
        if number in position:
            if position.segments[number].offset < offset:
                return False
        elif number in after and number not in before and offset > 0:
            return False
    return True


def _largest(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """Return the larger of the two offsets of each segment."""
    return {number: max(one.get(number, 0), other.get(number, 0)) for number in one.keys() | other.keys()}


class TimeWindows:
    """The time windows of one reader, computed from the stream's journal of marks."""

    def __init__(self, client: JournalClient, stream: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._client = client
        self._journal = marks_journal(stream)
        self._offset = 0
        self._watermarks = Watermarks(timeout)

    async def at(self, position: StreamPosition, stream: Stream) -> TimeWindow:
        """Return the time window of a position, from all marks that are in the journal now.

        The position must not be before an earlier call's. Marks that cannot be decoded are skipped. Raises errors of
        the client's reads.
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
            self._watermarks.add(TimeMark.of(envelope.message), clock_to_ns(envelope.clock) / 1e9)
