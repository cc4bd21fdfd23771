"""Discovery of content to read: the selected journals, their begin and end offsets, and their segments of streams.

When a stream is split or merged, the events of a key continue in another segment. A segment is *open* when all its
predecessors have been read to their final offsets (`coranto.streams.model.frontier`). A transaction or micro-batch
reads only segments that are open at its beginning, so it never has events of a key from two segments. A checkpoint
includes a segment only once it is open. So if it includes the first segments after a truncation, the reader has read
all removed segments.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from coranto.client import JournalInfo, SyncJournalClient
from coranto.client.routes import KnownRoute
from coranto.errors import InvalidInput, JournalNotFound, JournalSuspended, StreamChanged, StreamTruncated
from coranto.fragments import forks
from coranto.labels import CONTENT_TYPE, JSON_LINES, MESSAGE_TYPE, NAME, STREAM, label_selector, value_of
from coranto.offsets import JournalOffset
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.streams.model.stream import Segment

T = TypeVar("T")

_CONCURRENT_CALLS: Final = 16
_ASK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class JournalLabels:
    """Required labels of journals: the content type, which may be missing, and the message type."""

    content_type: str | None = JSON_LINES
    """None: any."""
    message_type: str | None = None
    """None: any, or no type."""

    def require(self, info: JournalInfo, field: str) -> None:
        """Raise InvalidInput for `field` if a journal has other labels."""
        content_type = value_of(info.spec.labels, CONTENT_TYPE)
        if self.content_type is not None and content_type not in ("", self.content_type):
            raise InvalidInput(
                f"journal {info.name} has {CONTENT_TYPE} {content_type}; only {self.content_type} can be read: "
                "leave the journal out, or choose the framing of its messages",
                field=field,
            )
        message_type = value_of(info.spec.labels, MESSAGE_TYPE)
        if self.message_type is not None and message_type != self.message_type:
            raise InvalidInput(
                f"journal {info.name} has {MESSAGE_TYPE} {message_type or 'none'}, and {self.message_type} is read: "
                "leave the journal out, or name a message type",
                field=field,
            )


_LINES_OF_JSON: Final = JournalLabels()
ANY_LABELS: Final = JournalLabels(content_type=None)


def list_journals(
    client: SyncJournalClient, wanted: str | Sequence[str], *, field: str, labels: JournalLabels = _LINES_OF_JSON
) -> tuple[JournalInfo, ...]:
    """Return the journals of a label selector, or with the given names, sorted by name.

    Raises InvalidInput for `field` if there is none, a named one is missing, or one has other labels.
    """
    if isinstance(wanted, str):
        listing = client.list(wanted)
        if not listing.journals:
            raise InvalidInput(f"no journal matches {wanted!r}; `coranto journals list` shows them all", field=field)
    else:
        listing = client.list(label_selector(include=[(NAME, name) for name in wanted]))
        if missing := sorted(set(wanted) - set(listing.names)):
            raise InvalidInput(f"there is no journal {missing[0]}; `coranto journals list` shows them all", field=field)
    return checked(listing.journals, field, labels)


def checked(found: Iterable[JournalInfo], field: str, labels: JournalLabels) -> tuple[JournalInfo, ...]:
    """Return journals, sorted by name. Raises InvalidInput for `field` if a journal has other labels."""
    for info in found:
        labels.require(info, field)
    return tuple(sorted(found, key=lambda info: info.name))


def require_unread(client: SyncJournalClient, journals: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidInput for new journals that are forks of a checkpoint's former sources."""
    present = set(journals)
    left, new = set(known) - present, sorted(present - set(known))
    if left and new:
        listing = client.list(label_selector(include=[(NAME, name) for name in new]))
        forks.require_unread((info.spec for info in listing.journals), left)


@dataclass(frozen=True, slots=True)
class ContentExtent:
    """The content of a journal: [begin, head)."""

    begin: int
    head: int
    created: int = 0
    """The etcd revision that created the journal; 0 means unknown."""
    segment: Segment | None = None
    """The journal as a segment of a stream, or None. Content before a truncation of the stream is excluded."""
    route: KnownRoute | None = field(default=None, compare=False)
    journal_id: str = ""
    """The journal's id; empty if unknown."""
    is_end: bool = True
    """False if the journal may have content after `head`, at a broker that does not answer (`JournalHead.is_end`)."""


Extents = Mapping[str, ContentExtent]


def begins_of(present: Extents) -> dict[str, int]:
    return {journal: extent.begin for journal, extent in present.items()}


def heads_of(present: Extents) -> dict[str, int]:
    """Return the end offsets of journals, with the journals' ids."""
    return {journal: JournalOffset(extent.head, extent.journal_id) for journal, extent in present.items()}


def routes_of(present: Extents) -> dict[str, KnownRoute]:
    return {journal: extent.route for journal, extent in present.items() if extent.route is not None}


def contents(client: SyncJournalClient, journals: Iterable[JournalInfo]) -> dict[str, ContentExtent]:
    """Return the content of listed journals, without segments that were removed since. Raises CorruptData."""
    routes, segments = {}, {}
    for info in journals:
        routes[info.name] = KnownRoute.listed(info.route)
        if value_of(info.spec.labels, STREAM):
            from coranto.streams.model.stream import decode_segment  # Imported only if streams are read.

            segments[info.name] = decode_segment(info)
    found = extents(client, list(routes), absent_ok=segments.keys())
    found = {name: replace(extent, route=routes[name]) for name, extent in found.items()}
    for name in segments.keys() & found.keys():
        begin = max(found[name].begin, segments[name].begin)
        found[name] = replace(found[name], begin=begin, segment=segments[name])
    return found


def extents(
    client: SyncJournalClient, journals: Sequence[str], *, absent_ok: Collection[str] = ()
) -> dict[str, ContentExtent]:
    """Return the content of journals, in the given order. Missing journals in `absent_ok` are omitted.

    One call asks for all journals. Journals without a conclusive report are queried individually.
    """
    if not journals:
        return {}
    reports = client.heads(label_selector(include=[(NAME, name) for name in journals])).by_name
    clear = {
        name: ContentExtent(each.begin, each.head, each.create_revision, journal_id=each.journal_id, is_end=each.is_end)
        for name, each in reports.items()
        if each.status == pb.OK and each.listed
    }

    def ask(name: str) -> ContentExtent | None:
        try:
            head = head_of(client, name)
        except JournalNotFound:
            if name not in absent_ok:
                raise
            return None
        begin = min(fragment_begins(client, name), default=head)  # Without fragments, all content is gone.
        if (known := reports.get(name)) is None:
            return ContentExtent(begin, head)
        return ContentExtent(begin, head, known.create_revision, is_end=known.is_end)

    unclear = [name for name in journals if name not in clear]
    clear |= {name: extent for name, extent in _concurrently(ask, unclear).items() if extent is not None}
    return {name: clear[name] for name in journals if name in clear}


def cuts_of(client: SyncJournalClient, journals: Sequence[str]) -> dict[str, list[int]]:
    """Return the begin offsets of the journals' fragments, sorted."""
    return _concurrently(lambda name: fragment_begins(client, name), journals)


def _concurrently(call: Callable[[str], T], journals: Sequence[str]) -> dict[str, T]:
    with concurrent.futures.ThreadPoolExecutor(_CONCURRENT_CALLS) as pool:
        return dict(zip(journals, pool.map(call, journals), strict=True))


def fragment_begins(client: SyncJournalClient, journal: str) -> list[int]:
    """Return the begin offsets of the journal's fragments, sorted. A fully suspended journal has none."""
    try:
        return sorted({info.fragment.begin for info in client.fragments(journal)})
    except JournalSuspended:
        return []


def head_of(client: SyncJournalClient, journal: str) -> int:
    """Return the journal's write head, also if it is fully suspended."""
    try:
        return client.head(journal)
    except JournalSuspended:
        # The journal has no content and no broker. Its spec has the offset.
        for info in client.list(label_selector(include=[(NAME, journal)])).journals:
            if info.spec.suspend.level == pb.JournalSpec.Suspend.FULL:
                return info.spec.suspend.offset
        return client.head(journal)  # An append has just resumed it.


class GoneSegments(NamedTuple):
    """Journals of segments that do not exist any more."""

    read: frozenset[str]
    unread: frozenset[str]
    """Segments that were not read to their ends, as far as is known."""


def open_journals(present: Extents, read: Mapping[str, int]) -> frozenset[str]:
    """Return the segments that are open at the `read` offsets, and all journals that are not segments."""
    waiting: set[str] = set()
    for segments in _streams(present).values():
        from coranto.streams.model.frontier import readable  # Imported only if streams are read.

        through = {
            number: max(read.get(each.journal, 0), present[each.journal].begin) for number, each in segments.items()
        }
        found = readable(segments, through)
        waiting.update(each.journal for number, each in segments.items() if number not in found)
    return frozenset(present.keys() - waiting)


def gone_segments(present: Extents, known: Collection[str]) -> GoneSegments:
    """Return the segments in a checkpoint (`known`) that were removed from their streams."""
    read: set[str] = set()
    unread: set[str] = set()
    for name, segments in _streams(present).items():
        from coranto.streams.model.frontier import has_read_removed_segments
        from coranto.streams.model.stream import stream_of

        begun = [number for number, each in segments.items() if each.journal in known]
        gone = {journal for journal in set(known) - present.keys() if stream_of(journal) == name}
        (read if has_read_removed_segments(segments, begun) else unread).update(gone)
    return GoneSegments(frozenset(read), frozenset(unread))


def unread_segment_error(journal: str, offset: int) -> StreamTruncated:
    """Return the error for a removed segment that was only read through an offset."""
    return StreamTruncated(
        f"segment {journal} was read through {offset} and is gone: its stream was truncated before the segment was "
        "read to its end. Begin again with a new checkpoint or a consumer of another name, "
        "or continue without it (failOnDataLoss=false)",
        int(journal.rpartition("/")[2]),
    )


def wait_until_sealed(ask: Callable[[], dict[str, ContentExtent]], timeout: float) -> dict[str, ContentExtent]:
    """Poll until each segment opens once its predecessors are read to their heads. Raises StreamChanged.

    During a split or merge, some segments do not: final offsets are not recorded yet.
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


def _streams(present: Extents) -> dict[str, dict[int, Segment]]:
    found: dict[str, dict[int, Segment]] = {}
    for extent in present.values():
        if (segment := extent.segment) is not None:
            from coranto.streams.model.stream import stream_of

            found.setdefault(stream_of(segment.journal), {})[segment.number] = segment
    return found
