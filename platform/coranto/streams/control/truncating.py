"""Cuts for truncating streams, and the changes of a truncation. Pure.

The stream is valid after each of the changes, in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from coranto.errors import InvalidInput
from coranto.streams.model.keys import KEY_SPACE, KeyRange
from coranto.streams.model.stream import Segment, Stream, StreamCut, ordered
from coranto.wire import protocol_pb2 as pb


def check_cut(stream: Stream, cut: StreamCut) -> frozenset[int]:
    """Return the segments that are wholly before a cut. Raises InvalidInput if it is not a cut of the stream."""
    missing = sorted(cut.keys() - stream.segments.keys())
    if missing:
        raise InvalidInput(
            f"segment {missing[0]} is not in stream {stream.name}, or not any more; "
            "`coranto streams describe` shows its segments",
            field="cut",
        )
    before = stream.ancestors(cut)
    both = sorted(before & cut.keys())
    problem = f"it has both segment {both[0]} and a successor of it; name one of them" if both else _gap(stream, cut)
    if problem:
        raise InvalidInput(f"the segments {_listed(sorted(cut)) or '(none)'} are not a cut: {problem}", field="cut")
    return before


def _gap(stream: Stream, cut: StreamCut) -> str:
    """Describe the first gap or overlap in the key space of a cut; empty if there is none.

    No segment of the cut may precede another.
    """
    at = 0
    for segment in (*ordered(stream.segments[number] for number in cut), None):
        begin = KEY_SPACE if segment is None else segment.range.begin
        if begin > at:
            missing = KeyRange(at, begin)
            others = [each.number for each in stream.last() if each.range.overlaps(missing)]
            return f"it lacks the keys {missing}; name the segments that have them, such as {_listed(others)}"
        if segment is not None:
            if begin < at:
                return f"segment {segment.number} has keys of another segment in it; name one of them"
            at = segment.range.end
    return ""


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def truncation(
    stream: Stream, cut: StreamCut, gone: Collection[int], shared: Collection[int]
) -> tuple[list[Segment], list[Segment]]:
    """Return the segments to delete, oldest first, and the segments whose begin changes, with their new begins.

    `gone` are the segments before the cut. `shared` are segments that cannot be deleted, because other journals share
    their content. These and their successors stay, but are no longer read: their final offsets, which must be known,
    become their begins.
    """
    kept = {number for number in gone if not ({number} | stream.ancestors([number])).isdisjoint(shared)}
    deleted = [stream.segments[number] for number in sorted(set(gone) - kept)]
    begins = dict(cut)
    for number in kept:
        begins[number] = stream.segments[number].sealed_at or 0
    later = [(stream.segments[number], begin) for number, begin in sorted(begins.items())]
    return deleted, [replace(segment, begin=begin) for segment, begin in later if begin > segment.begin]


def batched(groups: Iterable[Sequence[pb.ApplyRequest.Change]], most: int) -> Iterator[list[pb.ApplyRequest.Change]]:
    """Yield batches of at most `most` changes. A group has at most `most` changes, which stay together."""
    batch: list[pb.ApplyRequest.Change] = []
    for group in groups:
        if batch and len(batch) + len(group) > most:
            yield batch
            batch = []
        batch = [*batch, *group]
    if batch:
        yield batch
