"""Segments of streams among the journals of a read: the readable ones, and the truncated ones.

As a stream is split and merged, the events of a key are in one segment after the other. A segment is *open* when all
its predecessors have been read to their final offsets (`coranto.streams.model.frontier`). A transaction or micro-batch
reads only segments that are open at its beginning, so it never has events of two segments of a key. A checkpoint
includes a segment only once it is open, so one with the first segments that truncation left needs none before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from coranto.errors import StreamChanged, StreamTruncated
from coranto_consumers.spark.journals.discovery import ContentExtent, heads_of

if TYPE_CHECKING:
    from coranto.streams.model.stream import Segment

_ASK_SECONDS: Final = 0.1


class GoneSegments(NamedTuple):
    """Journals of segments that do not exist any more."""

    read: frozenset[str]
    """Segments that were read to their ends."""
    unread: frozenset[str]
    """Segments that were not, or not known to be, read to their ends."""


def open_journals(present: Mapping[str, ContentExtent], read: Mapping[str, int]) -> frozenset[str]:
    """Return the journals that may be read, by the offsets that others are `read` through."""
    waiting: set[str] = set()
    for segments in _streams(present).values():
        from coranto.streams.model.frontier import readable  # Imported only if streams are read.

        through = {
            number: max(read.get(each.journal, 0), present[each.journal].begin) for number, each in segments.items()
        }
        found = readable(segments, through)
        waiting.update(each.journal for number, each in segments.items() if number not in found)
    return frozenset(present.keys() - waiting)


def gone_segments(present: Mapping[str, ContentExtent], known: Collection[str]) -> GoneSegments:
    """Return the segments in a checkpoint (`known`) that are gone from present streams."""
    read: set[str] = set()
    unread: set[str] = set()
    for name, segments in _streams(present).items():
        from coranto.streams.model.frontier import has_read_what_is_gone
        from coranto.streams.model.stream import stream_of

        begun = [number for number, each in segments.items() if each.journal in known]
        gone = {journal for journal in set(known) - present.keys() if stream_of(journal) == name}
        (read if has_read_what_is_gone(segments, begun) else unread).update(gone)
    return GoneSegments(frozenset(read), frozenset(unread))


def not_read(journal: str, offset: int) -> StreamTruncated:
    """Return the error for a segment that is gone, and was read through an offset only."""
    return StreamTruncated(
        f"segment {journal} was read through {offset} and is gone: its stream was truncated before the rest was read, "
        "or before a read found that there is none. Begin again with a new checkpoint or a consumer of another name, "
        "or continue without it (failOnDataLoss=false)",
        int(journal.rpartition("/")[2]),
    )


def when_sealed(ask: Callable[[], dict[str, ContentExtent]], timeout: float) -> dict[str, ContentExtent]:
    """Call `ask` until every segment is open once all present content is read. Raises StreamChanged after `timeout`.

    During a split or merge, some are not for a moment.
    """
    deadline = time.monotonic() + timeout
    while True:
        present = ask()
        waiting = present.keys() - open_journals(present, heads_of(present))
        if not waiting:
            return present
        if time.monotonic() >= deadline:
            from coranto.streams.model.stream import stream_of

            first = min(waiting)
            raise StreamChanged(
                f"{first} cannot be read yet: the final offset of a segment before it is not recorded, or its content "
                f"does not reach that. `coranto streams resume {stream_of(first)}` finishes a split or merge whose "
                "process has died"
            )
        time.sleep(_ASK_SECONDS)


def _streams(present: Mapping[str, ContentExtent]) -> dict[str, dict[int, Segment]]:
    found: dict[str, dict[int, Segment]] = {}
    for extent in present.values():
        if (segment := extent.segment) is not None:
            from coranto.streams.model.stream import stream_of

            found.setdefault(stream_of(segment.journal), {})[segment.number] = segment
    return found
