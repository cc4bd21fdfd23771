"""Batches of messages of any framing, for tests of consumers of line batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from coranto.messages.batches import LINES
from coranto.messages.columnar import producer_number
from coranto.messages.framing import Envelope


def envelope_batch(envelopes: Iterable[Envelope[Any]]) -> pa.RecordBatch:
    """Return messages of any framing as a batch of `LINES`, with their payloads as `content`."""
    rows = list(envelopes)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([row.journal for row in rows], pa.string()),
            pa.array([row.begin for row in rows], pa.int64()),
            pa.array([row.end for row in rows], pa.int64()),
            pa.array([producer_number(row.producer) for row in rows], pa.uint64()),
            pa.array([row.clock for row in rows], pa.uint64()),
            pa.array([row.flags for row in rows], pa.uint16()),
            pa.array([row.content for row in rows], pa.binary()),
        ],
        schema=LINES,
    )
