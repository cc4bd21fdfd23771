"""Lag of a consumer: the content of its journals after its checkpoint. Only a sample of the content is read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from coranto import labels
from coranto.client import JournalClient
from coranto.client.heads import JournalHead
from coranto.errors import CorantoError
from coranto.journal_ids import is_same
from coranto.messages.framing import JsonLines
from coranto.messages.reading import AsyncReadUncommitted
from coranto.messages.uuids import Flags, clock_to_ns
from coranto.offsets import id_of

_SAMPLE_BYTES: Final = 256 << 10
"""The maximum bytes of unread content of a journal that are read to count messages."""
_SAMPLES: Final = 32
"""The maximum number of journals whose content is read: those with the most unread bytes."""


_JOURNALS: Final = "journals "
"""Prefix of the sources of a consumer that reads journals by their names (`outputs/identity.py`)."""


def selector_of(sources: str) -> str:
    """Return the label selector of the sources in a consumer's identity. An empty text stays empty."""
    if not sources.startswith(_JOURNALS):
        return sources
    names = sources.removeprefix(_JOURNALS).split(", ")
    return f"name in ({', '.join(names)})"


@dataclass(frozen=True, slots=True)
class JournalLag:
    """The lag of a consumer in one journal. Offsets and sizes are in bytes, times in seconds; None is unknown."""

    journal: str
    position: int | None
    """The offset through which the consumer has committed. None if it has not begun to read the journal."""
    head: int | None
    behind: int | None
    """The bytes between `position` and `head` that the journal still has."""
    messages: int | None = None
    """The messages in these bytes, without acknowledgements."""
    is_estimate: bool = False
    """True if `messages` is estimated from the mean size of the first messages."""
    seconds: float | None = None
    """The age of the first of these messages."""
    problem: str = ""
    """The reason why the lag is unknown, or why the consumer cannot continue."""

    @property
    def written_per_second(self) -> float | None:
        """The write rate of the unread content, in bytes per second; None if unknown."""
        return self.behind / self.seconds if self.behind and self.seconds else None


async def lag_of(
    client: JournalClient,
    offsets: Mapping[str, int],
    sources: str = "",
    *,
    wall: Callable[[], float] = time.time,
) -> list[JournalLag]:
    """Return the lag of a checkpoint's offsets in each journal, sorted by name.

    Journals that match the label selector `sources` and have no offset count as unread. Raises InvalidInput for an
    invalid selector, and errors of the client.
    """
    heads: dict[str, JournalHead] = {}
    if offsets:
        heads.update(
            (await client.heads(labels.label_selector(include=[(labels.NAME, each) for each in offsets]))).by_name
        )
    if sources:
        heads.update((await client.heads(sources)).by_name)
    found = {journal: lag_of_head(journal, offsets.get(journal), heads.get(journal)) for journal in {*offsets, *heads}}
    most = sorted((each for each in found.values() if each.behind), key=lambda each: -(each.behind or 0))[:_SAMPLES]
    now = wall()
    for each in await asyncio.gather(*(_with_messages(client, each, now) for each in most)):
        found[each.journal] = each
    return [found[journal] for journal in sorted(found)]


def lag_of_head(journal: str, position: int | None, head: JournalHead | None) -> JournalLag:
    """Return the lag of a position in bytes only. A journal without a head does not exist."""
    if head is None:
        return JournalLag(journal, position, None, None, problem="there is no such journal")
    if not head.known:
        return JournalLag(journal, position, None, None, problem=f"its head is not known: {head.problem}")
    end = head.head
    if position is not None and not is_same(id_of(position), position, head.journal_id):
        return JournalLag(journal, position, end, None, problem="it was deleted and created again, or its head fell")
    if position is not None and position > end:
        return JournalLag(journal, position, end, None, problem="it ends before the position")
    first = min(head.begin if head.begin or head.listed else 0, end)
    begin = max(position or 0, first)
    gone = f"content [{position}, {begin}) is gone" if position is not None and position < begin else ""
    return JournalLag(journal, position, end, end - begin, 0 if begin == end else None, problem=gone)


async def _with_messages(client: JournalClient, lag: JournalLag, now: float) -> JournalLag:
    """Return a lag with its number of messages, from a sample. None if the content cannot be read."""
    assert lag.head is not None
    assert lag.behind is not None
    begin = lag.head - lag.behind
    end = min(lag.head, begin + _SAMPLE_BYTES)
    count, first, reached = 0, 0, begin
    try:
        chunks = client.read(lag.journal, begin, end_offset=end)
        async with contextlib.aclosing(chunks):
            reader = AsyncReadUncommitted(
                JsonLines(tolerant=True), lag.journal, chunks, begin, on_corrupt=lambda error: None
            )
            async for message in reader:
                count += message.flags != Flags.ACK_TXN or message.clock == 0
                first = first or message.clock
                reached = message.end
    except CorantoError as error:
        return JournalLag(lag.journal, lag.position, lag.head, lag.behind, problem=lag.problem or str(error))
    seconds = max(0.0, now - clock_to_ns(first) / 1e9) if first else None
    whole = end == lag.head
    messages = count if whole else round(count * lag.behind / (reached - begin)) if reached > begin else None
    return JournalLag(
        lag.journal, lag.position, lag.head, lag.behind, messages, not whole and bool(messages), seconds, lag.problem
    )
