"""Positions of readers in a segment, and in a stream.

A plain offset is not enough while a multi-key transaction is open: its first messages are before the offset, and its
acknowledgement is after it. A `SegmentPosition` also names those messages, so that resuming from it neither loses nor
repeats an event. A `StreamPosition` holds one `SegmentPosition` per segment. It can be used as a `StreamCut`: as a
mapping, it has the first offset of each segment whose content is still needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pydantic import TypeAdapter, ValidationError

from coranto.errors import CorruptData, InvalidInput
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.uuids import ProducerId
from coranto.streams.model.pictures import position_html

_PRODUCER: Final = re.compile("[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class PendingMessages:
    """Messages of an open transaction that were read but not delivered.

    They are the messages of `producer` (hexadecimal) with clocks above `last_ack`, from offset `begin` on.
    """

    producer: str
    last_ack: int
    begin: int

    def __post_init__(self) -> None:
        if not _PRODUCER.fullmatch(self.producer) or self.last_ack < 0:
            raise InvalidInput(f"{self!r} is invalid: a producer is 12 hexadecimal digits, and no clock is negative")


@dataclass(frozen=True, slots=True)
class SegmentPosition:
    """A reader's position in a segment.

    Everything below `offset` is read and, if committed, delivered, except for the `pending` messages. `complete` means
    that the segment is sealed and `offset` is its final offset. `journal_id` is the id of the segment's journal; it is
    empty if it is unknown, as in positions of earlier versions, and comparison ignores it.
    """

    offset: int
    pending: tuple[PendingMessages, ...] = ()
    complete: bool = False
    journal_id: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.offset < 0 or any(not 0 <= each.begin < self.offset for each in self.pending):
            raise InvalidInput(
                f"{self!r} is not a position: offsets are not negative, and pending messages are below them"
            )

    @property
    def needed_from(self) -> int:
        """The first offset whose content is needed to resume from here."""
        return min([each.begin for each in self.pending], default=self.offset)

    def source(self) -> Source:
        """Return the position as the source state that a sequencer starts from."""
        producers = {
            ProducerId(bytes.fromhex(each.producer)): ProducerState(each.last_ack, each.begin) for each in self.pending
        }
        return Source(self.offset, producers, self.journal_id)


class StreamPosition(Mapping[int, int]):
    """A reader's position in each segment that it reads, by segment number. Immutable.

    As a mapping, it is the `StreamCut` of the offsets that are still needed to resume. It is safe to truncate there.
    """

    __slots__ = ("segments",)

    def __init__(self, segments: Mapping[int, SegmentPosition]) -> None:
        self.segments: Final[Mapping[int, SegmentPosition]] = dict(sorted(segments.items()))
        """The exact positions."""

    @classmethod
    def of(cls, cut: Mapping[int, int]) -> StreamPosition:
        """Return the position of a cut; a position is returned unchanged. Raises InvalidInput."""
        if isinstance(cut, StreamPosition):
            return cut
        return cls({number: SegmentPosition(offset) for number, offset in cut.items()})

    def in_fork(self) -> StreamPosition:
        """Return the position for a fork of the stream, whose journals have other ids and the same offsets."""
        return StreamPosition({number: replace(each, journal_id="") for number, each in self.segments.items()})

    def to_json(self) -> str:
        """Return the position as text, to be stored together with the results of the events before it."""
        return _SEGMENTS.dump_json(dict(self.segments), exclude_defaults=True).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> StreamPosition:
        """Decode a position from the text of `to_json`. Raises CorruptData."""
        try:
            return cls(_SEGMENTS.validate_json(text))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f" at {part!r}" for part in first["loc"][:1])
            raise CorruptData(f"{text[:200]!r} is not a position in a stream{place}: {first['msg']}") from error

    def __getitem__(self, number: int) -> int:
        return self.segments[number].needed_from

    def __iter__(self) -> Iterator[int]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StreamPosition):
            return self.segments == other.segments
        return Mapping.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StreamPosition.from_json({self.to_json()!r})"

    def _repr_html_(self) -> str:
        rows = [(number, at.offset, len(at.pending), at.complete) for number, at in self.segments.items()]
        return position_html(rows)


_SEGMENTS: Final = TypeAdapter(dict[int, SegmentPosition])
