"""Streams: segments, their order, and their encoding in the labels of journal specs.

A stream is a set of journals, one for each *segment*. A segment holds the events of the routing keys of one range.
The active segments (`Stream.active`), those that are written to, share the key space without gap or overlap, unless the
stream is sealed. Scaling seals some of them and replaces them by successors: new segments with other ranges over the
same keys. A reader begins a segment once it has read all its predecessors to their ends, so the events of each key stay
in order.

All of this is stored in labels and flags of the segments' journal specs, and changed by one atomic Apply:

* A segment is *being sealed* once its journal is read-only. Then either other segments succeed it, or the label
  `coranto.dev/end-of-stream` says that none will.
* It is *sealed* once the label `coranto.dev/sealed-at` has its final offset, which an empty append determines.
* `coranto.dev/truncated-to` is the first readable offset.

`decode` turns a listing into a `Stream`, and rejects contradictory labels. `labels_of` is its inverse.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from coranto import labels
from coranto.client.values import JournalInfo, Listing
from coranto.errors import CorruptData, InvalidInput, StreamNotFound
from coranto.names import MAX_JOURNAL_BYTES, validate_path
from coranto.specs.validation import may_write
from coranto.streams.model.keys import KeyRange, key_hash
from coranto.streams.model.pictures import stream_html
from coranto.wire import protocol_pb2 as pb

# Labels of segments' journal specs.
STREAM_LABEL: Final = labels.STREAM
SEGMENT_LABEL: Final = "coranto.dev/segment"
EPOCH_LABEL: Final = "coranto.dev/epoch"
KEY_BEGIN_LABEL: Final = "coranto.dev/key-begin"
KEY_END_LABEL: Final = "coranto.dev/key-end"
PREDECESSOR_LABEL: Final = "coranto.dev/predecessor"
SEALED_AT_LABEL: Final = "coranto.dev/sealed-at"
END_OF_STREAM_LABEL: Final = "coranto.dev/end-of-stream"
TRUNCATED_LABEL: Final = "coranto.dev/truncated-to"
MAX_WRITERS_LABEL: Final = "coranto.dev/max-writers"
"""Maximum writers whose state a segment's registers hold. Successors inherit it."""
SCALING_LABEL: Final = "coranto.dev/scaling"
"""The stream's scaling policy. Successors inherit it."""
STREAM_PART_LABEL: Final = labels.STREAM_PART

MAX_RECORD_BYTES: Final = 64 << 20
"""Maximum bytes of one record in a stream's state journals. Bounds the memory that a line takes in each process."""

# Registers of segments.
HELD_LABEL: Final = labels.HELD
"""Marks registers that were not lost. A check that includes it fails on empty registers."""
RESTORED_LABEL: Final = "coranto.dev/restored"
EXPIRED_LABEL: Final = "coranto.dev/expired"

_STATE_LABELS = frozenset(
    {
        STREAM_LABEL,
        SEGMENT_LABEL,
        EPOCH_LABEL,
        KEY_BEGIN_LABEL,
        KEY_END_LABEL,
        PREDECESSOR_LABEL,
        SEALED_AT_LABEL,
        END_OF_STREAM_LABEL,
        TRUNCATED_LABEL,
    }
)
_SUFFIX_BYTES: Final = 80  # The bytes that the names of journals add to their stream's name.
_NUMBER_DIGITS: Final = 8

StreamCut: TypeAlias = Mapping[int, int]
"""A place in a stream: offsets by segment number. Content below these offsets is before the cut.

Its segments share the key space without gap or overlap. Their predecessors are before the cut, and their successors
are after it.
"""


# ------------------------------------------------------------------------------------------------------------- names


def validate_stream(name: str) -> str:
    """Return `name` if it is a valid name of a stream: a clean relative path of 1 to 432 bytes. Raises InvalidInput."""
    return validate_path("stream", name, 1, MAX_JOURNAL_BYTES - _SUFFIX_BYTES)


def segment_journal(stream: str, number: int) -> str:
    return f"{stream}/segment/{number:0{_NUMBER_DIGITS}d}"


def stream_of(journal: str) -> str:
    """Return the stream of a segment journal by its name; empty if the journal is not a segment."""
    stream, _, number = journal.rpartition("/segment/")
    return stream if len(number) == _NUMBER_DIGITS and number.isascii() and number.isdigit() else ""


def transactions_journal(stream: str) -> str:
    """Return the name of the journal that holds the decisions of multi-key transactions."""
    return f"{stream}/transactions"


def marks_journal(stream: str) -> str:
    """Return the name of the journal that holds the times that writers note."""
    return f"{stream}/marks"


def dead_letters_journal(stream: str) -> str:
    """Return the name of the journal that holds records that could not become events."""
    return f"{stream}/dead-letters"


def readers_journal(stream: str, group: str) -> str:
    """Return the name of the journal that holds a reader group's state."""
    return f"{stream}/readers/{group}"


def segments_selector(stream: str) -> pb.LabelSelector:
    """Return a selector of the journals of a stream's segments."""
    return labels.label_selector(include=[("name:prefix", f"{stream}/segment/"), (STREAM_LABEL, stream)])


# ------------------------------------------------------------------------------------------------------------ values


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment. Offsets are offsets of its journal.

    `sealing` is true once its journal is read-only. `sealed_at` is its final offset; None until that is known.
    Readers begin at `begin`. `epoch` is the epoch that created the segment. `predecessors` are the segments that it
    succeeded; some or all of them may be gone.
    """

    number: int
    epoch: int
    journal: str
    range: KeyRange
    predecessors: frozenset[int] = frozenset()
    sealing: bool = False
    sealed_at: int | None = None
    begin: int = 0
    end_of_stream: bool = False
    mod_revision: int = 0


@dataclass(frozen=True)
class Stream:
    """A stream as it was at a revision of etcd. Streams with equal segments are equal, whatever the revision.

    `segments` are all segments that are not truncated away, by number.
    """

    name: str
    segments: Mapping[int, Segment]
    revision: int = 0
    content_type: str = ""
    max_writers: int | None = None
    scaling: str = ""
    """The scaling policy, as `coranto.streams.control.scaling.parse_policy` reads it; empty for none."""
    cluster: int = 0
    """The id of the etcd cluster that `revision` is from; 0 if unknown. A restored cluster has another id."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.name, self.segments) == (other.name, other.segments)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_sealed(self) -> bool:
        """True if the stream accepts no more events."""
        return not self.active()

    @property
    def epoch(self) -> int:
        return max(segment.epoch for segment in self.segments.values())

    @cached_property
    def _active(self) -> tuple[Segment, ...]:
        return ordered(segment for segment in self.segments.values() if not segment.sealing)

    @cached_property
    def _ends(self) -> list[int]:
        return [segment.range.end for segment in self._active]

    def active(self) -> tuple[Segment, ...]:
        """Return the segments to write to, in the order of their ranges.

        Together, their ranges are the key space. A sealed stream has no active segments. While a stream of very many
        segments is being sealed, only some of them are left.
        """
        return self._active

    def last(self) -> tuple[Segment, ...]:
        """Return the segments without successors, in the order of their ranges. Together, these are the key space.

        The result is the active segments, and in a stream that is sealed or being sealed, the last active segments.
        """
        ends = (each for each in self.segments.values() if each.end_of_stream and not self.successors(each.number))
        return ordered((*self._active, *ends))

    def segment_at(self, key_hash: int) -> Segment | None:
        """Return the active segment of a key hash; None if the stream is sealed."""
        at = bisect_right(self._ends, key_hash)
        found = self._active[at] if at < len(self._active) else None
        return found if found is not None and found.range.contains(key_hash) else None

    def segment_of(self, key: str) -> Segment | None:
        """Return the active segment of a routing key; None if the stream is sealed."""
        return self.segment_at(key_hash(key))

    @cached_property
    def _successors(self) -> Mapping[int, tuple[Segment, ...]]:
        found: dict[int, list[Segment]] = {}
        for segment in self.segments.values():
            for number in segment.predecessors:
                found.setdefault(number, []).append(segment)
        return {number: ordered(segments) for number, segments in found.items()}

    def successors(self, number: int) -> tuple[Segment, ...]:
        """Return the successors of a segment, which may be gone itself, in the order of their ranges."""
        return self._successors.get(number, ())

    def ancestors(self, numbers: Iterable[int]) -> frozenset[int]:
        """Return all remaining ancestors of the given segments."""
        found: set[int] = set()
        todo = list(numbers)
        while todo:
            for number in self.segments[todo.pop()].predecessors & self.segments.keys() - found:
                found.add(number)
                todo.append(number)
        return frozenset(found)

    def heads(self) -> tuple[Segment, ...]:
        """Return the segments where readers begin: those without remaining predecessors, ordered by range."""
        return ordered(each for each in self.segments.values() if not each.predecessors & self.segments.keys())

    def _repr_html_(self) -> str:
        return stream_html(self)

    def unfinished(self) -> tuple[Segment, ...]:
        """Return the segments that are being sealed and whose final offset is not known yet."""
        return ordered(each for each in self.segments.values() if each.sealing and each.sealed_at is None)


def ordered(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Sort segments by the beginning of their ranges, then by number."""
    return tuple(sorted(segments, key=lambda each: (each.range.begin, each.number)))


def covers(ranges: Iterable[KeyRange], whole: KeyRange) -> bool:
    """Return True if the ranges together are exactly `whole`, without gap or overlap."""
    at = whole.begin
    for each in sorted(ranges):
        if each.begin != at:
            return False
        at = each.end
    return at == whole.end


# ------------------------------------------------------------------------------------------------ from and to labels


def labels_of(stream: str, segment: Segment) -> pb.LabelSet:
    """Return the labels that describe a segment, except for `sealing`, which is in the journal's flags."""
    pairs = [
        (STREAM_LABEL, stream),
        (SEGMENT_LABEL, str(segment.number)),
        (EPOCH_LABEL, str(segment.epoch)),
        (KEY_BEGIN_LABEL, f"{segment.range.begin:014x}"),
        (KEY_END_LABEL, f"{segment.range.end:014x}"),
        *((PREDECESSOR_LABEL, str(number)) for number in segment.predecessors),
    ]
    if segment.sealed_at is not None:
        pairs.append((SEALED_AT_LABEL, str(segment.sealed_at)))
    if segment.end_of_stream:
        pairs.append((END_OF_STREAM_LABEL, "true"))
    if segment.begin:
        pairs.append((TRUNCATED_LABEL, str(segment.begin)))
    return labels.label_set(pairs)


def spec_of(stream: str, segment: Segment, template: pb.JournalSpec) -> pb.JournalSpec:
    """Return a segment's journal spec: the template with the segment's name, flags and labels."""
    spec = pb.JournalSpec()
    spec.CopyFrom(template)
    spec.name = segment.journal
    spec.flags = pb.JournalSpec.O_RDONLY if segment.sealing else pb.JournalSpec.O_RDWR
    own = labels.label_set((label.name, label.value) for label in spec.labels.labels if label.name not in _STATE_LABELS)
    spec.labels.CopyFrom(labels.union(labels_of(stream, segment), own))
    return spec


def decode(listing: Listing) -> Stream:
    """Decode the one stream in a listing of its journals. Journals that are not segments are ignored.

    Raises StreamNotFound if there is no segment, and CorruptData if there are segments of several streams, or labels
    that contradict each other.
    """
    return decode_all(listing, single=True)[0]


def decode_all(
    listing: Listing, *, single: bool = False, invalid: dict[str, CorruptData] | None = None
) -> tuple[Stream, ...]:
    """Decode all streams with segments in a listing, in the order of their names.

    Raises CorruptData if the labels of a stream contradict each other. If `invalid` is given, the stream is left out
    instead, and its error is added to `invalid` by the stream's name.
    """
    found: dict[str, list[JournalInfo]] = {}
    for info in listing.journals:
        if name := labels.value_of(info.spec.labels, STREAM_LABEL):
            found.setdefault(name, []).append(info)
    if single and not found:
        raise StreamNotFound("the stream has no segments: check its name, or create it (`coranto streams create`)")
    if single and len(found) > 1:
        raise CorruptData(f"these are segments of several streams: {', '.join(sorted(found))}")
    streams: list[Stream] = []
    for name in sorted(found):
        try:
            streams.append(_stream(name, found[name], listing.header.etcd))
        except CorruptData as error:
            if invalid is None:
                raise
            invalid[name] = error
    return tuple(streams)


def _stream(name: str, journals: Sequence[JournalInfo], etcd: pb.Header.Etcd) -> Stream:
    segments: dict[int, Segment] = {}
    for info in journals:
        segment = decode_segment(info)
        if segment.number in segments:
            raise CorruptData(f"stream {name}: two journals are segment {segment.number}")
        segments[segment.number] = segment
    newest = max(journals, key=lambda info: info.name).spec.labels
    stream = Stream(
        name,
        dict(sorted(segments.items())),
        etcd.revision,
        labels.value_of(newest, labels.CONTENT_TYPE),
        _number(newest, MAX_WRITERS_LABEL, f"stream {name}", None),
        labels.value_of(newest, SCALING_LABEL),
        etcd.cluster_id,
    )
    _check(stream)
    return stream


def decode_segment(info: JournalInfo) -> Segment:
    """Decode a segment from its journal. Raises CorruptData if its labels are incomplete or contradict each other."""
    spec, subject = info.spec, f"journal {info.name}"
    found = spec.labels
    number = _required(found, SEGMENT_LABEL, subject)
    name = labels.value_of(found, STREAM_LABEL)
    if info.name != segment_journal(name, number):
        raise CorruptData(f"{subject}: its labels say segment {number} of {name}, which is another journal's name")
    sealing = not may_write(spec)
    sealed_at = _number(found, SEALED_AT_LABEL, subject, None)
    end_of_stream = bool(labels.values_of(found, END_OF_STREAM_LABEL))
    if not sealing and (sealed_at is not None or end_of_stream):
        raise CorruptData(f"{subject}: it has the labels of a sealed segment, but its flags allow writing")
    try:
        keys = KeyRange(_required(found, KEY_BEGIN_LABEL, subject, 16), _required(found, KEY_END_LABEL, subject, 16))
    except InvalidInput as error:
        raise CorruptData(f"{subject}: {error.message}") from None
    return Segment(
        number,
        _required(found, EPOCH_LABEL, subject),
        info.name,
        keys,
        frozenset(_parse(value, PREDECESSOR_LABEL, subject) for value in labels.values_of(found, PREDECESSOR_LABEL)),
        sealing,
        sealed_at,
        _number(found, TRUNCATED_LABEL, subject, None) or 0,
        end_of_stream,
        info.mod_revision,
    )


def _required(found: pb.LabelSet, name: str, subject: str, base: int = 10) -> int:
    number = _number(found, name, subject, None, base)
    if number is None:
        raise CorruptData(f"{subject}: it belongs to a stream, but has no label {name}")
    return number


def _number(found: pb.LabelSet, name: str, subject: str, default: int | None, base: int = 10) -> int | None:
    values = labels.values_of(found, name)
    if len(values) > 1:
        raise CorruptData(f"{subject}: the label {name} has the values {', '.join(values)}, but may have only one")
    return _parse(values[0], name, subject, base) if values else default


def _parse(value: str, name: str, subject: str, base: int = 10) -> int:
    try:
        if value.isascii() and value.isalnum():
            return int(value, base)
    except ValueError:
        pass
    raise CorruptData(f"{subject}: {name}={value} is not a number")


def _check(stream: Stream) -> None:
    """Check that the segments are consistent with each other. Raises CorruptData."""
    subject = f"stream {stream.name}"
    for segment in stream.segments.values():
        for number in segment.predecessors:
            predecessor = stream.segments.get(number)
            if number >= segment.number or (predecessor is not None and predecessor.epoch >= segment.epoch):
                raise CorruptData(f"{subject}: segment {segment.number} cannot succeed {number}, which is not older")
            if predecessor is not None and not (predecessor.sealing and predecessor.range.overlaps(segment.range)):
                raise CorruptData(
                    f"{subject}: segment {segment.number} succeeds {number}, which is not read-only or has other keys"
                )
    last = stream.last()
    if not covers((each.range for each in last), KeyRange.FULL):
        shares = ", ".join(f"{each.number} {each.range}" for each in last)
        raise CorruptData(f"{subject}: the segments without successors do not share the key space: {shares}")
    for segment in stream.segments.values():
        if not segment.sealing:
            continue
        after = [max(segment.range.begin, each.range.begin) for each in stream.successors(segment.number)]
        until = [min(segment.range.end, each.range.end) for each in stream.successors(segment.number)]
        if segment.end_of_stream:
            if after:
                raise CorruptData(f"{subject}: segment {segment.number} is the end of the stream, but has successors")
        elif not covers(map(KeyRange, after, until), segment.range):
            raise CorruptData(
                f"{subject}: segment {segment.number} is read-only, but its successors do not share its keys "
                f"{segment.range}. If its flags were changed by hand, make it writable again"
            )
