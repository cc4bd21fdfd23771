"""Acknowledgements of a committed checkpoint: each must be in its journal, and commit its messages exactly once.

A consumer appends its ACK intents after the commit of their checkpoint, and again at each start. So a journal may
contain duplicates of an acknowledgement: the first one commits, and readers ignore the others.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coranto.client import FragmentInfo, JournalClient
from coranto.client.moments import LARGEST_SKEW_SECONDS
from coranto.errors import CorruptMessage
from coranto.messages import Envelope, Flags, Framing, ProducerId
from coranto.messages.reading import AsyncReadUncommitted, ReadUncommitted
from coranto.messages.sequencer import QueueOutcome, Sequencer
from coranto.messages.uuids import clock_to_ns, is_same_writer

_COMMITS: Final = (QueueOutcome.ACK_COMMIT_RING, QueueOutcome.ACK_COMMIT_REPLAY)


class Fate(enum.Enum):
    """The fate of an acknowledgement in its journal."""

    COMMITTED = "it is there, and committed its messages"
    MISSING = "it is not in the journal, so readers do not see the messages that it commits"
    EMPTY = "it is there, but the messages that it commits are not before it"
    UNPROVEN = "it is there, but content that would show its messages is gone"
    SUPERSEDED = "the journal has a later acknowledgement of the same writer"
    LOST = "an earlier message dropped the messages that it commits"


@dataclass(frozen=True, slots=True)
class Intent:
    """An acknowledgement in a checkpoint."""

    journal: str
    producer: ProducerId
    clock: int


@dataclass(slots=True)
class _Seen:
    commits: int = 0
    empties: int = 0
    resets: int = 0
    later: bool = False


def parse_intents(framing: Framing[Any], journal: str, content: bytes) -> list[Intent]:
    """Return the acknowledgements of a checkpoint for one journal. Raises CorruptMessage."""
    found = []
    for envelope in ReadUncommitted(framing, journal, [content]):
        if envelope.clock == 0 or envelope.flags != Flags.ACK_TXN:
            raise CorruptMessage(journal, envelope.begin, "a message of the ACK intent is not an acknowledgement")
        found.append(Intent(journal, envelope.producer, envelope.clock))
    return found


def framing_of_intent(framings: Sequence[Framing[Any]], journal: str, content: bytes) -> Framing[Any]:
    """Return the first framing that can parse `content` as acknowledgements. If none can, raise the first error.

    A journal that an application publishes to may have another framing than its sources.
    """
    failure: CorruptMessage | None = None
    for framing in framings:
        try:
            parse_intents(framing, journal, content)
        except CorruptMessage as error:
            failure = failure or error
        else:
            return framing
    raise failure or CorruptMessage(journal, 0, "its framing is not known")


async def find_fates(
    client: JournalClient,
    framing: Framing[Any],
    journal: str,
    intents: Sequence[Intent],
    *,
    has_content: bool = True,
    whole: bool = False,
) -> dict[Intent, Fate]:
    """Return the fate of each acknowledgement, from the end of the journal. Raises the client's errors.

    Without `has_content`, all fates are UNPROVEN: a fully suspended journal has no content, and no broker to ask. With
    `whole`, an acknowledgement that is not at the end is searched for in the whole journal: its writer's clock and the
    store's may differ by any time.
    """
    if not intents or not has_content:
        return dict.fromkeys(intents, Fate.UNPROVEN)
    head = await client.head(journal)
    fragments = await client.fragments(journal)
    first = min((info.fragment.begin for info in fragments), default=head)
    recent = _first_recent(fragments, head, intents)
    seen = await _scan(client, framing, journal, intents, recent, head)
    # The transaction may have begun before the fragments that can hold its acknowledgement.
    while first < recent and any((whole or each.empties) and not each.commits for each in seen.values()):
        recent = _earlier(fragments, recent, head)
        seen = await _scan(client, framing, journal, intents, recent, head)
    return {intent: _fate(seen[intent], whole=recent == 0) for intent in intents}


def _first_recent(fragments: Sequence[FragmentInfo], head: int, intents: Sequence[Intent]) -> int:
    """Return the begin offset of the first fragment that can contain the acknowledgements."""
    # An older fragment cannot, unless clocks differ by more than this.
    oldest = min(clock_to_ns(intent.clock) for intent in intents) / 1e9 - LARGEST_SKEW_SECONDS
    recent = [info.fragment.begin for info in fragments if not info.persisted or info.fragment.mod_time >= oldest]
    return min(recent, default=head)


def _earlier(fragments: Sequence[FragmentInfo], recent: int, head: int) -> int:
    """Return the next begin offset that is at least twice as far from `head` as `recent`, or else the first one."""
    begins = sorted(info.fragment.begin for info in fragments if info.fragment.begin < recent)
    return max((begin for begin in begins if begin <= 2 * recent - head), default=begins[0])


async def _scan(
    client: JournalClient, framing: Framing[Any], journal: str, intents: Sequence[Intent], begin: int, head: int
) -> dict[Intent, _Seen]:
    wanted = {(intent.producer, intent.clock): intent for intent in intents}
    producers = {intent.producer for intent in intents}
    by_writer: dict[ProducerId, list[Intent]] = {}
    """The intents of each producer's writer. A shard's transactions alternate between two producers."""
    seen = {intent: _Seen() for intent in intents}
    if begin >= head:
        return seen
    sequencer: Sequencer[Any] = Sequencer(ring_size=1)
    async with contextlib.aclosing(client.read(journal, begin, end_offset=head)) as chunks:
        reader = AsyncReadUncommitted(framing, journal, chunks, begin, on_corrupt=lambda error: None)
        async for envelope in reader:
            producer = envelope.producer
            if envelope.clock == 0:
                continue
            if producer not in by_writer:
                by_writer[producer] = [intent for intent in intents if is_same_writer(intent.producer, producer)]
            if envelope.flags == Flags.ACK_TXN:
                for intent in by_writer[producer]:
                    if envelope.clock > intent.clock:
                        seen[intent].later = True
            if producer not in producers:
                continue
            outcome = _queue(sequencer, envelope)
            if envelope.flags != Flags.ACK_TXN:
                continue
            intent_here = wanted.get((envelope.producer, envelope.clock))
            if intent_here is not None:
                each = seen[intent_here]
                each.commits += outcome in _COMMITS
                each.empties += outcome is QueueOutcome.ACK_EMPTY
                each.resets += outcome is QueueOutcome.ACK_RESET
    return seen


def _queue(sequencer: Sequencer[Any], envelope: Envelope[Any]) -> QueueOutcome:
    """Queue a message, discard the messages that it commits, and return the outcome."""
    outcome = sequencer.queue(envelope)
    if sequencer.replay_range is not None:
        sequencer.end_replay()
    while sequencer.step() is not None:
        pass
    return outcome


def _fate(seen: _Seen, *, whole: bool) -> Fate:
    if seen.resets:
        return Fate.LOST
    if seen.later:
        return Fate.SUPERSEDED
    if seen.commits:
        return Fate.COMMITTED
    if seen.empties:
        return Fate.EMPTY if whole else Fate.UNPROVEN
    return Fate.MISSING
