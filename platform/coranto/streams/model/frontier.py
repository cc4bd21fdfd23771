"""The frontier of reading: the segments that are being read, and the next segments. Pure.

A segment becomes *open*, and may be read, once all its predecessors have been read to their ends. A segment with some
complete predecessors but not all is *waiting*. A complete segment stays in the frontier while one of its successors
waits for other predecessors, or if it ends the stream. So the open and complete segments together always cover every
key, and reading can resume from them.

`Frontier` is immutable. `Completion` is the change that completing a segment makes. To plan it takes the stream's
metadata; to apply it, only the frontier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from coranto.errors import InvalidInput, StreamTruncated
from coranto.streams.model.positions import SegmentPosition, StreamPosition
from coranto.streams.model.stream import Segment, Stream

Graph: TypeAlias = Mapping[int, frozenset[int]]
"""The predecessors of each existing segment, by number. Predecessors themselves may be gone."""


def graph_of(stream: Stream) -> Graph:
    return {number: segment.predecessors for number, segment in stream.segments.items()}


def ancestors(graph: Graph, numbers: Iterable[int]) -> set[int]:
    """Return all known segments before the given ones, including those that are gone."""
    found: set[int] = set()
    stack = list(numbers)
    while stack:
        for number in graph.get(stack.pop(), frozenset()) - found:
            found.add(number)
            stack.append(number)
    return found


def descendants(graph: Graph, numbers: Iterable[int]) -> set[int]:
    """Return the segments after any of the given ones."""
    named = frozenset(numbers)
    found: set[int] = set()
    # A successor's number is always larger than its predecessors'.
    for number in sorted(graph):
        if graph[number] & named or graph[number] & found:
            found.add(number)
    return found


def readable(segments: Mapping[int, Segment], read: Mapping[int, int]) -> frozenset[int]:
    """Return the segments that may be read, given the offset that was reached in each segment.

    All their predecessors are gone or were read to their final offsets. For readers that keep an offset of each segment
    instead of a `Frontier`: the result is the frontier's open segments and all segments before them. A segment that was
    begun too early is not included, nor are its successors.
    """
    found: set[int] = set()
    complete: set[int] = set()
    for number in sorted(segments):  # A successor's number is always larger than its predecessors'.
        segment = segments[number]
        if segment.predecessors & segments.keys() <= complete:
            found.add(number)
            end = segment.sealed_at
            if end is not None and max(segment.begin, read.get(number, 0)) >= end:
                complete.add(number)
    return frozenset(found)


def has_read_removed_segments(segments: Mapping[int, Segment], begun: Collection[int]) -> bool:
    """Return True if a reader that has begun these segments has read all segments that are gone.

    The first remaining segments share the key space, so each removed segment precedes one of them. A reader begins a
    segment only after it has read all segments before it.
    """
    return all(number in begun for number, each in segments.items() if not each.predecessors & segments.keys())


@dataclass(frozen=True, slots=True)
class Finished:
    """A segment that was read to its final offset `end`.

    `blocked` are its successors that still wait for other segments. If it is empty, the segment ends the stream.
    """

    end: int
    blocked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Completion:
    """The change to the frontier when segment `number` has been read to its end.

    `opened` maps the segments that can now be read to the offsets where they begin. `waiting` maps newly waiting
    segments to the segments that they wait for. `terminal` is true if the segment has no successors.
    """

    number: int
    end: int
    opened: Mapping[int, int] = field(default_factory=dict)
    waiting: Mapping[int, frozenset[int]] = field(default_factory=dict)
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class Frontier:
    """The segments being read, waiting and finished; see the module.

    `waiting` maps each waiting segment to the segments that it waits for.
    """

    open: Mapping[int, SegmentPosition] = field(default_factory=dict)
    waiting: Mapping[int, frozenset[int]] = field(default_factory=dict)
    finished: Mapping[int, Finished] = field(default_factory=dict)

    @property
    def position(self) -> StreamPosition:
        """The position to resume reading without gaps or repeats."""
        done = {number: SegmentPosition(each.end, complete=True) for number, each in self.finished.items()}
        return StreamPosition({**self.open, **done})

    def advanced(self, positions: Mapping[int, SegmentPosition]) -> Frontier:
        """Return the frontier with open segments advanced to new positions.

        Raises InvalidInput if a segment is not open, or would move back.
        """
        for number, position in positions.items():
            before = self.open.get(number)
            if before is None or position.offset < before.offset:
                raise InvalidInput(f"segment {number} cannot continue from {before} to {position}")
        return replace(self, open={**self.open, **positions}) if positions else self

    def completion(self, number: int, end: int, stream: Stream) -> Completion:
        """Plan the change for the open segment `number`, which was read to its end.

        `stream` must be recent enough to contain the segment's final offset. If the segment itself is gone (it was
        truncated away before it was read), the first remaining segments after it open.
        """
        graph = graph_of(stream)
        unread = self.open.keys() - {number}
        ahead = descendants(graph, [*unread, *self.waiting]) | unread | self.waiting.keys()
        opened: list[int] = []
        waiting: dict[int, frozenset[int]] = {}
        for segment in stream.successors(number):
            if segment.number in self.waiting:
                continue
            left = frozenset(each for each in segment.predecessors - {number} if each in ahead)
            if left:
                waiting[segment.number] = left
            else:
                opened.append(segment.number)
        for each, remaining in self.waiting.items():
            # Do not wait for predecessors that were truncated away before they opened.
            if not any(one in unread or one in graph for one in remaining - {number}):
                opened.append(each)
        if number not in graph:
            known = {*self.open, *self.waiting, *self.finished}
            known |= ancestors(graph, known) | set(opened) | descendants(graph, known)
            opened += [head.number for head in stream.heads() if head.number not in known]
        begins = {each: stream.segments[each].begin if each in graph else 0 for each in sorted(set(opened))}
        return Completion(number, end, begins, waiting, not stream.successors(number) and number in graph)

    def completed(self, completion: Completion) -> Frontier:
        """Apply a completion that was planned on this frontier. Raises InvalidInput if it was not."""
        number = completion.number
        started = completion.opened.keys() | completion.waiting.keys()
        if number not in self.open or started & self.open.keys():
            raise InvalidInput(f"{completion} does not follow from {self}")
        open_ = {each: position for each, position in self.open.items() if each != number}
        open_.update((each, SegmentPosition(begin)) for each, begin in completion.opened.items())
        waiting = {
            each: remaining - {number} for each, remaining in self.waiting.items() if each not in completion.opened
        }
        blocked = {each for each, remaining in self.waiting.items() if number in remaining}
        blocked |= completion.waiting.keys()
        waiting.update(completion.waiting)
        if not all(waiting.values()):
            raise InvalidInput(f"{completion} does not follow from {self}")
        finished = {**self.finished}
        if completion.terminal or blocked:
            finished[number] = Finished(completion.end, frozenset(blocked))
        kept: dict[int, Finished] = {}
        for each, entry in finished.items():
            left = entry.blocked.difference(completion.opened)
            # A segment that ends the stream stays. Others are dropped once none of their successors waits.
            if left or not entry.blocked:
                kept[each] = replace(entry, blocked=left)
        return Frontier(open_, waiting, kept)


def frontier_at(stream: Stream, position: StreamPosition | None = None, *, skip_truncated: bool = False) -> Frontier:
    """Return the frontier at a position, or by default at the beginning of the stream's remaining content.

    Segments that are neither in the position nor after it are not read. Raises StreamTruncated if content after the
    position is gone; with `skip_truncated`, reading begins after the missing content instead. Raises InvalidInput if
    the position contains both a segment and one of its descendants.
    """
    if position is None:
        return Frontier({head.number: SegmentPosition(head.begin) for head in stream.heads()})
    graph = graph_of(stream)
    open_: dict[int, SegmentPosition] = {}
    ended: list[tuple[int, int]] = []
    for number, at in position.segments.items():
        segment = stream.segments.get(number)
        if segment is None:
            if not at.complete and not skip_truncated:
                raise StreamTruncated(
                    f"segment {number} of stream {stream.name} was truncated away, but is to be read from offset "
                    f"{at.offset}. Begin at the stream's beginning, or skip the missing content (skip_truncated)",
                    number,
                )
            ended.append((number, at.offset))
        else:
            if at.needed_from < segment.begin:
                if not skip_truncated:
                    raise StreamTruncated(
                        f"segment {number} of stream {stream.name} begins at offset {segment.begin}, but is to be "
                        f"read from {at.needed_from}. Begin there, or skip the missing content (skip_truncated)",
                        number,
                        segment.begin,
                    )
                at = SegmentPosition(max(at.offset, segment.begin), journal_id=at.journal_id)
            if at.complete:
                ended.append((number, at.offset))
        open_[number] = replace(at, complete=False)
    past = ancestors(graph, open_)
    overtaken = past & open_.keys() - {number for number, _ in ended}
    if overtaken:
        raise InvalidInput(f"{dict(position)} is not a cut: it has segments that come after segment {min(overtaken)}")
    frontier = Frontier(open_)
    for number, end in ended:
        completion = frontier.completion(number, end, stream)
        started = past | frontier.open.keys() | {each for each, _ in ended}
        frontier = frontier.completed(
            replace(
                completion,
                opened={each: begin for each, begin in completion.opened.items() if each not in started},
                waiting={each: left for each, left in completion.waiting.items() if each not in started},
            )
        )
    return frontier


def earliest(stream: Stream, positions: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the latest cut that is not past any of the given cuts: all their readers have read the content before it.

    Raises InvalidInput if no cut is given.
    """
    graph = graph_of(stream)
    found: dict[int, int] = {}
    cuts = [dict(each) for each in positions]
    if not cuts:
        raise InvalidInput("cannot take the earliest of no cuts; give at least one")
    for cut in cuts:
        for number, offset in cut.items():
            found[number] = min(offset, found.get(number, offset))
    behind = descendants(graph, found)
    return {number: offset for number, offset in sorted(found.items()) if number not in behind}
