"""Time travel: positions in journals at some moment, and the check that their content still exists.

A moment is a pair of offsets for each journal, so that clients, Spark, commands and manifests read the same bytes at
any time. Moments come from recorded offsets, such as a consumer's checkpoint or a materialisation in Dagster, or from a
time.

The offset of a time is the begin of the first message with a later time in its UUID. Fragments that were stored
`SKEW_SECONDS` before the time are not read, because all of their messages are earlier. A producer whose clock is ahead
can move the offset only within the content after these fragments.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from coranto import labels
from coranto.client.values import JournalInfo
from coranto.errors import ContentGone, InvalidInput, JournalNotFound, JournalRecreated, Unavailable
from coranto.journal_ids import is_same
from coranto.messages.framing import JsonLines
from coranto.messages.reading import AsyncReadUncommitted
from coranto.messages.uuids import clock_from_ns
from coranto.offsets import JournalOffset, id_of
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.client.client import JournalClient
    from coranto.client.heads import JournalHead

SKEW_SECONDS: Final = 300
"""The longest time that a producer's clock is assumed to be ahead of a store's."""
LARGEST_SKEW_SECONDS: Final = 3600
"""The largest assumed difference between the clocks of producers and stores, if a reader must not miss messages."""
_ADVICE: Final = (
    "The offset belongs to the content of the earlier journal, which is gone: give offsets of the current one. If it "
    "has the same content up to there, such as recovered content, give the offset as a number, without journal_id."
)
_CONCURRENCY: Final = 16
_NAMES_PER_CALL: Final = 4096


@dataclass(frozen=True, slots=True)
class Moment:
    """Positions in journals at some moment. Journals that it does not name had no content then.

    `ends` are the end offsets, exclusive. `begins` are the first offsets, 0 for journals that it omits. Offsets with
    ids (`JournalOffset`) are valid only for journals with these ids.
    """

    ends: Mapping[str, int]
    begins: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def offsets(cls, ends: Mapping[str, int], begins: Mapping[str, int] | None = None) -> Self:
        """Return the moment at these offsets. Raises InvalidInput for invalid ranges."""
        begins = begins or {}
        for journal in (*ends, *begins):
            if not 0 <= begins.get(journal, 0) <= ends.get(journal, -1):
                raise InvalidInput(
                    f"{journal} cannot be read from {begins.get(journal, 0)} to {ends.get(journal)}", field="offsets"
                )
        if not ends:
            raise InvalidInput("name at least one journal", field="offsets")
        return cls(dict(ends), dict(begins))

    def span(self, journal: str) -> tuple[int, int]:
        """Return the offsets [begin, end) of a journal."""
        return self.begins.get(journal, 0), self.ends.get(journal, 0)


def first_clock_after(at: float) -> int:
    """Return the first clock of a UUID that is later than a time in Unix seconds."""
    return clock_from_ns(round(at * 1e6) * 1000) + 16  # A float has only microseconds. A tick has 16 clocks.


def require_past(at: float, field: str) -> None:
    """Raise InvalidInput about `field` if a time in Unix seconds is in the future."""
    if at > time.time():
        raise InvalidInput("is in the future, and messages of that time may still arrive", field=field)


async def moment_at(client: JournalClient, journals: Sequence[JournalInfo], at: float) -> Moment:
    """Return the positions of listed journals at a time in Unix seconds.

    Raises InvalidInput for a future time and for journals without JSON lines, and ContentGone if retention has removed
    the content of that time, so that its end is unknown.
    """
    require_past(at, "time")
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def one(info: JournalInfo) -> int:
        async with limit:
            return await _end_at(client, info, at)

    ends = await asyncio.gather(*map(one, journals))
    return Moment.offsets({info.name: end for info, end in zip(journals, ends, strict=True)})


async def _end_at(client: JournalClient, info: JournalInfo, at: float) -> int:
    kind = labels.value_of(info.spec.labels, labels.CONTENT_TYPE)
    if kind not in ("", JsonLines.content_type):
        raise InvalidInput(
            f"{info.name} has messages of {kind} without readable times: give offsets instead", field="time"
        )
    if info.spec.suspend.level == pb.JournalSpec.Suspend.FULL:
        return info.spec.suspend.offset  # It has no content.
    head = await client.head(info.name)
    fragments = [each.fragment for each in await client.fragments(info.name)]
    first = min((each.begin for each in fragments), default=head)
    before = [each.end for each in fragments if 0 < each.mod_time < at - SKEW_SECONDS]
    begin = max(before, default=first)
    later = first_clock_after(at)
    if begin < head:
        chunks = client.read(info.name, begin, end_offset=head, fail_on_jump=True)
        async with contextlib.aclosing(chunks):
            async for message in AsyncReadUncommitted(JsonLines(tolerant=True), info.name, chunks, begin):
                if message.clock >= later:
                    if message.begin == first > 0:
                        raise ContentGone({info.name: (0, first)}, {info.name: first}, "and the end at that time")
                    return JournalOffset(message.begin, id_of(head))
    return head


async def require_content(client: JournalClient, moment: Moment) -> None:
    """Check that journals still have the content of a moment, except for gaps within it.

    Makes one call to the brokers for up to 4,096 journals.

    Raises ContentGone, which lists all missing content, JournalRecreated for offsets of an earlier journal,
    JournalNotFound, and InvalidInput for a journal that ends earlier.
    """
    gone: dict[str, tuple[int, int]] = {}
    for names in _batches(sorted(journal for journal, end in moment.ends.items() if end)):
        found = (await client.heads(f"name in ({', '.join(names)})")).by_name
        for name in names:
            begin, end = moment.span(name)
            head = found.get(name)
            if head is None:
                raise JournalNotFound(f"content of {name} up to {end}")
            if not head.known or not head.listed:
                raise Unavailable(f"the begin of the content of {name} is unknown: {head.problem or 'try again'}")
            _require_id(head, begin)
            _require_id(head, end)
            if head.head < end:
                raise InvalidInput(
                    f"{name} ends at {head.head}, before {end}: it was recreated, or these are not its offsets",
                    field="offsets",
                )
            first = head.head if head.status == pb.SUSPENDED else head.begin
            if begin < min(first, end):
                gone[name] = begin, min(first, end)
    if gone:
        raise ContentGone(gone, {journal: end for journal, (_, end) in gone.items()})


async def require_same(client: JournalClient, *vectors: Mapping[str, int]) -> None:
    """Check that offsets with ids belong to the current journals. Makes no call without ids.

    Raises JournalRecreated. Missing and unknown journals raise no error here, but when they are read.
    """
    for names in _batches(sorted({journal for vector in vectors for journal, at in vector.items() if id_of(at)})):
        found = (await client.heads(f"name in ({', '.join(names)})")).by_name
        for name in names:
            if name in found:
                for vector in vectors:
                    _require_id(found[name], vector.get(name, 0))


def _require_id(head: JournalHead, offset: int) -> None:
    known = id_of(offset)
    if not is_same(known, offset, head.journal_id):
        raise JournalRecreated(head.journal, offset, known, head.journal_id, head.head, _ADVICE)


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _NAMES_PER_CALL):
        yield names[start : start + _NAMES_PER_CALL]
