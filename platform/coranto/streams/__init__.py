"""Streams: journals that share a key space, with writers, transactions and readers by routing key."""

from coranto.streams.keys import KEY_SPACE, KeyRange, key_hash
from coranto.streams.lifecycle import Streams, default_template
from coranto.streams.model import Segment, Stream, StreamCut, decode
from coranto.streams.scaling import Merge, ScalingPolicy, Split

__all__ = [
    "KEY_SPACE",
    "KeyRange",
    "Merge",
    "ScalingPolicy",
    "Segment",
    "Split",
    "Stream",
    "StreamCut",
    "Streams",
    "decode",
    "default_template",
    "key_hash",
]
