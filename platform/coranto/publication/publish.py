"""`publish_once`: publishes a finite set of messages exactly once, even if several programs try and retry.

    undecided ──all appended, recorded in the ledger──> decided ──acknowledgements appended──> visible

A process that dies while the publication is undecided leaves an open transaction, which readers ignore. A process that
dies later leaves a decision, and any later publication with the same ledger completes it.

Publications that share a ledger need not share journals or rights. A publication that cannot complete an
acknowledgement of another one logs a warning, leaves it in the ledger, and continues with its own work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from coranto.client import SyncJournalClient
from coranto.errors import CorantoError, InvalidInput, JournalNotFound, PermissionDenied
from coranto.messages import (
    Flags,
    ProducerClock,
    RendezvousMapping,
    TransactionBuilder,
    format_uuid,
    new_producer_id,
)
from coranto.messages.framing import Framing
from coranto.publication.batch_ledger import BatchLedger
from coranto.publication.ledger import Ledger, checked_writer_id
from coranto.publication.records import Decision
from coranto.security.tokens import shows
from coranto.telemetry import ProgressReport

M = TypeVar("M")

BATCH_BYTES = 256 << 10
"""The size of appends, in bytes."""
OTHERS_RETRY_TIMEOUT = 5.0
"""The retry timeout, in seconds, for an acknowledgement of another writer."""
_CONCURRENCY = 8

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Publication:
    """The outcome of `publish_once`: the number of messages that are published under this writer id, and the time.

    `time` is the Unix time in seconds of the decision. If `is_new` is False, an earlier attempt has published, and this
    call has added nothing.
    """

    writer_id: str
    messages: int
    time: float
    is_new: bool


def publish_once(
    client: SyncJournalClient,
    journals: Sequence[str],
    messages: Iterable[M],
    *,
    writer_id: str,
    key: Callable[[M], bytes],
    framing: Framing[M],
    ledger: str,
    accept_loss: bool = False,
    report: ProgressReport | None = None,
) -> Publication:
    """Publish messages to journals, unless a publication of this `writer_id` is decided in the ledger.

    All messages become visible together, to readers of committed messages, when this returns at the latest. Messages of
    one key go to one journal, in the order given. `messages` is read once, and not at all if the publication is
    decided. The first complete attempt is the publication; a later attempt with other messages changes nothing. Several
    processes may try concurrently.

    Messages are not held in memory, and readers hold back the messages of an open transaction. So a publication may be
    large, but is visible only at its end.

    Raises InvalidInput, JournalNotFound when there are no journals, LedgerDamaged when the ledger may have lost
    records, and the errors of appends. After any error, call it again with the same writer id. The framing must have
    UUIDs: without them, readers would see the messages of all attempts.
    """
    checked_writer_id(writer_id)
    if not framing.acknowledgement(format_uuid(new_producer_id(os.urandom), 0, Flags.ACK_TXN)):
        raise InvalidInput("messages without UUIDs cannot be published once; give the framing a pointer to them")
    if not journals:
        raise JournalNotFound("no journal to publish to; create one (`coranto journals apply`)")
    if ledger in journals:
        raise InvalidInput(f"{ledger} cannot be both the ledger and a journal to publish to", field="ledger")
    kept = Ledger.open(client, ledger, like=sorted(journals)[0], accept_loss=accept_loss)
    finish_decisions(client, kept, own=writer_id)
    if (known := kept.find(writer_id)) is not None:
        return Publication(writer_id, known.messages, known.time, is_new=False)
    attempt = _Attempt(client, journals, key, framing)
    count = attempt.append(messages, report)
    mine = Decision(writer_id, attempt.producer, count, time.time(), attempt.intents())
    counts = kept.decide(mine)
    if counts.producer != mine.producer:
        attempt.abandon()
    finish_decision(client, kept, counts)
    return Publication(writer_id, counts.messages, counts.time, is_new=counts.producer == mine.producer)


def finish_decisions(client: SyncJournalClient, ledger: Ledger, own: str = "") -> None:
    """Append the possibly missing acknowledgements of decisions. Raises errors only for the decision of writer `own`.

    Failures for other writers are logged, and their decisions stay in the ledger for the next call.
    """
    pending = {decision.writer_id: decision for decision in ledger.unacknowledged()}
    if (mine := pending.pop(own, None)) is not None:
        finish_decision(client, ledger, mine)
    refused: dict[str, CorantoError] = {}
    for decision in pending.values():
        try:
            _finish_other(client, ledger, decision, refused)
        except CorantoError as error:
            _log.warning(
                "publication.not_finished", ledger=ledger.journal, writer_id=decision.writer_id, reason=str(error)
            )


def finish_decision(client: SyncJournalClient, ledger: Ledger, decision: Decision) -> None:
    """Append the acknowledgements of the caller's own decision. A second append is harmless: readers ignore it."""
    if not ledger.is_acknowledged(decision.writer_id):
        append_intents(client, decision)
        ledger.acknowledge(decision.writer_id)


def _finish_other(
    client: SyncJournalClient, ledger: Ledger, decision: Decision, refused: dict[str, CorantoError]
) -> None:
    """Finish the decision of another writer. Journals in `refused` are not tried again. Raises the first error."""
    for journal in sorted(decision.intents.keys() & refused.keys()):
        raise refused[journal]
    if decision.batch is not None:
        writer, batch = decision.batch
        batches = BatchLedger(client, ledger, writer)
        if batches.take_over(batch) is not None:
            _append(client, decision, refused)
            batches.acknowledge(batch)
        return
    _append(client, decision, refused)
    ledger.acknowledge(decision.writer_id)


def _append(client: SyncJournalClient, decision: Decision, refused: dict[str, CorantoError]) -> None:
    """Append the acknowledgements of another writer. Adds the errors of journals to `refused`, and raises the first."""
    errors, _ = _append_all(client, decision, OTHERS_RETRY_TIMEOUT)
    refused.update(errors)
    for error in errors.values():
        raise error


def finish_batch(client: SyncJournalClient, ledger: BatchLedger, batch: int) -> None:
    """Append the acknowledgements of a batch that another process has decided, if they may be missing."""
    if (decision := ledger.take_over(batch)) is not None:
        append_intents(client, decision)
        ledger.acknowledge(batch)


def append_intents(client: SyncJournalClient, decision: Decision) -> bool:
    """Append a decision's acknowledgements, to several journals concurrently.

    Tries all of them, then raises the first error. Returns True if some may be appended again, at any later time.
    """
    errors, may_repeat = _append_all(client, decision, None)
    for error in errors.values():
        raise error
    return may_repeat


def _append_all(
    client: SyncJournalClient, decision: Decision, retry_timeout: float | None
) -> tuple[dict[str, CorantoError], bool]:
    """Append acknowledgements, each with `retry_timeout`. Returns errors, and True if some may be appended again."""

    def append(journal: str) -> CorantoError | bool:
        try:
            intent = decision.intents[journal]
            return client.append(journal, intent, retry_unknown=True, retry_timeout=retry_timeout).may_repeat
        except JournalNotFound:
            if not shows(client.config.auth, journal):
                return PermissionDenied(
                    f"journal {journal} is missing or hidden: if it exists, the token does not cover it. Complete the "
                    f"publication of {decision.writer_id} with a token that covers it"
                )
            # Its messages are gone with it. Publications to the other journals must not wait for it forever.
            _log.warning("publication.journal_gone", writer_id=decision.writer_id, journal=journal)
            return False
        except CorantoError as error:
            return error

    if not decision.intents:
        return {}, False
    journals = sorted(decision.intents)
    with ThreadPoolExecutor(min(_CONCURRENCY, len(journals))) as threads:
        outcomes = dict(zip(journals, threads.map(append, journals), strict=True))
    errors = {journal: outcome for journal, outcome in outcomes.items() if isinstance(outcome, CorantoError)}
    return errors, any(outcome is True for outcome in outcomes.values())


class _Attempt(Generic[M]):
    """One attempt: an open transaction with its own producer."""

    def __init__(
        self, client: SyncJournalClient, journals: Sequence[str], key: Callable[[M], bytes], framing: Framing[M]
    ) -> None:
        producer = new_producer_id(os.urandom)
        self.producer = producer.hex()
        self._client = client
        self._key = key
        self._journal_of = RendezvousMapping(sorted(journals))
        self._builder: TransactionBuilder[M] = TransactionBuilder(producer, ProducerClock(time.time_ns), framing)

    def append(self, messages: Iterable[M], report: ProgressReport | None) -> int:
        """Append all messages, and return their number. After an error the attempt is abandoned."""
        count = 0
        try:
            with self._client.append_service() as service:
                for message in messages:
                    journal = self._journal_of(self._key(message))
                    self._builder.add(journal, message)
                    count += 1
                    if report is not None:
                        report.advance()
                    if self._builder.pending_bytes(journal) >= BATCH_BYTES:
                        service.append(journal, self._builder.take(journal, BATCH_BYTES))
                for journal, batch in self._builder.take_batches(BATCH_BYTES):
                    service.append(journal, batch)
        except BaseException:
            self.abandon()
            raise
        return count

    def intents(self) -> dict[str, bytes]:
        """Return the acknowledgements of the appended messages."""
        return self._builder.ack_intents()

    def abandon(self) -> None:
        """Make readers drop the appended messages. If that fails, they stay pending until retention removes them."""
        try:
            for journal, intent in self._builder.rollback_intents().items():
                self._client.append(journal, intent, retry_unknown=True)
        except CorantoError as error:
            _log.warning("publication.not_rolled_back", producer=self.producer, reason=str(error))
