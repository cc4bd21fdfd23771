"""Column-wise publishing of a task's rows as pending messages. Each attempt is a separate producer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from coranto.client import SyncJournalClient
from coranto.errors import CorantoError, InvalidInput
from coranto.messages.arrow_values import joined
from coranto.messages.columnar_mapping import mapped
from coranto.messages.framing import JsonLines
from coranto.messages.mapping import MappingName
from coranto.messages.uuids import Flags, ProducerId, format_uuid
from coranto_consumers.spark.session.fetching import executor_folder
from coranto_consumers.spark.sink.message_rows import RowDigest, Rows
from coranto_consumers.spark.sink.producer_ids import AcquiredId, IdPool, Use

_APPEND_BYTES: Final = 4 << 20
_PENDING_BYTES: Final = 32 << 20
_HELD_BYTES: Final = 16 << 20
"""The maximum bytes that a task buffers for all journals together, so that appends have a good size."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The pending messages of one attempt."""

    producer: ProducerId
    messages: int = 0
    first_clocks: Mapping[str, int] = field(default_factory=dict)
    """The clock of the first message, by journal."""
    ack_clocks: Mapping[str, int] = field(default_factory=dict)
    """A clock after the clocks of all messages."""
    counts: Mapping[str, int] = field(default_factory=dict)

    def intents(self, framing: JsonLines) -> dict[str, bytes]:
        """Return the acknowledgements that commit the messages."""
        return {journal: self._ack(framing, clock) for journal, clock in self.ack_clocks.items()}

    def rollbacks(self, framing: JsonLines) -> dict[str, bytes]:
        """Return acknowledgements that make readers drop the messages, including messages that arrive later."""
        return {
            journal: self._ack(framing, self.first_clocks[journal] - 1) + self._ack(framing, clock)
            for journal, clock in self.ack_clocks.items()
        }

    def _ack(self, framing: JsonLines, clock: int) -> bytes:
        return framing.acknowledgement(format_uuid(self.producer, clock, Flags.ACK_TXN))


class PendingPublisher:
    """Publishes the messages of one attempt."""

    def __init__(
        self,
        client: SyncJournalClient,
        journals: Sequence[str],
        mapping: MappingName,
        framing: JsonLines,
        acquired: AcquiredId,
        digest: RowDigest | None = None,
    ) -> None:
        self._digest = digest
        self._client = client
        self._journals = tuple(journals)
        self._mapping = mapping
        self._framing = framing
        self._producer, self._clock = acquired.use.producer, acquired.clock
        self._service = client.append_service(batch_bytes=_APPEND_BYTES, pending_bytes=_PENDING_BYTES)
        self._held: dict[str, list[bytes]] = {}
        self._sizes: dict[str, int] = {}
        self._first_clocks: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._random = np.random.default_rng()

    def roll_back(self, error: BaseException) -> None:
        """Append rollbacks after an error, so that readers drop the messages."""
        self._service.cancel()
        try:
            for journal, content in self._pending().rollbacks(self._framing).items():
                self._client.append(journal, content, retry_unknown=True, retry_timeout=1.0)
        except CorantoError as failure:
            error.add_note(f"{failure}: readers keep the attempt's messages as pending until retention removes them")

    def add(self, rows: Rows, keys: Any = None, names: Any = None) -> None:
        """Publish rows to the journals in `names`, by default mapped by `keys`. Both are Arrow arrays."""
        if not len(rows):
            return
        clock = self._clock.ticks(len(rows))
        lines = rows.lines(self._framing, self._producer, clock, Flags.CONTINUE_TXN)
        if self._digest is not None:
            self._digest.add(lines, self._framing, self._producer)
        numbers = self._numbers(len(rows), keys, names)
        counts = np.bincount(numbers, minlength=len(self._journals))
        present = np.flatnonzero(counts).tolist()
        if len(present) > 1:
            lines = lines.take(pa.array(np.argsort(numbers, kind="stable")))
        begin = 0
        for number in present:
            messages = int(counts[number])
            self._append(self._journals[number], joined(lines.slice(begin, messages)).tobytes(), clock, messages)
            begin += messages

    def finish(self) -> Pending:
        """Wait until all messages are in their journals, and return them."""
        for journal in list(self._held):
            self._send(journal)
        self._service.flush()
        return self._pending()

    def _pending(self) -> Pending:
        acks = {journal: self._clock.tick() for journal in self._first_clocks}
        return Pending(self._producer, sum(self._counts.values()), dict(self._first_clocks), acks, dict(self._counts))

    def _append(self, journal: str, content: bytes, clock: int, messages: int) -> None:
        self._first_clocks.setdefault(journal, clock)
        self._counts[journal] = self._counts.get(journal, 0) + messages
        self._held.setdefault(journal, []).append(content)
        self._sizes[journal] = self._sizes.get(journal, 0) + len(content)
        if self._sizes[journal] >= _APPEND_BYTES:
            self._send(journal)
        elif sum(self._sizes.values()) > _HELD_BYTES:
            self._send(max(self._sizes, key=lambda name: self._sizes[name]))

    def _send(self, journal: str) -> None:
        self._sizes.pop(journal, None)
        for content in self._held.pop(journal, ()):
            self._service.append(journal, content)  # The service batches contents.

    def _numbers(self, rows: int, keys: Any, names: Any) -> NDArray[np.int64]:
        if names is not None:
            return self._named(names)
        if self._mapping == "random":
            return self._random.integers(0, len(self._journals), rows)
        if len(self._journals) == 1:
            return np.zeros(rows, dtype=np.int64)
        if keys is None or keys.null_count:
            raise InvalidInput(
                f"a message for {self._journals[0]} or others has no key to map it by; fill the key column, or write "
                "to one journal",
                field="journal output",
            )
        return mapped(keys.cast(pa.binary()), self._journals, self._mapping)

    def _named(self, names: Any) -> NDArray[np.int64]:
        numbers = {journal: number for number, journal in enumerate(self._journals)}
        found = [numbers.get(name, -1) for name in names.to_pylist()]
        if -1 in found:
            name = names[found.index(-1)].as_py()
            raise InvalidInput(
                f"a row is for the journal {name}, which is not among those that are written: select it, too",
                field="journal output",
            )
        return np.array(found, dtype=np.int64)


def publish(
    client: SyncJournalClient,
    journals: Sequence[str],
    mapping: MappingName,
    framing: JsonLines,
    pool: IdPool,
    parts: Iterable[tuple[Rows, Any, Any]],
    digest: RowDigest | None = None,
) -> tuple[Pending, Use]:
    """Publish rows with their keys and journals under an id from a pool. Return the pending messages and the use."""
    acquired = pool.acquire(executor_folder())
    publisher = PendingPublisher(client, journals, mapping, framing, acquired, digest)
    try:
        for each in parts:
            publisher.add(*each)
        pending = publisher.finish()
    except BaseException as error:
        publisher.roll_back(error)
        raise
    return pending, acquired.use._replace(clock=acquired.clock.tick())
