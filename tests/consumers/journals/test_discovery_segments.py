"""Segments are read in order while their stream is split, merged and truncated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coranto.errors import StreamChanged
from coranto.messages.checkpoints import Source
from coranto.streams.model.frontier import Frontier, frontier_at
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.positions import SegmentPosition
from coranto.streams.model.stream import Segment, Stream, segment_journal
from coranto_consumers.journals.discovery import (
    ContentExtent,
    gone_segments,
    open_journals,
    unread_segment_error,
    wait_until_sealed,
)
from coranto_consumers.spark.consumer.unread import UnreadContent

NAME = "shop/orders"
OTHER = "shop/other"


class History:
    """A changing stream with messages of one byte, and another journal."""

    def __init__(self, segments: int) -> None:
        self.ever: dict[int, Segment] = {}
        self.heads: dict[int, int] = {}
        self.gone: set[int] = set()
        self.other = 0
        for keys in KeyRange.FULL.split(segments):
            self._add(0, keys, ())

    def _add(self, epoch: int, keys: KeyRange, predecessors: tuple[int, ...]) -> None:
        number = len(self.ever)
        journal = segment_journal(NAME, number)
        self.ever[number] = Segment(number, epoch, journal, keys, frozenset(predecessors))
        self.heads[number] = 0

    @property
    def stream(self) -> Stream:
        return Stream(NAME, {number: each for number, each in self.ever.items() if number not in self.gone})

    def write(self, pick: int, count: int) -> None:
        active = self.stream.active()
        self.heads[active[pick % len(active)].number] += count
        self.other += count

    def split(self, pick: int) -> None:
        active = self.stream.active()
        found = active[pick % len(active)]
        self._seal(found.number)
        for keys in found.range.split(2):
            self._add(self.epoch + 1, keys, (found.number,))

    def merge(self, pick: int) -> None:
        active = self.stream.active()
        if len(active) > 1:
            at = pick % (len(active) - 1)
            low, high = active[at : at + 2]
            self._seal(low.number, high.number)
            self._add(self.epoch + 1, KeyRange(low.range.begin, high.range.end), (low.number, high.number))

    @property
    def epoch(self) -> int:
        return max(each.epoch for each in self.ever.values())

    def _seal(self, *numbers: int) -> None:
        for number in numbers:
            self.ever[number] = replace(self.ever[number], sealing=True)

    def record_ends(self) -> None:
        for number, each in self.ever.items():
            if each.sealing:
                self.ever[number] = replace(each, sealed_at=self.heads[number])

    def truncate(self, frontier: Frontier) -> None:
        """Truncate before a possible position of a reader."""
        reached = {*frontier.open, *frontier.finished}
        self.gone |= self.stream.ancestors(reached) - reached

    @property
    def present(self) -> dict[str, ContentExtent]:
        stream = self.stream
        found = {
            each.journal: ContentExtent(each.begin, self.heads[number], segment=each)
            for number, each in stream.segments.items()
        }
        return {**found, OTHER: ContentExtent(0, self.other)}


class Reader:
    """A consumer with its read offsets, and the `frontier` of a reader of the stream."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.sources: dict[str, Source] = {}
        self.read: dict[int, int] = {}
        self.frontier = frontier_at(history.stream)

    def follow(self) -> None:
        """Record the current journals, like a consumer at the beginning of each run."""
        gone = gone_segments(self.history.present, self.sources)
        assert not gone.unread
        self.sources = {name: source for name, source in self.sources.items() if name not in gone.read}
        self.unread = UnreadContent(self.history.present)
        self.sources = self.unread.known(self.sources)

    def transaction(self, max_bytes: int) -> bool:
        ever, present = self.history.ever, self.unread.present
        ranges = self.unread.plan(self.sources, max_bytes)
        planned = [present[each.journal].segment for each in ranges]
        segments = [each for each in planned if each is not None]
        for segment in segments:
            for number in segment.predecessors:
                assert ever[number].sealed_at is not None
                assert self.read.get(number, 0) == ever[number].sealed_at, "its predecessors are read completely"
        for one in segments:
            assert not any(one.range.overlaps(other.range) for other in segments if other is not one)
        self.sources = self.unread.known(self.sources)
        for each, segment in zip(ranges, planned, strict=True):
            assert each.begin == self.sources[each.journal].read_through
            self.sources[each.journal] = Source(each.end)
            if segment is not None:
                self.read[segment.number] = each.end
        self.unread.processed(ranges, self.sources)
        return bool(ranges)

    def check_frontier(self) -> None:
        """Check that the frontier's open segments are the readable ones that are not read completely."""
        stream = self.history.stream
        while done := [
            number
            for number in self.frontier.open
            if number in stream.segments and stream.segments[number].sealed_at == self.read.get(number, 0)
        ]:
            self.frontier = self.frontier.completed(
                self.frontier.completion(done[0], self.read.get(done[0], 0), stream)
            )
        offsets = {number: SegmentPosition(self.read.get(number, 0)) for number in self.frontier.open}
        self.frontier = self.frontier.advanced(offsets)
        read = {segment_journal(NAME, number): offset for number, offset in self.read.items()}
        readable = open_journals(self.history.present, read) - {OTHER}
        ended = {each.journal for each in stream.segments.values() if each.sealed_at == self.read.get(each.number, 0)}
        assert readable - ended == {segment_journal(NAME, number) for number in self.frontier.open} - ended


TRUNCATED_TWICE = [
    ("write", 0, 5),
    ("transaction", 50),
    ("split", 0),
    ("record_ends",),
    ("truncate",),
    ("write", 0, 3),
    ("merge", 0),
    ("record_ends",),
    ("transaction", 50),
    ("truncate",),
    ("write", 0, 4),
]
ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 9), st.integers(0, 60)),
    st.tuples(st.sampled_from(["split", "merge"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["record_ends", "follow", "truncate"])),
    st.tuples(st.just("transaction"), st.integers(1, 50)),
)


@settings(max_examples=60)
@example(segments=1, actions=TRUNCATED_TWICE, max_bytes=7)
@given(segments=st.integers(1, 3), actions=st.lists(ACTIONS, max_size=30), max_bytes=st.integers(1, 40))
def test_segments_are_read_after_their_predecessors_and_completely(segments, actions, max_bytes):
    history = History(segments)
    reader = Reader(history)
    reader.follow()
    for name, *arguments in actions:
        if name == "follow":
            reader.follow()
        elif name == "transaction":
            reader.transaction(*arguments)
        elif name == "truncate":
            reader.follow()  # The reader has to record the segments that it has read completely.
            reader.check_frontier()
            history.truncate(reader.frontier)
        else:
            getattr(history, name)(*arguments)
    history.record_ends()
    reader.follow()
    while reader.transaction(max_bytes):
        reader.check_frontier()
    assert reader.read == {number: end for number, end in history.heads.items() if end}
    assert reader.sources[OTHER].read_through == history.other
    assert not {segment_journal(NAME, number) for number in history.gone} & reader.sources.keys()


@settings(max_examples=40)
@given(segments=st.integers(1, 3), actions=st.lists(ACTIONS, max_size=20))
def test_a_segment_truncated_before_it_was_read_is_detected(segments, actions):
    history = History(segments)
    reader = Reader(history)
    reader.follow()
    for name, *arguments in actions:
        if name in ("write", "split", "merge"):
            getattr(history, name)(*arguments)
    history.write(0, 1)
    history.split(0)
    history.record_ends()
    after = frontier_at(history.stream)
    while done := [number for number in after.open if history.ever[number].sealed_at is not None]:
        after = after.completed(after.completion(done[0], history.heads[done[0]], history.stream))
    history.truncate(after)
    known = {segment_journal(NAME, number) for number in history.gone} & reader.sources.keys()
    assert known
    assert gone_segments(history.present, reader.sources) == (frozenset(), known)


def test_a_segment_begun_too_early_waits_until_its_predecessors_are_read():
    history = History(1)
    history.write(0, 10)
    history.split(0)
    history.write(0, 5)
    history.record_ends()
    first, low, high = (segment_journal(NAME, number) for number in range(3))
    unread = UnreadContent(history.present)
    begun = {first: Source(4), low: Source(3), OTHER: Source(15)}  # As in a checkpoint of an earlier version.
    [part] = unread.plan(begun, 100)
    assert (part.journal, part.begin, part.end) == (first, 4, 10)
    [part] = unread.plan({**begun, first: Source(10)}, 100)
    assert (part.journal, part.begin, part.end) == (low, 3, 5)
    assert unread.known({**begun, first: Source(10)}).keys() == {first, low, high, OTHER}


def test_an_unfinished_line_at_the_end_of_a_sealed_segment_blocks_no_successor():
    history = History(1)
    history.write(0, 10)
    history.split(0)
    history.write(0, 5)
    history.record_ends()
    unread, first = UnreadContent(history.present), segment_journal(NAME, 0)
    begun = {first: Source(7), OTHER: Source(15)}
    ranges = unread.plan(begun, 100)
    assert [each.journal for each in ranges] == [first]
    unread.processed(ranges, begun)
    assert [each.journal for each in unread.plan(begun, 100)] == [segment_journal(NAME, 1)]


def test_a_read_of_a_whole_stream_waits_for_a_split_for_a_limited_time():
    history = History(1)
    history.write(0, 10)
    history.split(0)
    asked = []

    def ask() -> dict[str, ContentExtent]:
        asked.append(history.present)
        if len(asked) == 2:
            history.record_ends()
        return history.present

    assert wait_until_sealed(ask, 60.0) == history.present
    assert len(asked) == 2
    history.split(0)
    with pytest.raises(StreamChanged, match=r"00000003 cannot be read yet: .*`coranto streams resume shop/orders`"):
        wait_until_sealed(lambda: history.present, 0.0)


def test_the_error_about_an_unread_segment_names_it():
    error = unread_segment_error(segment_journal(NAME, 3), 17)
    assert error.segment == 3
    assert f"segment {NAME}/segment/00000003 was read through 17 and is gone" in str(error)
