"""Checkpoints: how far a consumer has come, as a value that commits together with the consumer's own state.

A `Checkpoint` says for each source journal through which offset it has been read and what is known of each producer,
and holds the acknowledgements of what the consumer published. It is stored as a `consumer.Checkpoint` message, so a
checkpoint written by any other Gazette consumer can be taken up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError

from coranto.errors import CorruptData
from coranto.messages.uuids import ProducerId
from coranto.wire import consumer_pb2


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a reader of a journal knows about one producer.

    `last_ack` is the clock through which the producer's messages are decided. `begin` is the offset from which to read
    its pending messages again (those above `last_ack`, awaiting an acknowledgement), -1 when there are none.

    No message of the producer that was read ends behind the offset `seen_through`, by which its silence is judged
    (`pruning.py`); 0 is unknown, as in checkpoints that others wrote. It does not take part in comparison.
    """

    last_ack: int
    begin: int = -1
    seen_through: int = field(default=0, compare=False)

    @property
    def is_pending(self) -> bool:
        return self.begin != -1


@dataclass(frozen=True, slots=True)
class Source:
    """One journal: everything below the offset `read_through` has been read."""

    read_through: int = 0
    producers: Mapping[ProducerId, ProducerState] = field(default_factory=dict)

    @property
    def seen_producers(self) -> dict[ProducerId, ProducerState]:
        """The producers, with `seen_through` known: where it was not, no message that was read is behind what was."""
        return {
            producer: state if state.seen_through else replace(state, seen_through=self.read_through)
            for producer, state in self.producers.items()
        }

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
                added.state.seen_through = state.seen_through
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
                if item.state.seen_through < 0:
                    raise CorruptData(
                        f"checkpoint of {journal}: producer {item.id.hex()} was seen through {item.state.seen_through}"
                    )
                producers[ProducerId(item.id)] = ProducerState(
                    item.state.last_ack, item.state.begin, item.state.seen_through
                )
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
