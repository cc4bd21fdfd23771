"""Publisher of the flights. Every reader sees each flight once, even after failures.

The rows of the file determine the messages: row `i` becomes the message of one producer with the clock `base + i`
steps. Transactions have a few thousand rows. The append of the acknowledgement that commits a journal's part of a
transaction also sets the journal's registers:

=====================  ============================================================================================
`flights-source`       the data with the number of journals, the producer, the base clock: `digest.producer.base`
`flights-rows`         all rows of this journal below this row are published
=====================  ============================================================================================

After a crash, the next publisher finds the position of each journal in these registers, and continues with the same
producer and clocks. Messages that were appended but not yet acknowledged are appended again with the same UUIDs, and
readers discard the duplicates. Two publishers cannot both acknowledge: only one passes the check of registers.

To test readers, about one batch in a hundred is appended twice, and another producer publishes altered flights in a
transaction that it rolls back.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from coranto.client import SyncJournalClient
from coranto.client.sync import SyncAppendService
from coranto.errors import InvalidInput, RegisterMismatch
from coranto.labels import label_selector, label_set, value_of
from coranto.messages import (
    JsonLines,
    ProducerClock,
    ProducerId,
    RendezvousMapping,
    TransactionBuilder,
    new_producer_id,
)
from coranto.messages.framing import JsonObject
from coranto.telemetry import ProgressReport
from coranto.wire import protocol_pb2 as pb
from coranto_flights.data import Flight, dataset_digest, iter_flights, partition_key

if TYPE_CHECKING:
    import pandas as pd

SOURCE: Final = "flights-source"
ROWS: Final = "flights-rows"

TRANSACTION_ROWS: Final = 4000
BATCH_BYTES: Final = 256 << 10
REPEATED_SHARE: Final = 0.01
ALTERED_FLIGHTS: Final = 500
_ROW_NS: Final = 100_000
"""The nanoseconds between the clocks of neighbouring rows. They leave room for the acknowledgements of all journals."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of one call: flights newly committed, batches appended twice on purpose, flights rolled back."""

    flights: int
    transactions: int
    repeated_batches: int
    rolled_back: int


@dataclass(frozen=True, slots=True)
class FlightsSource:
    """The dataset that is published to a journal, and the producer and base clock of its messages."""

    digest: str
    producer: ProducerId
    base_ns: int

    @classmethod
    def fresh(cls, digest: str) -> FlightsSource:
        return cls(digest, new_producer_id(os.urandom), time.time_ns())

    @classmethod
    def parse(cls, text: str) -> FlightsSource:
        """Return the source from a register's value. Raises InvalidInput."""
        try:
            digest, producer, base = text.split(".")
            return cls(digest, ProducerId(bytes.fromhex(producer)), int(base))
        except ValueError as error:
            raise InvalidInput(
                f"{text!r} is not digest.producer.base, as the publisher writes it; delete the journals, "
                "or choose another prefix",
                field=SOURCE,
            ) from error

    def __str__(self) -> str:
        return f"{self.digest}.{self.producer.hex()}.{self.base_ns}"


@dataclass(frozen=True, slots=True)
class JournalProgress:
    """The progress of a journal: its rows below `rows` are published. `source` is None before the first rows."""

    rows: int
    source: FlightsSource | None

    @classmethod
    def of(cls, registers: pb.LabelSet) -> JournalProgress:
        text = value_of(registers, SOURCE)
        return cls(int(value_of(registers, ROWS, "0")), FlightsSource.parse(text) if text else None)

    @property
    def registers(self) -> pb.LabelSet:
        return label_set({SOURCE: str(self.source), ROWS: str(self.rows)}) if self.source else pb.LabelSet()


class FlightsPublisher:
    """Publisher of a table of flights. It continues at the positions in the journals' registers."""

    def __init__(
        self,
        client: SyncJournalClient,
        journals: Sequence[str],
        *,
        transaction_rows: int = TRANSACTION_ROWS,
        repeated_share: float = REPEATED_SHARE,
        altered: int = ALTERED_FLIGHTS,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._journals = tuple(sorted(journals))
        self._journal_of = RendezvousMapping(self._journals)
        self._transaction_rows = transaction_rows
        self._repeated_share = repeated_share
        self._altered = altered
        self._rng = rng if rng is not None else random.Random(2013)
        self._repeated = self._added = self._row = 0

    def publish(self, flights: pd.DataFrame, report: ProgressReport | None = None) -> PublishReport:
        """Publish flights that are not published yet, and return once they are committed.

        Raises InvalidInput when the journals hold other data, and RegisterMismatch when another publisher is active.
        """
        # A flight's journal depends on the number of journals.
        digest = f"{dataset_digest()}x{len(self._journals)}"
        progress = {
            journal: JournalProgress.of(self._client.append(journal, b"").registers) for journal in self._journals
        }
        source = self._source(digest, progress)
        start, total = min(at.rows for at in progress.values()), len(flights)
        if start >= total:
            return PublishReport(0, 0, 0, 0)
        self._repeated = self._added = 0
        clock = ProducerClock(lambda: source.base_ns + self._row * _ROW_NS)
        builder: TransactionBuilder[JsonObject] = TransactionBuilder(source.producer, clock, JsonLines())
        to_alter = flights.head(self._altered) if start == 0 else flights.head(0)
        transactions, reached = 0, start
        if report is not None:
            report.expect(total - start)
        rows = enumerate(iter_flights(flights, start), start)
        with self._client.append_service() as service:
            altered = self._begin_altered(service, to_alter)
            for done in self._fill(builder, rows, progress):
                self._append_all(service, builder)
                self._acknowledge(builder, source, progress, done)
                transactions += 1
                if report is not None:
                    report.advance(done - reached)
                reached = done
            self._roll_back(service, altered)
        return PublishReport(self._added, transactions, self._repeated, len(to_alter))

    def _source(self, digest: str, progress: dict[str, JournalProgress]) -> FlightsSource:
        """Return the source to publish with: the one in the journals' registers, or a new one."""
        known = {at.source for at in progress.values() if at.source is not None}
        if not known:
            return FlightsSource.fresh(digest)
        source = known.pop()
        if known or source.digest != digest:
            raise InvalidInput(
                f"journals {', '.join(self._journals)} already hold flights of another file, publisher or number of "
                "journals; choose another prefix, or delete them first",
                field=SOURCE,
            )
        return source

    def _fill(
        self,
        builder: TransactionBuilder[JsonObject],
        rows: Iterator[tuple[int, Flight]],
        progress: dict[str, JournalProgress],
    ) -> Iterator[int]:
        """Fill the builder with one transaction after the other. Yields the end row of each (exclusive)."""
        while part := list(islice(rows, self._transaction_rows)):
            for row, flight in part:
                journal = self._journal_of(partition_key(flight))
                if row >= progress[journal].rows:
                    self._row = row
                    builder.add(journal, flight)
                    self._added += 1
            yield part[-1][0] + 1

    def _append_all(self, service: SyncAppendService, builder: TransactionBuilder[JsonObject]) -> None:
        for journal, batch in builder.take_batches(BATCH_BYTES):
            service.append(journal, batch)
            # The first batch is always repeated, so that even the smallest publication has a duplicate.
            if not self._repeated or self._rng.random() < self._repeated_share:
                self._repeated += 1
                service.append(journal, batch)
        service.flush()

    def _acknowledge(
        self,
        builder: TransactionBuilder[JsonObject],
        source: FlightsSource,
        progress: dict[str, JournalProgress],
        reached: int,
    ) -> None:
        builder.ack_intents()
        for journal, intent in builder.commit().items():
            before, after = progress[journal], JournalProgress(reached, source)
            untouched = label_selector(exclude={ROWS: ""})
            unmoved = pb.LabelSelector(include=before.registers, exclude=pb.LabelSet())
            try:
                self._client.append(
                    journal,
                    intent,
                    check_registers=unmoved if before.source is not None else untouched,
                    subtract_registers=before.registers if before.source is not None else None,
                    union_registers=after.registers,
                    retry_unknown=True,
                )
            except RegisterMismatch as error:
                # A retry after a lost answer may find the registers of its own append.
                if JournalProgress.of(error.registers) != after:
                    raise
            progress[journal] = after
        builder.finish()

    def _begin_altered(self, service: SyncAppendService, flights: pd.DataFrame) -> TransactionBuilder[JsonObject]:
        """Publish flights with false delays, in a transaction that stays open until it is rolled back."""
        builder: TransactionBuilder[JsonObject] = TransactionBuilder(
            new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines()
        )
        for flight in iter_flights(flights):
            builder.add(self._journal_of(partition_key(flight)), {**flight, "arr_delay": 10_000, "dep_time": 1})
        for journal, batch in builder.take_batches(BATCH_BYTES):
            service.append(journal, batch)
        service.flush()
        return builder

    @staticmethod
    def _roll_back(service: SyncAppendService, builder: TransactionBuilder[JsonObject]) -> None:
        for journal, intent in builder.rollback_intents().items():
            service.append(journal, intent)
        service.flush()
        builder.finish()
