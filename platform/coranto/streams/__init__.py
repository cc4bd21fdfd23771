"""Streams: journals that share a key space, with writers, transactions and readers by routing key."""

from coranto.streams.delivery import Event, StreamTransaction
from coranto.streams.frontier import earliest
from coranto.streams.group_reader import GroupReader
from coranto.streams.groups import ReaderGroup
from coranto.streams.keys import KEY_SPACE, KeyRange, key_hash
from coranto.streams.lifecycle import Streams, default_template
from coranto.streams.model import Segment, Stream, StreamCut, decode
from coranto.streams.positions import SegmentPosition, StreamPosition
from coranto.streams.reader import StreamReader
from coranto.streams.scaling import Merge, ScalingPolicy, Split
from coranto.streams.state import StateSynchronizer
from coranto.streams.sync_reader import SyncGroupReader, SyncReaderGroup, SyncStreamReader
from coranto.streams.watermarks import TimeWindow

__all__ = [
    "KEY_SPACE",
    "Event",
    "GroupReader",
    "KeyRange",
    "Merge",
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
    "Streams",
    "SyncGroupReader",
    "SyncReaderGroup",
    "SyncStreamReader",
    "TimeWindow",
    "decode",
    "default_template",
    "earliest",
    "key_hash",
]
