"""Streams: journals that share a key space, with writers, transactions and readers by routing key."""

from coranto.streams.keys import KEY_SPACE, KeyRange, key_hash
from coranto.streams.model import Segment, Stream, StreamCut, decode

__all__ = [
    "KEY_SPACE",
    "KeyRange",
    "Segment",
    "Stream",
    "StreamCut",
    "decode",
    "key_hash",
]
