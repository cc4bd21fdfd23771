"""Streams: journals that share a key space, with writers, transactions and readers by routing key."""

from coranto.streams.delivery import Event, StreamTransaction
from coranto.streams.events import BytesEvents, EventFormat, JsonEvents
from coranto.streams.frontier import earliest
from coranto.streams.group_reader import GroupReader
from coranto.streams.groups import ReaderGroup
from coranto.streams.keys import KEY_SPACE, KeyRange, key_hash
from coranto.streams.lifecycle import Streams, default_template
from coranto.streams.metrics import WriterMetrics
from coranto.streams.model import Segment, Stream, StreamCut, decode
from coranto.streams.multi import MultiKeyPosition, MultiKeyResult, MultiKeyTransaction, MultiKeyWriter
from coranto.streams.positions import SegmentPosition, StreamPosition
from coranto.streams.reader import StreamReader
from coranto.streams.registers import Fence
from coranto.streams.scaling import Merge, ScalingPolicy, Split
from coranto.streams.state import StateSynchronizer
from coranto.streams.sync_lifecycle import SyncStreams
from coranto.streams.sync_reader import SyncGroupReader, SyncReaderGroup, SyncStateSynchronizer, SyncStreamReader
from coranto.streams.sync_writer import (
    SyncMultiKeyTransaction,
    SyncMultiKeyWriter,
    SyncStreamWriter,
    SyncTransaction,
)
from coranto.streams.transactions import Transaction, TransactionState
from coranto.streams.units import CommitResult, EventPosition
from coranto.streams.watermarks import TimeWindow
from coranto.streams.writer import MAX_TRANSACTION_BYTES, StreamWriter

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
