"""Messages: UUIDs, framings, publishing and read-committed sequencing.

`coranto.messages.columnar` sequences whole columns of messages; it needs numpy (the `consumers` extra), so that it is
not imported here.
"""

from coranto.messages.checkpoints import Checkpoint, ProducerState, Source, prune
from coranto.messages.framing import Envelope, Framing, IncompleteTail, JsonLines, iter_messages
from coranto.messages.mapping import ModuloMapping, RandomMapping, RendezvousMapping, modulo, rendezvous
from coranto.messages.publisher import Publisher, SyncPublisher, TransactionBuilder
from coranto.messages.sequencer import Outcome, ReplayRange, Sequencer, read_committed, read_committed_async
from coranto.messages.uuids import (
    Clock,
    Flags,
    ProducerId,
    UuidParts,
    build_uuid,
    format_uuid,
    new_producer_id,
    parse_uuid,
    parse_uuid_text,
)

__all__ = [
    "Checkpoint",
    "Clock",
    "Envelope",
    "Flags",
    "Framing",
    "IncompleteTail",
    "JsonLines",
    "ModuloMapping",
    "Outcome",
    "ProducerId",
    "ProducerState",
    "Publisher",
    "RandomMapping",
    "RendezvousMapping",
    "ReplayRange",
    "Sequencer",
    "Source",
    "SyncPublisher",
    "TransactionBuilder",
    "UuidParts",
    "build_uuid",
    "format_uuid",
    "iter_messages",
    "modulo",
    "new_producer_id",
    "parse_uuid",
    "parse_uuid_text",
    "prune",
    "read_committed",
    "read_committed_async",
    "rendezvous",
]
