"""The cut of a fork: the largest one that tears no transaction and keeps the order of keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto import labels
from coranto.client import JournalInfo, Listing
from coranto.errors import InvalidInput
from coranto.streams import KeyRange, Segment, Stream, decode
from coranto.streams.control.scaling import Change, Merge, Split, transition
from coranto.streams.model.fork_cut import SegmentSpan, Unit, consistent_cut, fork_segments
from coranto.streams.model.stream import segment_journal, spec_of
from coranto.wire import protocol_pb2 as pb

END = 4
"""The end of each segment, sealed or not."""


def stream_of(segments: int, *changes: Change, end_of_stream: bool = False) -> Stream:
    """Return a stream after successive changes. Each sealed segment ends at END."""
    ranges = KeyRange.FULL.split(segments)
    found = {n: Segment(n, 0, segment_journal("s", n), keys) for n, keys in enumerate(ranges)}
    for change in changes:
        planned = transition(Stream("s", found), [change])
        for each in planned.predecessors:
            found[each.number] = replaced(found[each.number])
        found |= {each.number: each for each in planned.successors}
    if end_of_stream:
        found |= {n: replaced(each, True) for n, each in found.items() if not each.sealing}
    return Stream("s", found)


def replaced(each: Segment, ends: bool = False) -> Segment:
    return Segment(each.number, each.epoch, each.journal, each.range, each.predecessors, True, END, each.begin, ends, 0)


STREAMS = (
    stream_of(1),
    stream_of(2),
    stream_of(1, Split(0, 2)),
    stream_of(2, Merge((0, 1))),
    stream_of(2, Split(1, 2), Merge((0, 2))),
    stream_of(2, end_of_stream=True),
    stream_of(1, Split(0, 2), end_of_stream=True),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Stream, dict[int, int], list[Unit]]:
    stream = draw(st.sampled_from(STREAMS))
    wanted = {number: draw(st.integers(0, END)) for number in stream.segments}
    units = []
    for _ in range(draw(st.integers(0, 4))):
        numbers = draw(st.sets(st.sampled_from(sorted(stream.segments)), min_size=1, max_size=3))
        begins = {number: draw(st.integers(0, END - 1)) for number in numbers}
        units.append({number: SegmentSpan(at, draw(st.integers(at + 1, END))) for number, at in begins.items()})
    return stream, wanted, units


def is_consistent(stream: Stream, cut: Mapping[int, int], units: Sequence[Unit]) -> bool:
    """Check the two promises of the module literally."""
    for unit in units:
        below = [number in cut and cut[number] >= span.end for number, span in unit.items()]
        none = [number not in cut or cut[number] <= span.begin for number, span in unit.items()]
        if not all(below) and not all(none):
            return False
    for number in cut:
        for before in stream.segments[number].predecessors & stream.segments.keys():
            if cut.get(before) != stream.segments[before].sealed_at:
                return False
            if any(each.number not in cut for each in stream.successors(before)):
                return False
    return True


def cuts_below(stream: Stream, wanted: Mapping[int, int]) -> Iterator[dict[int, int]]:
    choices = [[None, *range(wanted[number] + 1)] for number in stream.segments]
    for chosen in itertools.product(*choices):
        yield {number: at for number, at in zip(stream.segments, chosen, strict=True) if at is not None}


@settings(max_examples=150)
@given(cases())
def test_the_cut_is_the_largest_consistent_one(case: tuple[Stream, dict[int, int], list[Unit]]) -> None:
    stream, wanted, units = case
    cut = consistent_cut(stream, wanted, units)
    assert is_consistent(stream, cut, units)
    assert all(at <= wanted[number] for number, at in cut.items())
    for other in cuts_below(stream, wanted):
        if is_consistent(stream, other, units):
            assert all(number in cut and at <= cut[number] for number, at in other.items()), other


@given(cases())
def test_the_fork_of_a_cut_is_a_consistent_stream(case: tuple[Stream, dict[int, int], list[Unit]]) -> None:
    stream, wanted, units = case
    cut = consistent_cut(stream, wanted, units)
    segments = fork_segments(stream, "what-if", cut)
    template = pb.JournalSpec(name="a", replication=1, labels=labels.label_set([("content-type", "x")]))
    infos = [JournalInfo(spec_of("what-if", each, template), 0, 0, pb.Route()) for each in segments.values()]
    decoded = decode(Listing(pb.Header(), tuple(infos)))  # Raises for segments that contradict each other.
    assert decoded.segments == segments
    assert {number: each.range for number, each in segments.items()} == {n: stream.segments[n].range for n in cut}
    whole = all(cut.get(number) == END for number in stream.segments)
    assert not whole or decoded.is_sealed == stream.is_sealed
    assert not decoded.is_sealed or stream.is_sealed


def test_omitting_a_multi_key_transaction_omits_others_it_overlaps() -> None:
    stream = stream_of(2)
    units = [
        {0: SegmentSpan(1, 2), 1: SegmentSpan(3, 4)},
        {1: SegmentSpan(1, 2), 0: SegmentSpan(3, 4)},
        {1: SegmentSpan(2, 3)},
    ]
    # The first is torn at 3 in segment 1. So the others are omitted, too.
    assert consistent_cut(stream, {0: 4, 1: 3}, units) == {0: 1, 1: 1}
    assert consistent_cut(stream, {0: 4, 1: 4}, units) == {0: 4, 1: 4}


def test_omitted_successors_leave_their_predecessor_active() -> None:
    stream = stream_of(1, Split(0, 2))
    cut = consistent_cut(stream, {0: 3, 1: 4, 2: 4})
    assert cut == {0: 3}
    (segment,) = fork_segments(stream, "what-if", cut).values()
    assert (segment.journal, segment.sealing, segment.sealed_at) == ("what-if/segment/00000000", False, None)


def test_transactions_below_the_truncation_do_not_limit_the_cut() -> None:
    stream = Stream("s", {0: Segment(0, 0, segment_journal("s", 0), KeyRange.FULL, begin=3)})
    assert consistent_cut(stream, {0: 4}, [{0: SegmentSpan(2, 9)}, {7: SegmentSpan(0, 1)}]) == {0: 4}
    with pytest.raises(InvalidInput, match=r"segment 0 of stream s would end at 2, and its events before 3 are trunc"):
        consistent_cut(stream, {0: 2})
