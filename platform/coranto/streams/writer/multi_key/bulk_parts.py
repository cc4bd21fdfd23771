"""The parts of a bulk transaction, and moves of parts to the successors of sealed segments.

A part is the pending events that one producer has appended to one segment. An acknowledgement in that segment commits
it, with a clock just above the clock of the last event. So the events of an append of unknown outcome that arrive later
do not belong to the part: they are appended again, under another producer id.

Nothing can be appended to a sealed segment. So if a segment is sealed before the transaction is decided, its parts are
*moved*: their events are read again, and appended to the successors of the segment under a new producer id. The events
in the sealed segment are never acknowledged, so no reader delivers them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coranto.client.client import JournalClient
from coranto.effects import Entropy
from coranto.errors import AppendOutcomeUnknown, CorantoError, CorruptData, StreamChanged, StreamSealed, Unavailable
from coranto.messages.uuids import Flags, ProducerClock, ProducerId, build_uuid, new_producer_id
from coranto.streams.model.events import JsonEvents
from coranto.streams.model.stream import Stream
from coranto.streams.writer.handshake import ensure_held

_APPEND_BYTES: Final = 1 << 20
_ROLL_BACK_SECONDS: Final = 5.0
_TURNS: Final = 10
"""Maximum attempts of a move whose answers are lost."""
EVENTS: Final = JsonEvents()


@dataclass(frozen=True, slots=True)
class BulkPart:
    """The pending events of one producer in one segment."""

    journal: str
    producer: ProducerId
    begin: int
    """An offset where a message begins, at or before the first event."""
    first_clock: int
    last_clock: int
    """The clock of the last event. Messages of the producer with later clocks do not belong to the part."""
    events: int
    places: bytes | None
    """The places of their routing keys in the key space, as native unsigned 64-bit numbers; None if they are no
    longer known, so that the part cannot be moved."""

    @property
    def acknowledgement(self) -> bytes:
        """The message that commits the events."""
        return self._ack(self.last_clock + 1)

    @property
    def rollback(self) -> bytes:
        """The messages that make readers drop the events, including events that arrive later."""
        return self._ack(self.first_clock - 1) + self._ack(self.last_clock + 1)

    def _ack(self, clock: int) -> bytes:
        return EVENTS.acknowledgement(build_uuid(self.producer, clock, Flags.ACK_TXN))


def acknowledgements(parts: Sequence[BulkPart]) -> dict[str, bytes]:
    """Return the acknowledgements of parts by journal. Readers deliver the parts in this order."""
    found: dict[str, bytes] = {}
    for part in parts:
        found[part.journal] = found.get(part.journal, b"") + part.acknowledgement
    return found


def restamped(line: bytes, producer: ProducerId, clock: int) -> bytes:
    """Replace the UUID at the beginning of a line, as a pending event. Returns the new line. Raises CorruptData."""
    if not line.startswith(EVENTS.uuid_prefix):
        raise CorruptData(f"{line[:60]!r} does not begin with its UUID, as events of a stream do")
    return EVENTS.stamp(line, build_uuid(producer, clock, Flags.CONTINUE_TXN))


@dataclass(slots=True)
class _Successor:
    """The events that a part has moved to one segment."""

    first_clock: int
    last_clock: int = 0
    begin: int = -1
    places: array[int] = field(default_factory=lambda: array("Q"))
    held: list[bytes] = field(default_factory=list)
    size: int = 0


class PartMover:
    """Moves parts of sealed segments to the active segments of their keys."""

    def __init__(
        self, client: JournalClient, ticks: ProducerClock, retry_timeout: float, entropy: Entropy = os.urandom
    ) -> None:
        self._client = client
        self._ticks = ticks
        self._retry_timeout = retry_timeout
        self._entropy = entropy

    async def move(self, part: BulkPart, stream: Stream) -> list[BulkPart]:
        """Append the events of a part to the active segments of their keys. Returns the new parts.

        Raises StreamChanged if the part cannot be moved, StreamSealed, CorruptData if events are missing, and the
        errors of the client: NotAllowed if a successor is sealed already. After an error nothing is moved.
        """
        source = next((each for each in stream.segments.values() if each.journal == part.journal), None)
        if source is None or source.sealed_at is None or part.places is None:
            why = "the keys of so many events are not kept" if part.places is None else "it cannot be read to its end"
            raise StreamChanged(
                f"segment {part.journal} was sealed before {part.events} events in it were committed, and {why}: "
                "nothing is written. Write them again"
            )
        for turn in range(_TURNS):
            producer = new_producer_id(self._entropy)
            found: dict[str, _Successor] = {}
            try:
                await self._copy(part, source.sealed_at, stream, producer, found)
            except BaseException as error:
                await roll_back(self._client, self._parts(producer, found))
                if not isinstance(error, AppendOutcomeUnknown):
                    raise
                if turn == _TURNS - 1:
                    raise Unavailable(f"the events of {part.journal} cannot be moved: {error}") from error
            else:
                break
        return self._parts(producer, found)

    def _parts(self, producer: ProducerId, found: Mapping[str, _Successor]) -> list[BulkPart]:
        return [
            BulkPart(
                journal,
                producer,
                to.begin,
                to.first_clock,
                to.last_clock,
                len(to.places),
                to.places.tobytes(),
            )
            for journal, to in found.items()
        ]

    async def _copy(
        self, part: BulkPart, end: int, stream: Stream, producer: ProducerId, found: dict[str, _Successor]
    ) -> None:
        decoder, places = EVENTS.decoder(part.journal, part.begin), array("Q", part.places or b"")
        seen, last = 0, 0
        async for chunk in self._client.read(part.journal, part.begin, end_offset=end, fail_on_jump=True):
            for each in decoder.feed(chunk.content, chunk.offset):
                if each.producer != part.producer or not last < each.clock <= part.last_clock:
                    continue
                last, place = each.clock, places[seen]
                seen += 1
                segment = stream.segment_at(place)
                if segment is None:
                    raise StreamSealed(f"stream {stream.name} is sealed: nothing is written. Write to another stream")
                clock = self._ticks.tick()
                to = found.setdefault(segment.journal, _Successor(clock))
                to.last_clock = clock
                to.places.append(place)
                to.held.append(restamped(each.content + b"\n", producer, clock))
                to.size += len(to.held[-1])
                if to.size >= _APPEND_BYTES:
                    await self._send(segment.journal, to)
            if seen == part.events:
                break
        if seen != part.events:
            raise CorruptData(f"journal {part.journal} has {seen} of {part.events} events that were appended to it")
        for journal, to in found.items():
            await self._send(journal, to)

    async def _send(self, journal: str, to: _Successor) -> None:
        if not to.held:
            return
        if to.begin < 0:
            await ensure_held(self._client, journal, EVENTS, self._ticks, self._retry_timeout)
        content, to.held, to.size = b"".join(to.held), [], 0
        done = await self._client.append(journal, content, retry_timeout=self._retry_timeout)
        to.begin = done.begin if to.begin < 0 else to.begin


async def roll_back(client: JournalClient, parts: Sequence[BulkPart]) -> None:
    """Make readers drop undecided events. Failures are ignored, because no reader waits for this."""
    contents: dict[str, bytes] = {}
    for part in parts:
        contents[part.journal] = contents.get(part.journal, b"") + part.rollback

    async def drop(journal: str, content: bytes) -> None:
        with contextlib.suppress(CorantoError):
            await client.append(journal, content, retry_unknown=True, retry_timeout=_ROLL_BACK_SECONDS)

    await asyncio.gather(*(drop(journal, content) for journal, content in contents.items()))
