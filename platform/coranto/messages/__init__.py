"""Messages: UUIDs, framings, publishing and read-committed sequencing.

The modules for whole columns of messages (`columnar`, `columnar_sequencer`) and for Arrow batches (`arrow_payload`)
need the `consumers` extra, so they are not imported here. The modules for typed messages are imported lazily, because
pydantic is slow to import and Spark starts workers often.
"""

from typing import TYPE_CHECKING

from coranto.lazy import lazy_names
from coranto.messages.checkpoints import Checkpoint, ProducerState, Source
from coranto.messages.csv_rows import CsvRows, NamedRows, TextRows
from coranto.messages.fixed_frame import FixedFrame
from coranto.messages.framing import Envelope, Framing, IncompleteTail, JsonLines, iter_messages
from coranto.messages.mapping import ModuloMapping, RandomMapping, RendezvousMapping, modulo, rendezvous
from coranto.messages.pruning import Pruning
from coranto.messages.publisher import Publisher, SyncPublisher, TransactionBuilder
from coranto.messages.reading import (
    AsyncReadCommitted,
    AsyncReadUncommitted,
    ReadCommitted,
    ReadTransaction,
    ReadUncommitted,
)
from coranto.messages.sequencer import QueueOutcome, ReplayRange, Sequencer, read_committed, read_committed_async
from coranto.messages.uuids import (
    Flags,
    ProducerClock,
    ProducerId,
    UuidParts,
    build_uuid,
    format_uuid,
    new_producer_id,
    parse_uuid,
    parse_uuid_text,
    successor,
)

if TYPE_CHECKING:
    from coranto.messages.models import ModelRows, TypedLines
    from coranto.messages.payloads import Message, OwnPayload, ProtobufJson, ProtobufPayload

__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(("ModelRows", "TypedLines"), "coranto.messages.models"),
        **dict.fromkeys(("Message", "OwnPayload", "ProtobufJson", "ProtobufPayload"), "coranto.messages.payloads"),
    },
)

__all__ = [
    "AsyncReadCommitted",
    "AsyncReadUncommitted",
    "Checkpoint",
    "CsvRows",
    "Envelope",
    "FixedFrame",
    "Flags",
    "Framing",
    "IncompleteTail",
    "JsonLines",
    "Message",
    "ModelRows",
    "ModuloMapping",
    "NamedRows",
    "OwnPayload",
    "ProducerClock",
    "ProducerId",
    "ProducerState",
    "ProtobufJson",
    "ProtobufPayload",
    "Pruning",
    "Publisher",
    "QueueOutcome",
    "RandomMapping",
    "ReadCommitted",
    "ReadTransaction",
    "ReadUncommitted",
    "RendezvousMapping",
    "ReplayRange",
    "Sequencer",
    "Source",
    "SyncPublisher",
    "TextRows",
    "TransactionBuilder",
    "TypedLines",
    "UuidParts",
    "build_uuid",
    "format_uuid",
    "iter_messages",
    "modulo",
    "new_producer_id",
    "parse_uuid",
    "parse_uuid_text",
    "read_committed",
    "read_committed_async",
    "rendezvous",
    "successor",
]
