"""The cut of a stream's fork: an offset for each segment that tears no transaction. Pure.

A cut is *consistent* if it keeps both guarantees of a stream:

* **Transactions are atomic.** A transaction on one key is one span of one segment. A transaction on several keys
  becomes readable through its acknowledgements, one span in each of its segments. All spans of a transaction are below
  the cut, or none of their bytes are.
* **Keys are in order.** A segment is in the fork only if the fork has all its predecessors up to their ends, and all
  other successors of these predecessors. Otherwise the predecessors are active in the fork, and receive the next events
  of their keys.

The larger offsets of two consistent cuts are a consistent cut, too. So there is a largest consistent cut at or below
any requested offsets. `consistent_cut` finds it: it lowers the offsets that tear a transaction, and repeats this until
none does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from coranto.errors import InvalidInput
from coranto.streams.model.stream import Segment, Stream, segment_journal


class SegmentSpan(NamedTuple):
    """The bytes [begin, end) of a segment."""

    begin: int
    end: int


Unit: TypeAlias = Mapping[int, SegmentSpan]
"""The spans that make one transaction visible, by segment number."""


def consistent_cut(stream: Stream, wanted: Mapping[int, int], units: Iterable[Unit] = ()) -> dict[int, int]:
    """Return the largest consistent cut at or below `wanted`, by segment number. It may leave segments out.

    `wanted` has an offset for each segment, and `units` are the transactions with content below it. Spans that begin
    before a segment's `begin` are ignored, because nothing reads them. Raises InvalidInput if a segment of the cut
    would end before its `begin`.
    """
    cut = {
        number: wanted[number] if segment.sealed_at is None else min(wanted[number], segment.sealed_at)
        for number, segment in stream.segments.items()
    }
    readable = [
        {
            number: span
            for number, span in unit.items()
            if number in stream.segments and span.begin >= stream.segments[number].begin
        }
        for unit in units
    ]
    changed = True
    while changed:
        changed = _leave_out_successors(stream, cut)
        for unit in readable:
            whole = all(cut.get(number, -1) >= span.end for number, span in unit.items())
            for number, span in unit.items():
                if not whole and cut.get(number, -1) > span.begin:
                    cut[number], changed = span.begin, True
    for number, offset in cut.items():
        if offset < stream.segments[number].begin:
            raise InvalidInput(
                f"segment {number} of stream {stream.name} would end at {offset}, and its events before "
                f"{stream.segments[number].begin} are truncated: choose a later moment",
                field="cut",
            )
    return cut


def _leave_out_successors(stream: Stream, cut: dict[int, int]) -> bool:
    """Remove segments whose predecessors, or other successors of these, are incomplete. Returns True if any."""
    found = False
    for number in sorted(cut):  # A successor's number is larger than its predecessors'.
        before = [stream.segments[each] for each in stream.segments[number].predecessors if each in stream.segments]
        if all(
            cut.get(each.number, -1) == each.sealed_at
            and all(one.number in cut for one in stream.successors(each.number))
            for each in before
        ):
            continue
        # The successors of a predecessor are in the cut together, or not at all.
        for sibling in {one.number for each in before for one in stream.successors(each.number)} | {number}:
            found |= cut.pop(sibling, None) is not None
    return found


def fork_segments(stream: Stream, name: str, cut: Mapping[int, int]) -> dict[int, Segment]:
    """Return the segments of `name`, a fork of the stream at a consistent cut.

    They keep their numbers, ranges and epochs, so a reader's position at or before the cut is valid in the fork. A
    segment stays sealed if the cut includes all of it, and it has successors in the fork or ends a sealed stream.
    """
    found = {}
    for number, offset in sorted(cut.items()):
        segment = stream.segments[number]
        present_successors = [each for each in stream.successors(number) if each.number in cut]
        sealed = (
            segment.sealed_at is not None
            and offset == segment.sealed_at
            and (present_successors or segment.end_of_stream)
        )
        found[number] = replace(
            segment,
            journal=segment_journal(name, number),
            sealing=bool(sealed),
            sealed_at=segment.sealed_at if sealed else None,
            end_of_stream=bool(sealed) and segment.end_of_stream,
            mod_revision=0,
        )
    return found
