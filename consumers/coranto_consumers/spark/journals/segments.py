"""Segments of streams among the journals of a read: which may be read now, and which are gone.

The events of a key are in one segment after the other, as a stream is split and merged. A segment is *open* when
all segments that it succeeds have been read to their final offsets (`coranto.streams.model.frontier` has the rule). A
transaction or micro-batch reads open segments only, as of its beginning. So it never has events of two segments of a
key: within it, commits have the order of their offsets, and what later ones deliver was committed later.

A stream is *truncated* by deleting segments. That loses nothing for those who have read them. A segment becomes known
in a checkpoint only when it is open, so a checkpoint that knows where the rest of the stream begins needs nothing of
what was before.
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
    """Journals of segments that are not there any more."""

    read: frozenset[str]
    """They were read to their ends before."""
    unread: frozenset[str]
    """They were not, or nothing tells that they were."""


def open_journals(present: Mapping[str, ContentExtent], read: Mapping[str, int]) -> frozenset[str]:
    """Return the journals that may be read: all but segments that have to wait for others.

    `read` has the offsets through which journals are read; one without is read from where it begins.
    """
    waiting: set[str] = set()
    for segments in _streams(present).values():
        from coranto.streams.model.frontier import readable  # Not for those who read no stream.

        through = {
            number: max(read.get(each.journal, 0), present[each.journal].begin) for number, each in segments.items()
        }
        found = readable(segments, through)
        waiting.update(each.journal for number, each in segments.items() if number not in found)
    return frozenset(present.keys() - waiting)


def gone_segments(present: Mapping[str, ContentExtent], known: Collection[str]) -> GoneSegments:
    """Return the segments among the journals that a checkpoint knows which are gone from streams that are there."""
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
    """Return the error about a segment that is gone, and was read through an offset only."""
    return StreamTruncated(
        f"segment {journal} was read through {offset} and is gone: its stream was truncated before the rest was read, "
        "or before anything told that there is none. Begin anew, with a new checkpoint or a consumer of another name, "
        "or go on without it (failOnDataLoss=false)",
        int(journal.rpartition("/")[2]),
    )


def when_sealed(ask: Callable[[], dict[str, ContentExtent]], patience: float) -> dict[str, ContentExtent]:
    """Ask for what journals hold until each segment may be read once those before it are read, as far as they go now.

    It is otherwise while a stream is split or merged, for a moment. Raises StreamChanged after `patience` seconds.
    """
    deadline = time.monotonic() + patience
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
    """Return the segments that are there, by stream and number."""
    found: dict[str, dict[int, Segment]] = {}
    for extent in present.values():
        if (segment := extent.segment) is not None:
            from coranto.streams.model.stream import stream_of

            found.setdefault(stream_of(segment.journal), {})[segment.number] = segment
    return found
