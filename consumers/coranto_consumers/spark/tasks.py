"""Tasks for an output's rows: they stage rows in the store, or publish them.

Both return only the identity of their attempt, which the driver needs to make the rows count: an attempt id, or
acknowledgements. Spark gives the driver the results of the winning attempts. Rows of other attempts have no effect:
staged rows are not merged, and messages are never acknowledged.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from sqlalchemy import Table

from coranto.client import ClientConfig, SyncJournalClient
from coranto.errors import InvalidInput
from coranto.messages.json_text import JsonTexts
from coranto.messages.mapping import Mapping, MappingName, ModuloMapping, RandomMapping, RendezvousMapping
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark.task_errors import told_to_driver
from coranto_consumers.stores.staging import StageWriter

Batches = Iterator[Any]
"""Arrow record batches (pyarrow has no types)."""

_PENDING_BYTES: Final = 8 << 20
"""The bytes of messages that a task keeps until it appends some, however many journals there are."""

STAGED: Final = "attempt STRING, rows BIGINT"
PUBLISHED: Final = "journal STRING, intent BINARY, messages BIGINT"


@dataclass(frozen=True, slots=True)
class StageTask:
    """Stages the rows of a partition. Yields (attempt, rows) if there are rows."""

    store_url: str = field(repr=False)  # It may hold a password.
    stage: Table
    shard: str
    fence: int

    def __call__(self, batches: Batches) -> Batches:
        with told_to_driver():
            yield from self._stage(batches)

    def _stage(self, batches: Batches) -> Batches:
        attempt, rows = uuid.uuid4().hex, 0
        first = next(batches, None)
        if first is None:
            return
        with StageWriter(self.store_url, self.stage, self.shard, self.fence, attempt) as writer:
            for batch in _chain(first, batches):
                rows += writer.write_batch(batch)
        if rows:
            yield pa.record_batch({"attempt": [attempt], "rows": [rows]})


@dataclass(frozen=True, slots=True)
class PublishTask:
    """Publishes the rows (`key`, `value`) of a partition as pending. Yields each journal's acknowledgement.

    On return all messages are in their journals. They commit when the acknowledgements are appended.
    """

    client: ClientConfig
    journals: tuple[str, ...]
    mapping: MappingName

    def __call__(self, batches: Batches) -> Batches:
        with told_to_driver():
            yield from self._publish(batches)

    def _publish(self, batches: Batches) -> Batches:
        first = next(batches, None)
        if first is None:
            return
        counts = dict.fromkeys(self.journals, 0)
        journal_of = self._mapping()
        with SyncJournalClient.of(self.client) as client:

            def append(journal: str, content: bytes) -> None:
                # Readers discard duplicates, so an append of unknown outcome is simply repeated.
                client.append(journal, content, retry_unknown=True)

            publisher = SyncPublisher(
                append,
                producer=new_producer_id(os.urandom),
                clock=ProducerClock(time.time_ns),
                framing=JsonTexts(),
                max_pending_bytes=_PENDING_BYTES,
            )
            for batch in _chain(first, batches):
                for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
                    journal = journal_of(self._key(key))
                    publisher.add(journal, _text(value))
                    counts[journal] += 1
            intents = publisher.prepare()
        if intents:
            yield pa.record_batch(
                {
                    "journal": pa.array(intents, pa.string()),
                    "intent": pa.array(intents.values(), pa.binary()),
                    "messages": pa.array([counts[journal] for journal in intents], pa.int64()),
                }
            )

    def _mapping(self) -> Mapping:
        match self.mapping:
            case "rendezvous":
                return RendezvousMapping(self.journals)
            case "modulo":
                return ModuloMapping(self.journals)
            case "random":
                return RandomMapping(self.journals, random.Random())

    def _key(self, key: bytes | None) -> bytes:
        if key is None and self.mapping != "random":
            raise InvalidInput(
                f"a message for {self.journals[0]} has no key to map it by; fill the key column, "
                "or write to one journal",
                field="journal output",
            )
        return key or b""


def _chain(first: Any, rest: Batches) -> Batches:
    yield first
    yield from rest


def _text(value: str | None) -> str:
    if value is None:
        raise InvalidInput("a row has no value; filter such rows out", field="journal output")
    return value
