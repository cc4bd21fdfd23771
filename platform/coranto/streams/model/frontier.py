"""The frontier of reading: which segments are read now, and which come when. Pure.

A segment is *open* while it may be read, from when all its predecessors were read to their ends. One that is not open,
and has predecessors of which some but not all are complete, is *waiting*. A complete segment stays in the frontier
while something waits for its fellow predecessors, or when it ends the stream; so open and complete segments together
always stand for every key, and make a place from which reading can start again.

`Frontier` is a value. What completing a segment changes is a value too, `Completion`: it is planned where the stream's
metadata are known, and applied wherever the frontier is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from coranto.errors import InvalidInput, StreamTruncated
from coranto.streams.model.positions import SegmentPosition, StreamPosition
from coranto.streams.model.stream import Stream

Graph: TypeAlias = Mapping[int, frozenset[int]]
"""The predecessors of each segment that is there, by number. Predecessors may be gone."""


def graph_of(stream: Stream) -> Graph:
    return {number: segment.predecessors for number, segment in stream.segments.items()}


def ancestors(graph: Graph, numbers: Iterable[int]) -> set[int]:
    """The segments before those named, as far as is known; also ones that are gone."""
    found: set[int] = set()
    stack = list(numbers)
    while stack:
        for number in graph.get(stack.pop(), frozenset()) - found:
            found.add(number)
            stack.append(number)
    return found


def descendants(graph: Graph, numbers: Iterable[int]) -> set[int]:
    """The segments after any of those named."""
    named = frozenset(numbers)
    found: set[int] = set()
    # A successor's number is always the larger one.
    for number in sorted(graph):
        if graph[number] & named or graph[number] & found:
            found.add(number)
    return found


@dataclass(frozen=True, slots=True)
class Finished:
    """A segment that was read to its final offset `end`, while `blocked` of its successors wait for other segments.

    With none blocked it ends the stream.
    """

    end: int
    blocked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Completion:
    """What follows from segment `number` having been read to its end.

    `opened` are segments that can be read now, with the offset where they begin; `waiting` are those that newly wait,
    and what they wait for. `terminal` says that nothing succeeds the segment.
    """

    number: int
    end: int
    opened: Mapping[int, int] = field(default_factory=dict)
    waiting: Mapping[int, frozenset[int]] = field(default_factory=dict)
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class Frontier:
    """See the module. `waiting` tells for which segments each one waits."""

    open: Mapping[int, SegmentPosition] = field(default_factory=dict)
    waiting: Mapping[int, frozenset[int]] = field(default_factory=dict)
    finished: Mapping[int, Finished] = field(default_factory=dict)

    @property
    def position(self) -> StreamPosition:
        """Where to start again so as to read just what is not read yet."""
        done = {number: SegmentPosition(each.end, complete=True) for number, each in self.finished.items()}
        return StreamPosition({**self.open, **done})

    def advanced(self, positions: Mapping[int, SegmentPosition]) -> Frontier:
        """With open segments read further. Raises InvalidInput for one that is not open, or would go back."""
        for number, position in positions.items():
            before = self.open.get(number)
            if before is None or position.offset < before.offset:
                raise InvalidInput(f"segment {number} cannot go on from {before} to {position}")
        return replace(self, open={**self.open, **positions}) if positions else self

    def completion(self, number: int, end: int, stream: Stream) -> Completion:
        """What follows when open segment `number` is read to its end.

        `stream` must be as new as the segment's final offset. Where the segment itself is gone already (it was
        truncated away before it was read), whatever is left of the stream behind it opens.
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
            # Those that were truncated away before they opened are not waited for.
            if not any(one in unread or one in graph for one in remaining - {number}):
                opened.append(each)
        if number not in graph:
            known = {*self.open, *self.waiting, *self.finished}
            known |= ancestors(graph, known) | set(opened) | descendants(graph, known)
            opened += [head.number for head in stream.heads() if head.number not in known]
        begins = {each: stream.segments[each].begin if each in graph else 0 for each in sorted(set(opened))}
        return Completion(number, end, begins, waiting, not stream.successors(number) and number in graph)

    def completed(self, completion: Completion) -> Frontier:
        """The frontier after a completion that was planned on this one. Raises InvalidInput if it was not."""
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
            # One that ended the stream stays; another goes with the last successor that waited.
            if left or not entry.blocked:
                kept[each] = replace(entry, blocked=left)
        return Frontier(open_, waiting, kept)


def frontier_at(stream: Stream, position: StreamPosition | None = None, *, skip_truncated: bool = False) -> Frontier:
    """Where to begin reading: at the position, or at the beginning of what is left of the stream.

    Segments that are neither in the position nor after it are not read. Raises StreamTruncated when some of what is
    after the position is gone; with `skip_truncated` reading begins behind it instead.
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
                    f"{at.offset}. Begin at the stream's beginning, or let what is gone be skipped",
                    number,
                )
            ended.append((number, at.offset))
        else:
            if at.needed_from < segment.begin:
                if not skip_truncated:
                    raise StreamTruncated(
                        f"segment {number} of stream {stream.name} begins at offset {segment.begin}, but is to be "
                        f"read from {at.needed_from}. Begin there, or let what is gone be skipped",
                        number,
                        segment.begin,
                    )
                at = SegmentPosition(max(at.offset, segment.begin))
            if at.complete:
                ended.append((number, at.offset))
        open_[number] = replace(at, complete=False)
    past = ancestors(graph, open_)
    overtaken = past & open_.keys() - {number for number, _ in ended}
    if overtaken:
        raise InvalidInput(f"{dict(position)} is no cut: it has segments that come after segment {min(overtaken)}")
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
    """The cut that is nowhere behind any of the given ones: what all their readers are through with lies before it.

    Raises InvalidInput without a cut.
    """
    graph = graph_of(stream)
    found: dict[int, int] = {}
    cuts = [dict(each) for each in positions]
    if not cuts:
        raise InvalidInput("there is no cut to take the earliest of")
    for cut in cuts:
        for number, offset in cut.items():
            found[number] = min(offset, found.get(number, offset))
    behind = descendants(graph, found)
    return {number: offset for number, offset in sorted(found.items()) if number not in behind}
