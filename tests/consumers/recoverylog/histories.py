"""Segments of histories, and live files with segments, for tests."""

from __future__ import annotations

from coranto_consumers.recoverylog import LiveFnode, LogSegment
from coranto_consumers.recoverylog.operations import Author, Fnode

LOG = "a/log"


def segment(author: int, first: int, last: int, begin: int, end: int = 0, checksum: int = 0) -> LogSegment:
    return LogSegment(Author(author), first, begin, checksum, last, end, LOG)


def live(*segments: LogSegment) -> LiveFnode:
    return LiveFnode(Fnode(segments[0].first_seq_no), segments)
