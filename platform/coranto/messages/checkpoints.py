"""Checkpoints: how far a consumer has come, as a value that commits together with the consumer's own state.

A `Checkpoint` says for each source journal through which offset it has been read and what is known of each producer,
and holds the acknowledgements of what the consumer published. It is stored as a `consumer.Checkpoint` message, so a
checkpoint written by any other Gazette consumer can be taken up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from coranto.errors import CorruptData, InvalidInput
from coranto.messages.uuids import ProducerId
from coranto.wire import consumer_pb2

DEFAULT_PRUNE_HORIZON_S: Final = 24 * 3600.0
"""Producers silent for this long, by the journal's own clocks, are forgotten."""


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a reader of a journal knows about one producer.

    `last_ack` is the clock through which the producer's messages are decided. `begin` is the offset from which to read
    its pending messages again (those above `last_ack`, awaiting an acknowledgement), -1 when there are none.

    `newest` is a clock of a message read, not below `last_ack`, by which the producer's age is judged: 0 when that is
    not known, since it is not stored. It does not take part in comparison.
    """

    last_ack: int
    begin: int = -1
    newest: int = field(default=0, compare=False)

    @property
    def is_pending(self) -> bool:
        return self.begin != -1


@dataclass(frozen=True, slots=True)
class Source:
    """One journal: everything below the offset `read_through` has been read."""

    read_through: int = 0
    producers: Mapping[ProducerId, ProducerState] = field(default_factory=dict)

    @property
    def replay_from(self) -> int:
        """The offset from which to read so as to meet all pending messages again; at most `read_through`."""
        begins = [state.begin for state in self.producers.values() if state.is_pending]
        return min([*begins, self.read_through])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a consumer restores from. `ack_intents` maps journals to content to append once the checkpoint committed."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    ack_intents: Mapping[str, bytes] = field(default_factory=dict)

    def to_wire(self) -> consumer_pb2.Checkpoint:
        """The checkpoint as a message."""
        wire = consumer_pb2.Checkpoint()
        for journal, source in self.sources.items():
            entry = wire.sources[journal]
            entry.read_through = source.read_through
            for producer, state in sorted(source.producers.items()):
                added = entry.producers.add(id=producer)
                added.state.last_ack = state.last_ack
                added.state.begin = state.begin
        for journal, intent in self.ack_intents.items():
            wire.ack_intents[journal] = intent
        return wire

    @classmethod
    def from_wire(cls, wire: consumer_pb2.Checkpoint) -> Checkpoint:
        """The checkpoint of a message. Raises CorruptData for values that no checkpoint holds."""
        sources = {}
        # Maps of protobuf come in another order in each process.
        for journal, entry in sorted(wire.sources.items()):
            producers: dict[ProducerId, ProducerState] = {}
            for item in entry.producers:
                if len(item.id) != 6:
                    raise CorruptData(
                        f"checkpoint of {journal}: producer id {item.id.hex()!r} has {len(item.id)} bytes, not 6"
                    )
                if item.state.begin < -1:
                    raise CorruptData(f"checkpoint of {journal}: producer {item.id.hex()} begins at {item.state.begin}")
                producers[ProducerId(item.id)] = ProducerState(item.state.last_ack, item.state.begin)
            if entry.read_through < 0:
                raise CorruptData(f"checkpoint of {journal}: read through offset {entry.read_through}")
            sources[journal] = Source(entry.read_through, producers)
        return cls(sources, dict(sorted(wire.ack_intents.items())))

    def to_bytes(self) -> bytes:
        """The serialised message; equal checkpoints have equal bytes within one version of protobuf."""
        return self.to_wire().SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, content: bytes) -> Checkpoint:
        """The checkpoint of a serialised message; that of empty content is empty. Raises CorruptData."""
        try:
            return cls.from_wire(consumer_pb2.Checkpoint.FromString(content))
        except DecodeError as error:
            raise CorruptData(f"{len(content)} bytes are not a serialised checkpoint: {error}") from error


def prune(
    producers: Mapping[ProducerId, ProducerState], horizon_s: float = DEFAULT_PRUNE_HORIZON_S
) -> dict[ProducerId, ProducerState]:
    """The states without those of producers that fell silent.

    A producer is dropped when its newest known message is more than `horizon_s` seconds older than the newest
    acknowledgement of the journal. One with pending messages of unknown age is kept, because forgetting it could lose
    them: its last acknowledgement may be old while its transaction is not. With a horizon of 0 all are kept.
    """
    if horizon_s < 0:
        raise InvalidInput(f"a prune horizon of {horizon_s} seconds is negative")
    if horizon_s == 0 or not producers:
        return dict(producers)
    latest = max(state.last_ack for state in producers.values())
    oldest = latest - (int(horizon_s * 10_000_000) << 4)
    return {
        producer: state
        for producer, state in producers.items()
        if max(state.newest, state.last_ack) >= oldest or (state.is_pending and not state.newest)
    }
