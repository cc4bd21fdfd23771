"""Publishers that append through a client.

Appends are retried even if their outcome is unknown, because readers deduplicate messages by UUID. So messages of types
without UUIDs are delivered at least once.
"""

from __future__ import annotations

import os
import time
from typing import TypeVar

from coranto.client.client import JournalClient
from coranto.client.sync import SyncJournalClient
from coranto.client.values import AppendResult
from coranto.messages.framing import Framing
from coranto.messages.publisher import DEFAULT_BATCH_BYTES, DEFAULT_PENDING_BYTES, Publisher, SyncPublisher
from coranto.messages.uuids import ProducerClock, ProducerId, new_producer_id
from coranto.tracing import tracer

M = TypeVar("M")


def publisher(
    client: JournalClient,
    framing: Framing[M],
    *,
    producer: ProducerId | None = None,
    max_batch_bytes: int = DEFAULT_BATCH_BYTES,
    max_pending_bytes: int = DEFAULT_PENDING_BYTES,
) -> Publisher[M]:
    """Return an asyncio publisher, with a new producer id unless one is given."""

    tracing = tracer()

    async def append(journal: str, content: bytes) -> AppendResult:
        if tracing is None:
            return await client.append(journal, content, retry_unknown=True)
        with tracing.span("publish", journal, "PRODUCER", bytes=len(content)) as span:
            return await span.around(client.append(journal, content, retry_unknown=True))

    return Publisher(
        append,
        producer=new_producer_id(os.urandom) if producer is None else producer,
        clock=ProducerClock(time.time_ns),
        framing=framing,
        max_batch_bytes=max_batch_bytes,
        max_pending_bytes=max_pending_bytes,
    )


def sync_publisher(
    client: SyncJournalClient,
    framing: Framing[M],
    *,
    producer: ProducerId | None = None,
    max_batch_bytes: int = DEFAULT_BATCH_BYTES,
) -> SyncPublisher[M]:
    """Return a blocking publisher, with a new producer id unless one is given."""

    tracing = tracer()

    def append(journal: str, content: bytes) -> AppendResult:
        if tracing is None:
            return client.append(journal, content, retry_unknown=True)
        with tracing.span("publish", journal, "PRODUCER", bytes=len(content)) as span, span.current():
            return client.append(journal, content, retry_unknown=True)

    return SyncPublisher(
        append,
        producer=new_producer_id(os.urandom) if producer is None else producer,
        clock=ProducerClock(time.time_ns),
        framing=framing,
        max_batch_bytes=max_batch_bytes,
    )
