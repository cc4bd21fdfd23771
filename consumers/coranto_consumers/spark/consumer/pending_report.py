"""Transactions of producers that stay open: what a consumer tells of them.

Messages of an open transaction are read, and read again when the transaction is committed. All that its journal has
from its first message on lies between. A producer that forgets to commit, or publishes for hours, delays its messages
for as long, and makes the consumer read more and more again. So users are told once that is much, and again at each
doubling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from coranto.messages.checkpoints import Source
from coranto.messages.uuids import ProducerId
from coranto_consumers.spark.committed.long_transactions import LongTransaction

_LONG_SECONDS: Final = 600.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LastingTransaction:
    """The oldest of the transactions that producers have open in a journal, as a consumer's checkpoint knows it."""

    journal: str
    producer: ProducerId
    begin: int
    """The offset of its first message."""
    bytes_read_again: int
    """The content from there on that is processed, in bytes. It is read again when the transaction is committed."""
    checkpoints: int
    """The number of this run's checkpoints of the journal that have it."""
    seconds: float
    """The time for which this run has known it."""


class LastingTransactions:
    """The oldest open transaction of each journal, over a run. `max_bytes` is what one transaction of it reads."""

    def __init__(self, max_bytes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._monotonic = monotonic
        self._states: dict[str, Source] = {}
        self._since: dict[str, float] = {}
        self._open: dict[str, LastingTransaction] = {}
        self._next: dict[str, tuple[float, float]] = {}  # The bytes and seconds at which to tell of it again.

    def observe(self, sources: Mapping[str, Source]) -> tuple[LastingTransaction, ...]:
        """Take in the states that a checkpoint has, tell of transactions that are open for long, and return all."""
        now = self._monotonic()
        for journal, source in sources.items():
            if self._states.get(journal) is not source:
                self._states[journal] = source
                self._look(journal, source, now)
        for journal in self._states.keys() - sources.keys():
            del self._states[journal]
            self._forget(journal)
        return tuple(replace(each, seconds=now - self._since[journal]) for journal, each in self._open.items())

    def _look(self, journal: str, source: Source, now: float) -> None:
        pending = [(state.begin, producer) for producer, state in source.producers.items() if state.is_pending]
        if not pending:
            self._forget(journal)
            return
        begin, producer = min(pending)
        before = self._open.get(journal)
        # One whose messages are delivered in parts begins elsewhere each time.
        if before is None or (before.begin, before.producer) != (begin, producer):
            self._since[journal], self._next[journal] = now, (self._max_bytes, _LONG_SECONDS)
            before = None
        checkpoints = 1 if before is None else before.checkpoints + 1
        size, seconds = source.read_through - begin, now - self._since[journal]
        found = self._open[journal] = LastingTransaction(journal, producer, begin, size, checkpoints, seconds)
        bytes_due, seconds_due = self._next[journal]
        if checkpoints > 1 and (size > bytes_due or seconds > seconds_due):
            self._next[journal] = max(bytes_due, 2.0 * size), max(seconds_due, 2.0 * seconds)
            _log.warning(
                "consumer.transaction_stays_open",
                journal=journal,
                producer=found.producer.hex(),
                begin=begin,
                bytes_read_again=size,
                checkpoints=checkpoints,
                seconds=round(seconds),
            )

    def _forget(self, journal: str) -> None:
        for known in (self._open, self._since, self._next):
            known.pop(journal, None)


def tell_of_long(found: Iterable[LongTransaction], sources: Mapping[str, Source], max_bytes: int) -> None:
    """Log that transactions were committed whose messages are delivered in parts of `max_bytes`, read again."""
    for each in found:
        begin = sources[each.journal].producers[each.producer].begin
        size = each.acknowledged_at - begin
        _log.info(
            "consumer.long_transaction",
            journal=each.journal,
            producer=each.producer.hex(),
            begin=begin,
            acknowledged_at=each.acknowledged_at,
            bytes_read_again=size,
            parts=-(-size // max_bytes),
        )
