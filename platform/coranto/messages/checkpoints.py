"""Checkpoints: a consumer's progress, stored in the same transaction as the consumer's own state.

For each source journal a `Checkpoint` has the read offset, and the state of each producer. It also has the
acknowledgements of messages that the consumer published. It is stored as a `consumer.Checkpoint` message, so a consumer
can continue from a checkpoint that any other Gazette consumer wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from google.protobuf.message import DecodeError

from coranto.errors import CorruptData
from coranto.messages.uuids import ProducerId
from coranto.offsets import JournalOffset
from coranto.wire import consumer_pb2

_LATEST: Final = float(1 << 37)
"""The latest valid time of a reset, in Unix seconds: its year has four digits."""


@dataclass(frozen=True, slots=True)
class ProducerState:
    """A reader's state for one producer of a journal.

    The producer's messages are decided up to the clock `last_ack`. `begin` is the first offset of its pending messages
    (above `last_ack`, awaiting an acknowledgement), or -1 when there are none.

    `seen_through` is an offset: all messages read from the producer end at or before it. Pruning (`pruning.py`) uses it
    to determine how long the producer has been silent. 0 means unknown, as in checkpoints that other software wrote.
    Comparison ignores it.
    """

    last_ack: int
    begin: int = -1
    seen_through: int = field(default=0, compare=False)

    @property
    def is_pending(self) -> bool:
        return self.begin != -1


@dataclass(frozen=True, slots=True)
class Source:
    """The reading state of one journal: everything below the offset `read_through` was read.

    `journal_id` is the id of the journal of these offsets. It is empty if it is unknown, as in checkpoints that
    other software or earlier versions wrote. Comparison ignores it.
    """

    read_through: int = 0
    producers: Mapping[ProducerId, ProducerState] = field(default_factory=dict)
    journal_id: str = field(default="", compare=False)

    @property
    def offset(self) -> JournalOffset:
        """The offset through which the journal was read, with its id."""
        return JournalOffset(self.read_through, self.journal_id)

    @property
    def expected_id(self) -> str:
        """The id that the journal must have for reading to continue; empty, for any id, if nothing was read."""
        return self.journal_id if self.read_through else ""

    def after_head_fell(self, offset: int, journal_id: str) -> Source:
        """Return the state to continue with after the journal's head fell to `offset` and its id became `journal_id`.

        Messages at `offset` and after it stay processed: producers that append them again append duplicates. Pending
        messages there are lost.
        """
        producers = {
            producer: ProducerState(
                state.last_ack, state.begin if state.begin < offset else -1, min(state.seen_through, offset)
            )
            for producer, state in self.seen_producers.items()
        }
        return Source(offset, producers, journal_id)

    @property
    def seen_producers(self) -> dict[ProducerId, ProducerState]:
        """The producers, with `read_through` as the upper bound of an unknown `seen_through`."""
        return {
            producer: state if state.seen_through else replace(state, seen_through=self.read_through)
            for producer, state in self.producers.items()
        }

    @property
    def replay_from(self) -> int:
        """The offset where a reader must begin to read all pending messages again; at most `read_through`."""
        begins = [state.begin for state in self.producers.values() if state.is_pending]
        return min([*begins, self.read_through])


def identified(sources: Mapping[str, Source], ids: Mapping[str, str]) -> dict[str, Source]:
    """Return sources with the ids of their journals. A source keeps its own id if its journal's id is unknown."""
    return {
        journal: replace(source, journal_id=ids.get(journal, "") or source.journal_id)
        for journal, source in sources.items()
    }


@dataclass(frozen=True, slots=True)
class SourceReset:
    """An operator's change of a consumer's position in a journal, which repeats or omits messages.

    `before` and `after` are the offsets through which the journal counts as read, before and after the change; `before`
    is -1 for an earlier journal of that name. `fence` is the fence of the commit, and `time` is in Unix seconds.
    """

    journal: str
    before: int
    after: int
    fence: int
    time: float

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="seconds")
        if self.before < 0:
            return f"{self.journal} was reset at {when} to {self.after}, from an earlier journal with that name"
        begin, end = sorted((self.before, self.after))
        effect = "repeated" if self.after < self.before else "omitted"
        return f"{self.journal} was reset from {self.before} to {self.after} at {when}: [{begin}, {end}) is {effect}"


@dataclass(frozen=True, slots=True)
class Identity:
    """The sources and outputs of a consumer, and the place of its checkpoint. Empty parts are unknown."""

    sources: str = ""
    """The label selector of its journals."""
    outputs: frozenset[str] = frozenset()
    """Its tables and journals, such as `table delays`."""
    sometimes: frozenset[str] = frozenset()
    """The outputs that only some of its transactions write."""
    store: str = ""
    """The store's location, without a password."""
    resets: tuple[SourceReset, ...] = ()
    """The last reset of each source, in order of their names."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state that a consumer restores. `ack_intents` maps journals to content to append after its commit.

    `identity` describes the consumer that committed it; empty in checkpoints of older versions and of Gazette. `batch`
    is the content of the last batch of a streaming query, as JSON; empty if unknown.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    ack_intents: Mapping[str, bytes] = field(default_factory=dict)
    identity: Identity = Identity()
    batch: str = ""

    @property
    def offsets(self) -> dict[str, int]:
        """The offsets through which journals have been read, with the ids of the journals."""
        return {journal: source.offset for journal, source in self.sources.items()}

    def to_wire(self) -> consumer_pb2.Checkpoint:
        """Return the checkpoint as a wire message."""
        wire = consumer_pb2.Checkpoint()
        for journal, source in self.sources.items():
            entry = wire.sources[journal]
            entry.read_through = source.read_through
            entry.journal_id = source.journal_id
            for producer, state in sorted(source.producers.items()):
                added = entry.producers.add(id=producer)
                added.state.last_ack = state.last_ack
                added.state.begin = state.begin
                added.state.seen_through = state.seen_through
        for journal, intent in self.ack_intents.items():
            wire.ack_intents[journal] = intent
        if self.identity != Identity():
            wire.identity.sources = self.identity.sources
            wire.identity.outputs.extend(sorted(self.identity.outputs))
            wire.identity.sometimes.extend(sorted(self.identity.sometimes))
            wire.identity.store = self.identity.store
            for reset in self.identity.resets:
                wire.identity.resets.add(
                    journal=reset.journal,
                    before=reset.before,
                    after=reset.after,
                    fence=reset.fence,
                    time=reset.time,
                )
        wire.batch = self.batch
        return wire

    @classmethod
    def from_wire(cls, wire: consumer_pb2.Checkpoint) -> Checkpoint:
        """Return the checkpoint of a wire message. Raises CorruptData for invalid values."""
        sources = {}
        # The order of protobuf maps differs between processes.
        for journal, entry in sorted(wire.sources.items()):
            producers: dict[ProducerId, ProducerState] = {}
            for item in entry.producers:
                if len(item.id) != 6:
                    raise CorruptData(
                        f"checkpoint of {journal}: producer id {item.id.hex()!r} has {len(item.id)} bytes, not 6"
                    )
                if item.state.begin < -1:
                    raise CorruptData(f"checkpoint of {journal}: producer {item.id.hex()} begins at {item.state.begin}")
                if item.state.seen_through < 0:
                    raise CorruptData(
                        f"checkpoint of {journal}: producer {item.id.hex()} was seen through {item.state.seen_through}"
                    )
                producers[ProducerId(item.id)] = ProducerState(
                    item.state.last_ack, item.state.begin, item.state.seen_through
                )
            if entry.read_through < 0:
                raise CorruptData(f"checkpoint of {journal}: read through offset {entry.read_through}")
            sources[journal] = Source(entry.read_through, producers, entry.journal_id)
        found = wire.identity
        for each in found.resets:
            if each.before < -1 or min(each.after, each.fence) < 0 or not 0 <= each.time <= _LATEST:
                raise CorruptData(
                    f"checkpoint: a reset of {each.journal} from {each.before} to {each.after} at {each.time}"
                )
        resets = tuple(
            SourceReset(each.journal, each.before, each.after, each.fence, each.time) for each in found.resets
        )
        identity = Identity(found.sources, frozenset(found.outputs), frozenset(found.sometimes), found.store, resets)
        return cls(sources, dict(sorted(wire.ack_intents.items())), identity, wire.batch)

    def to_bytes(self) -> bytes:
        """Serialise the checkpoint. Equal checkpoints have equal bytes within one version of protobuf."""
        return self.to_wire().SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, content: bytes) -> Checkpoint:
        """Return the checkpoint of a serialised message; empty content is an empty checkpoint. Raises CorruptData."""
        try:
            return cls.from_wire(consumer_pb2.Checkpoint.FromString(content))
        except DecodeError as error:
            raise CorruptData(f"{len(content)} bytes are not a serialised checkpoint: {error}") from error
