"""The changes of a truncation, in an order in which any first part of them leaves a valid stream. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from coranto.streams.model.stream import Segment, Stream, StreamCut
from coranto.wire import protocol_pb2 as pb


def truncation(
    stream: Stream, cut: StreamCut, gone: Collection[int], shared: Collection[int]
) -> tuple[list[Segment], list[Segment]]:
    """Return the segments to delete, from the oldest on, and those that begin later, as they will be.

    `gone` are the segments before the cut, and `shared` those that other journals share content of, which cannot be
    deleted. These stay, and so do segments that succeed them. Nothing of them is read any more: their final offsets,
    which must be known, become their begins.
    """
    kept = {number for number in gone if not ({number} | stream.ancestors([number])).isdisjoint(shared)}
    deleted = [stream.segments[number] for number in sorted(set(gone) - kept)]
    begins = dict(cut)
    for number in kept:
        begins[number] = stream.segments[number].sealed_at or 0
    later = [(stream.segments[number], begin) for number, begin in sorted(begins.items())]
    return deleted, [replace(segment, begin=begin) for segment, begin in later if begin > segment.begin]


def batched(groups: Iterable[Sequence[pb.ApplyRequest.Change]], most: int) -> Iterator[list[pb.ApplyRequest.Change]]:
    """Yield batches of at most `most` changes. Those of a group stay together; it has no more than that."""
    batch: list[pb.ApplyRequest.Change] = []
    for group in groups:
        if batch and len(batch) + len(group) > most:
            yield batch
            batch = []
        batch = [*batch, *group]
    if batch:
        yield batch
