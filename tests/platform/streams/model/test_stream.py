"""Encoding a stream as labels and decoding it, and inconsistent labels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto import labels
from coranto.client import JournalInfo, Listing
from coranto.errors import CorruptData, InvalidInput, StreamNotFound
from coranto.specs.validation import validate
from coranto.streams import KEY_SPACE, KeyRange, Segment, Stream, decode, key_hash
from coranto.streams.control.scaling import Change, Merge, Split, transition
from coranto.streams.model import stream as m
from coranto.wire import protocol_pb2 as pb

NAME = "orders"


def template(**fields: str) -> pb.JournalSpec:
    spec = pb.JournalSpec(
        name="a/template", replication=1, labels=labels.label_set({"content-type": "text/x", **fields})
    )
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.refresh_interval.seconds = 30
    return spec


def created(segments: int = 1) -> Stream:
    ranges = KeyRange.FULL.split(segments)
    return Stream(NAME, {n: Segment(n, 0, m.segment_journal(NAME, n), keys) for n, keys in enumerate(ranges)})


def replaced(stream: Stream, segment: Segment, **fields: object) -> Stream:
    values = {name: getattr(segment, name) for name in Segment.__slots__} | fields
    return Stream(stream.name, {**stream.segments, segment.number: Segment(**values)})  # type: ignore[arg-type]


def scaled(stream: Stream, changes: list[Change], sealed_at: int | None = None) -> Stream:
    """Return the stream as one Apply makes it."""
    planned = transition(stream, changes)
    for segment in planned.predecessors:
        stream = replaced(stream, segment, sealing=True, sealed_at=sealed_at)
    return Stream(NAME, {**stream.segments, **{each.number: each for each in planned.successors}})


def listing(stream: Stream, *more: pb.JournalSpec, **fields: str) -> Listing:
    specs = [m.spec_of(stream.name, segment, template(**fields)) for segment in stream.segments.values()]
    infos = (JournalInfo(spec, 0, 0, pb.Route()) for spec in (*specs, *more))
    return Listing(pb.Header(etcd=pb.Header.Etcd(revision=7)), tuple(sorted(infos, key=lambda info: info.name)))


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Draw a stream after some splits and merges, perhaps truncated, perhaps sealed."""
    stream = created(draw(st.integers(1, 4)))
    for _ in range(draw(st.integers(0, 4))):
        active = stream.active()
        at = draw(st.integers(0, len(active) - 1))
        if draw(st.booleans()) and at + 1 < len(active):
            change: Change = Merge((active[at].number, active[at + 1].number))
        else:
            change = Split(active[at].number, draw(st.integers(2, 3)))
        stream = scaled(stream, [change], draw(st.one_of(st.none(), st.integers(0, 1 << 40))))
    if draw(st.booleans()):  # The first segments are removed, as far as they are sealed.
        oldest = [each for each in stream.heads() if each.sealed_at is not None]
        for segment in oldest[: draw(st.integers(0, 2))]:
            stream = Stream(NAME, {n: each for n, each in stream.segments.items() if n != segment.number})
    for segment in stream.active() if draw(st.booleans()) else ():
        stream = replaced(stream, segment, sealing=True, end_of_stream=True, sealed_at=draw(st.integers(0, 99)))
    return stream


@settings(max_examples=40, deadline=None)
@given(streams(), st.integers(0, KEY_SPACE - 1), st.integers(0, 99))
def test_labels_define_a_stream(stream: Stream, place: int, begin: int) -> None:
    first = stream.heads()[0]
    stream = replaced(stream, first, begin=begin)
    for segment in stream.segments.values():
        spec = m.spec_of(NAME, segment, template())
        validate(spec)
        assert labels.value_of(spec.labels, "content-type") == "text/x"
        assert m.spec_of(NAME, segment, spec) == spec, "encoding it again changes nothing"
    found = decode(listing(stream))
    assert found == stream
    assert (found.name, found.revision, found.content_type) == (NAME, 7, "text/x")

    assert found.is_sealed == (not found.active())
    holders = [each for each in found.active() if place in each.range]
    assert holders == ([] if found.is_sealed else [found.segment_at(place)])
    for segment in found.segments.values():
        for successor in found.successors(segment.number):
            assert segment.number in successor.predecessors
            assert segment.number in found.ancestors([successor.number])
    assert {each.number for each in found.heads()} == {n for n in found.segments if not found.ancestors([n])}
    assert {each.number for each in found.unfinished()} == {
        each.number for each in found.segments.values() if each.sealing and each.sealed_at is None
    }


def test_lineage() -> None:
    stream = scaled(created(2), [Split(1)])
    stream = scaled(stream, [Merge((0, 2))])
    assert [each.number for each in stream.active()] == [4, 3]
    assert [each.number for each in stream.heads()] == [0, 1]
    assert [each.number for each in stream.successors(1)] == [2, 3]
    assert stream.successors(4) == ()
    assert stream.ancestors([4]) == {0, 1, 2}
    assert stream.ancestors([3]) == {1}
    assert stream.epoch == 2
    low, high = stream.active()
    assert (low.range.share, high.range.share) == (0.75, 0.25)
    assert stream.segment_of("customer-1") == low
    assert stream.segment_at(KEY_SPACE - 1) == high
    assert key_hash("a") in high.range
    assert stream.segment_of("a") == high
    assert low.journal == "orders/segment/00000004"


def test_the_newest_segment_has_the_settings_of_its_stream() -> None:
    fields = {m.MAX_WRITERS_LABEL: "9", m.SCALING_LABEL: "fixed/2"}
    found = decode(listing(created(2), **fields))
    assert (found.max_writers, found.scaling) == (9, "fixed/2")
    assert (decode(listing(created())).max_writers, decode(listing(created())).scaling) == (None, "")


def test_other_journals_of_a_stream_are_ignored() -> None:
    part = template()
    part.name = m.transactions_journal(NAME)
    part.labels.CopyFrom(labels.with_value(part.labels, m.STREAM_PART_LABEL, NAME))
    assert decode(listing(created(), part)) == created()
    with pytest.raises(StreamNotFound, match="streams create"):
        decode(Listing(pb.Header(), (JournalInfo(part, 0, 0, pb.Route()),)))


def test_the_selector_of_segments_matches_no_other_journals_of_a_stream() -> None:
    segment = m.spec_of(NAME, created().segments[0], template())
    other = m.spec_of("orders/other", Segment(0, 0, m.segment_journal("orders/other", 0), KeyRange.FULL), template())
    part = labels.label_set({m.STREAM_PART_LABEL: NAME})
    assert labels.matches(m.segments_selector(NAME), labels.with_meta(segment.name, segment.labels))
    assert not labels.matches(m.segments_selector(NAME), labels.with_meta(other.name, other.labels))
    assert not labels.matches(m.segments_selector(NAME), labels.with_meta(m.readers_journal(NAME, "g"), part))


def test_several_streams_are_distinguished() -> None:
    other = Stream("returns", {0: Segment(0, 0, m.segment_journal("returns", 0), KeyRange.FULL)})
    both = Listing(pb.Header(), (*listing(created(2)).journals, *listing(other).journals))
    assert m.decode_all(both) == (created(2), other)
    with pytest.raises(CorruptData, match="several streams: orders, returns"):
        decode(both)


@pytest.mark.parametrize("name", ["", "/orders", "orders/", "a//b", "a b", "o" * 433])
def test_invalid_stream_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="stream"):
        m.validate_stream(name)


def test_journals_of_the_longest_stream_name_are_valid() -> None:
    name = m.validate_stream("o" * 432)
    for journal in (m.segment_journal(name, 10**8 - 1), m.transactions_journal(name), m.marks_journal(name)):
        validate(m.spec_of(name, Segment(0, 0, journal, KeyRange.FULL), template()))


def with_label(spec: pb.JournalSpec, name: str, *values: str) -> None:
    found = labels.without(spec.labels, name)
    for value in values:
        found = labels.add_value(found, name, value)
    spec.labels.CopyFrom(found)


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        (m.SEGMENT_LABEL, (), "has no label coranto.dev/segment"),
        (m.SEGMENT_LABEL, ("1",), "another journal's name"),
        (m.SEGMENT_LABEL, ("0", "1"), "may have only one"),
        (m.EPOCH_LABEL, ("-1",), "epoch=-1 is not a number"),
        (m.EPOCH_LABEL, ("x",), "is not a number"),
        (m.KEY_BEGIN_LABEL, (), "has no label coranto.dev/key-begin"),
        (m.KEY_BEGIN_LABEL, ("g",), "is not a number"),
        (m.KEY_BEGIN_LABEL, ("00000000000001",), "do not share the key space"),
        (m.KEY_END_LABEL, ("0",), "not a range of keys"),
        (m.KEY_END_LABEL, ("10000000000001",), "not a range of keys"),
        (m.PREDECESSOR_LABEL, ("0",), "cannot succeed 0"),
        (m.SEALED_AT_LABEL, ("7",), "its flags allow writing"),
        (m.END_OF_STREAM_LABEL, ("true",), "its flags allow writing"),
        (m.TRUNCATED_LABEL, ("",), "is not a number"),
        (m.MAX_WRITERS_LABEL, ("many",), "is not a number"),
    ],
)
def test_inconsistent_labels_of_a_segment_are_corrupt(name: str, values: tuple[str, ...], problem: str) -> None:
    found = listing(created())
    with_label(found.journals[0].spec, name, *values)
    with pytest.raises(CorruptData, match=problem):
        decode(found)


def test_segments_that_contradict_each_other_are_corrupt() -> None:
    split = scaled(created(), [Split(0)])
    with pytest.raises(CorruptData, match="which is not read-only"):
        decode(listing(replaced(split, split.segments[0], sealing=False)))
    with pytest.raises(CorruptData, match="not share the key space"):
        decode(listing(Stream(NAME, {n: each for n, each in split.segments.items() if n != 2})))
    with pytest.raises(CorruptData, match=r"read-only, but its successors.*make it writable again"):
        decode(listing(replaced(replaced(split, split.segments[1], predecessors=frozenset()), split.segments[0])))
    with pytest.raises(CorruptData, match="end of the stream, but has successors"):
        decode(listing(replaced(split, split.segments[0], end_of_stream=True)))
    by_hand = created()
    with pytest.raises(CorruptData, match="do not share the key space"):
        decode(listing(replaced(by_hand, by_hand.segments[0], sealing=True)))
    other = split.segments[2]
    with pytest.raises(CorruptData, match="has other keys"):
        decode(listing(replaced(scaled(split, [Split(1)]), other, predecessors=frozenset({0, 1}), epoch=9)))


def test_a_stream_may_be_partly_sealed_during_sealing() -> None:
    stream = created(2)
    stream = replaced(stream, stream.segments[0], sealing=True, end_of_stream=True)
    found = decode(listing(stream))
    assert not found.is_sealed
    assert found.segment_at(0) is None
    assert found.segment_at(KEY_SPACE - 1) == found.segments[1]
