"""Streams: journals that share a key space, with writers, transactions and readers by routing key."""

from coranto.streams.blocking.lifecycle import SyncStreams
from coranto.streams.blocking.reader import SyncGroupReader, SyncReaderGroup, SyncStateSynchronizer, SyncStreamReader
from coranto.streams.blocking.writer import (
    SyncMultiKeyTransaction,
    SyncMultiKeyWriter,
    SyncStreamWriter,
    SyncTransaction,
)
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Merge, ScalingPolicy, Split
from coranto.streams.groups.group_reader import GroupReader
from coranto.streams.groups.reader_groups import ReaderGroup
from coranto.streams.groups.state_synchronizer import StateSynchronizer
from coranto.streams.model.events import BytesEvents, EventFormat, JsonEvents
from coranto.streams.model.frontier import earliest
from coranto.streams.model.keys import KEY_SPACE, KeyRange, key_hash
from coranto.streams.model.positions import SegmentPosition, StreamPosition
from coranto.streams.model.registers import Fence
from coranto.streams.model.stream import Segment, Stream, StreamCut, decode
from coranto.streams.model.watermarks import TimeWindow
from coranto.streams.reader.delivery import Event, StreamTransaction
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.metrics import WriterMetrics
from coranto.streams.writer.multi_key.transaction import MultiKeyPosition, MultiKeyResult, MultiKeyTransaction
from coranto.streams.writer.multi_key.writer import MultiKeyWriter
from coranto.streams.writer.stream_writer import MAX_TRANSACTION_BYTES, StreamWriter
from coranto.streams.writer.transactions import Transaction, TransactionState
from coranto.streams.writer.units import CommitResult, EventPosition

__all__ = [
    "KEY_SPACE",
    "MAX_TRANSACTION_BYTES",
    "BytesEvents",
    "CommitResult",
    "Event",
    "EventFormat",
    "EventPosition",
    "Fence",
    "GroupReader",
    "JsonEvents",
    "KeyRange",
    "Merge",
    "MultiKeyPosition",
    "MultiKeyResult",
    "MultiKeyTransaction",
    "MultiKeyWriter",
    "ReaderGroup",
    "ScalingPolicy",
    "Segment",
    "SegmentPosition",
    "Split",
    "StateSynchronizer",
    "Stream",
    "StreamCut",
    "StreamPosition",
    "StreamReader",
    "StreamTransaction",
    "StreamWriter",
    "Streams",
    "SyncGroupReader",
    "SyncMultiKeyTransaction",
    "SyncMultiKeyWriter",
    "SyncReaderGroup",
    "SyncStateSynchronizer",
    "SyncStreamReader",
    "SyncStreamWriter",
    "SyncStreams",
    "SyncTransaction",
    "TimeWindow",
    "Transaction",
    "TransactionState",
    "WriterMetrics",
    "decode",
    "default_template",
    "earliest",
    "key_hash",
]
