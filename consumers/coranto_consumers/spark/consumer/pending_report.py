"""Reports on long-open transactions: when one commits, all content since its first message is read again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import structlog

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import Source
from coranto.messages.uuids import ProducerId
from coranto_consumers.spark.committed.sequencing import LongTransaction, Sources

_LONG_SECONDS: Final = 600.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OldestTransaction:
    """The oldest open transaction in a journal, according to a consumer's checkpoint."""

    journal: str
    producer: ProducerId
    begin: int
    bytes_read_again: int
    """The processed content since `begin`, in bytes. It is read again once the transaction is committed."""
    checkpoints: int
    """The number of this run's checkpoints of the journal with this open transaction."""
    seconds: float
    """The seconds since this run first saw the transaction."""


class OldestTransactions:
    """Tracks the oldest open transaction of each journal. `max_bytes` is the limit of one consumer transaction."""

    def __init__(self, max_bytes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._monotonic = monotonic
        self._states: dict[str, Source] = {}
        self._since: dict[str, float] = {}
        self._open: dict[str, OldestTransaction] = {}
        self._next: dict[str, tuple[float, float]] = {}  # The thresholds of the next warning: bytes and seconds.

    def observe(self, sources: Sources) -> tuple[OldestTransaction, ...]:
        """Record a checkpoint's states, and return the oldest open transaction of each journal."""
        now = self._monotonic()
        for journal, source in sources.items():
            if self._states.get(journal) is not source:
                self._states[journal] = source
                self._check(journal, source, now)
        for journal in self._states.keys() - sources.keys():
            del self._states[journal]
            self._forget(journal)
        return tuple(replace(each, seconds=now - self._since[journal]) for journal, each in self._open.items())

    def _check(self, journal: str, source: Source, now: float) -> None:
        pending = [(state.begin, producer) for producer, state in source.producers.items() if state.is_pending]
        if not pending:
            self._forget(journal)
            return
        begin, producer = min(pending)
        before = self._open.get(journal)
        # The begin of a transaction moves when a part of it is delivered.
        if before is None or (before.begin, before.producer) != (begin, producer):
            self._since[journal], self._next[journal] = now, (self._max_bytes, _LONG_SECONDS)
            before = None
        checkpoints = 1 if before is None else before.checkpoints + 1
        size, seconds = source.read_through - begin, now - self._since[journal]
        found = self._open[journal] = OldestTransaction(journal, producer, begin, size, checkpoints, seconds)
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


def log_long_transactions(found: Iterable[LongTransaction], sources: Sources, max_bytes: int) -> None:
    """Log committed transactions whose messages are read again, and delivered in parts of `max_bytes`."""
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


def too_long_for(long: LongTransaction, sources: Sources, max_bytes: int) -> InvalidInput:
    """Return the error for messages that do not fit a consumer transaction and must not be split (`atomic`)."""
    begin = sources[long.journal].producers[long.producer].begin
    size = long.acknowledged_at - begin
    return InvalidInput(
        f"producer {long.producer.hex()} has committed a set of messages in the {size} bytes [{begin}, "
        f"{long.acknowledged_at}) of journal {long.journal}, and a transaction reads {max_bytes}. None of it is "
        f"delivered. Set max_transaction_bytes to {size} or more, with room for it on the disks of the executors, or "
        "leave out atomic to have it delivered in parts",
        field="max_transaction_bytes",
    )
