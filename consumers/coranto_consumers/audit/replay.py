"""Independent replay of a consumer's source: the oracle that an audit compares a checkpoint with.

It reads the journal's messages up to the checkpoint's offset and sequences them one by one, with the reference
sequencer. Consumers use other implementations of the same rule (columnar, in parallel tasks, with restarts), so an
equal result shows that the checkpoint is correct. Memory is bounded: a ring of pending messages, and the state of each
producer.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coranto.client import Chunk, JournalClient
from coranto.errors import CorruptMessage, TornMessage
from coranto.messages import Envelope, Flags, Framing, ProducerId, Source
from coranto.messages.pruning import DEFAULT_PRUNE_DISTANCE
from coranto.messages.reading import AsyncReadUncommitted
from coranto.messages.sequencer import DEFAULT_RING_SIZE, Sequencer
from coranto_consumers.audit.expectations import Measure, Number

_KEPT_ERRORS: Final = 3


@dataclass(slots=True)
class Replayed:
    """The result of replaying a journal from `begin` up to a checkpoint's offset.

    `reached` is the end of the last whole message. `totals` has the sum of each measure over the committed messages,
    and `messages` their number.
    """

    journal: str
    begin: int
    reached: int
    source: Source
    messages: int = 0
    totals: dict[str, Number] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Spans [begin, end) without content."""
    acknowledged: set[ProducerId] = field(default_factory=set)
    """Producers with an acknowledgement after the last gap. Their state does not depend on earlier messages."""
    returned: set[ProducerId] = field(default_factory=set)
    """Producers that wrote again after the consumer may have pruned their states."""
    corrupt: list[CorruptMessage] = field(default_factory=list)
    """The errors of the first unreadable messages."""
    corrupt_count: int = 0
    torn: list[TornMessage] = field(default_factory=list)
    """The errors of the first torn messages: their appends ended within a message."""
    torn_count: int = 0
    partly_delivered: bool = False
    """True if the checkpoint was taken during the delivery of one acknowledgement's messages."""


class Replay:
    """A replay of one journal, from `start` to the offset of `expected`, the checkpoint's state of the journal."""

    def __init__(
        self,
        client: JournalClient,
        framing: Framing[Any],
        journal: str,
        start: Source,
        expected: Source,
        measures: Sequence[Measure] = (),
        *,
        messages: int = 0,
        totals: dict[str, Number] | None = None,
        ring_size: int = DEFAULT_RING_SIZE,
    ) -> None:
        """`messages` and `totals` count the messages below `start`."""
        self._client = client
        self._framing = framing
        self._journal = journal
        self._start = start
        self._expected = expected
        self._measures = measures
        self._sequencer: Sequencer[Any] = Sequencer({journal: start}, ring_size)
        self._seen_through: dict[ProducerId, int] = {}
        known = totals or {}
        self._found = Replayed(
            journal,
            start.read_through,
            start.read_through,
            start,
            messages,
            {each.name: known.get(each.name, 0) for each in measures},
        )

    async def run(self) -> Replayed:
        """Run the replay. Raises the client's errors, and OffsetJump if pending messages are gone."""
        found = self._found
        end = self._expected.read_through
        if end > found.begin:
            async with contextlib.aclosing(self._envelopes(found.begin, end)) as envelopes:
                async for envelope in envelopes:
                    self._note(envelope)
                    async for delivered in self._deliver(envelope):
                        self._count(delivered, found.totals)
                        found.messages += 1
                    found.reached = envelope.end
        found.source = self._sequencer.checkpoint()[self._journal]
        await self._finish_delivery()
        return found

    def _note(self, envelope: Envelope[Any]) -> None:
        if envelope.clock == 0:
            return
        producer = envelope.producer
        if envelope.begin - self._seen_through.get(producer, envelope.begin) >= DEFAULT_PRUNE_DISTANCE:
            self._found.returned.add(producer)
        self._seen_through[producer] = envelope.end
        if envelope.flags == Flags.ACK_TXN:
            self._found.acknowledged.add(producer)

    async def _deliver(self, envelope: Envelope[Any]) -> AsyncGenerator[Envelope[Any]]:
        """Queue a message, and yield the messages that it commits, without acknowledgements."""
        sequencer = self._sequencer
        sequencer.queue(envelope)
        wanted = sequencer.replay_range
        if wanted is not None:
            async with contextlib.aclosing(self._again(wanted.begin, wanted.end)) as replayed:
                async for each in replayed:
                    if sequencer.replay(each):
                        yield each
            sequencer.end_replay()
        while (committed := sequencer.step()) is not None:
            if committed.flags != Flags.ACK_TXN or committed.clock == 0:
                yield committed

    def _count(self, envelope: Envelope[Any], totals: dict[str, Number]) -> None:
        for measure in self._measures:
            totals[measure.name] += measure.of(envelope)

    async def _finish_delivery(self) -> None:
        """Deliver the first messages of the next acknowledgement if the checkpoint was taken during their delivery.

        Such a checkpoint has consumed only some of the messages that the acknowledgement at its offset commits.
        """
        producer = self._partly_delivered()
        if producer is None:
            return
        wanted = self._expected.producers[producer]
        trigger = await self._message_at(self._expected.read_through)
        if trigger is None or trigger.producer != producer or trigger.flags != Flags.ACK_TXN:
            return
        self._found.partly_delivered = True
        totals, messages = dict(self._found.totals), self._found.messages
        async with contextlib.aclosing(self._deliver(trigger)) as delivering:
            async for delivered in delivering:
                self._count(delivered, totals)
                messages += 1
                if delivered.clock == wanted.last_ack and delivered.end == wanted.begin:
                    self._found.totals, self._found.messages = totals, messages
                    self._found.source = self._sequencer.checkpoint()[self._journal]
                    return

    def _partly_delivered(self) -> ProducerId | None:
        """Return the only producer that is further in the checkpoint than in the replay. None if not exactly one is."""
        found = self._found.source.producers
        further = [
            producer
            for producer, state in self._expected.producers.items()
            if producer in found and found[producer].is_pending and state.last_ack > found[producer].last_ack
        ]
        return further[0] if len(further) == 1 else None

    async def _message_at(self, offset: int) -> Envelope[Any] | None:
        async with contextlib.aclosing(self._envelopes(offset, 0)) as envelopes:
            async for envelope in envelopes:
                return envelope
        return None

    async def _envelopes(self, begin: int, end: int) -> AsyncGenerator[Envelope[Any]]:
        async with contextlib.aclosing(self._chunks(begin, end)) as chunks:
            reader = AsyncReadUncommitted(self._framing, self._journal, chunks, begin, on_corrupt=self._note_corrupt)
            async for envelope in reader:
                yield envelope

    async def _chunks(self, begin: int, end: int) -> AsyncGenerator[Chunk]:
        """Yield content, and record gaps."""
        expected = begin
        async with contextlib.aclosing(self._client.read(self._journal, begin, end_offset=end)) as chunks:
            async for chunk in chunks:
                if chunk.offset > expected:
                    self._found.gaps.append((expected, chunk.offset))
                    self._found.acknowledged.clear()
                expected = chunk.end
                yield chunk

    async def _again(self, begin: int, end: int) -> AsyncGenerator[Envelope[Any]]:
        reading = self._client.read(self._journal, begin, end_offset=end, fail_on_jump=True)
        async with contextlib.aclosing(reading) as chunks:
            async for envelope in AsyncReadUncommitted(
                self._framing, self._journal, chunks, begin, on_corrupt=lambda error: None
            ):
                yield envelope

    def _note_corrupt(self, error: CorruptMessage) -> None:
        if isinstance(error, TornMessage):
            self._found.torn_count += 1
            if len(self._found.torn) < _KEPT_ERRORS:
                self._found.torn.append(error)
            return
        self._found.corrupt_count += 1
        if len(self._found.corrupt) < _KEPT_ERRORS:
            self._found.corrupt.append(error)
