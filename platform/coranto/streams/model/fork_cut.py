"""The cut of a stream's fork: an offset for each segment, which tears nothing. Pure.

A cut is *consistent* if it keeps the two promises of a stream:

* **Transactions are whole.** A transaction on one key is one span of one segment. One on several keys becomes readable
  by its acknowledgements, a span in each of its segments. In a fork, all spans of a transaction are below the cut, or
  no byte of any of them is.
* **Keys are in order.** A segment is in the fork only if all its predecessors are there to their ends, and so are the
  other successors of these. Otherwise the predecessors are active in the fork, and take the next events of their keys.

If two cuts are consistent, the larger offsets of both are so, too. Hence there is a largest consistent cut at or below
any offsets that a user wishes for. `consistent_cut` finds it: it lowers what would be torn, and so what that tears in
turn, until nothing changes.
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

    `wanted` has an offset for each segment, and `units` are the transactions with content below it. No reader is below
    a segment's `begin`, so spans that begin there cannot be torn. Raises InvalidInput if a segment of the cut would end
    below its `begin`.
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
    """Take segments out of the cut that may not be in it. Returns True if there were any."""
    found = False
    for number in sorted(cut):  # A successor's number is larger than its predecessors'.
        before = [stream.segments[each] for each in stream.segments[number].predecessors if each in stream.segments]
        if all(
            cut.get(each.number, -1) == each.sealed_at
            and all(one.number in cut for one in stream.successors(each.number))
            for each in before
        ):
            continue
        # Of a predecessor's successors, none may be there without the others.
        for sibling in {one.number for each in before for one in stream.successors(each.number)} | {number}:
            found |= cut.pop(sibling, None) is not None
    return found


def fork_segments(stream: Stream, name: str, cut: Mapping[int, int]) -> dict[int, Segment]:
    """Return the segments of the stream `name`, which is forked at a consistent cut.

    They keep their numbers, ranges and epochs, so a reader's position at or before the cut is one in the fork. Segments
    that are whole and have successors there stay sealed; so do those at the end of a sealed stream that are whole.
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
