"""The metrics and log lines of a writer's events and transactions."""

from __future__ import annotations

from typing import Final

import structlog

from coranto.effects import Clock
from coranto.errors import CorantoError, Outcome
from coranto.streams.model.keys import KEY_BITS
from coranto.streams.writer.metrics import WriterMetrics
from coranto.streams.writer.units import CommitResult, EventPosition, WriteUnit

_log = structlog.get_logger(__name__)
_INFO: Final = 20
_LEVELS: Final = {"failed": 30, "unknown": 30, "timed_out": 30}


class WriterCounters:
    """Counts the events and transactions of a writer, and logs each transaction that ends without a commit."""

    def __init__(self, metrics: WriterMetrics, stream: str, writer: str, clock: Clock) -> None:
        self.metrics = metrics
        self._stream = stream
        self._writer = writer
        self._clock = clock

    def succeeded(self, unit: WriteUnit, result: EventPosition | CommitResult) -> None:
        """Count an event or a transaction that is durable."""
        metrics = self.metrics
        if result.deduplicated:
            metrics.deduplicated.inc()
            if unit.is_transaction:
                self.ended("deduplicated", unit.key_hash, unit.sequence)
            else:
                metrics.events.labels("deduplicated").inc()
            return
        metrics.bytes.inc(unit.size)
        if unit.is_transaction:
            metrics.committed_transactions.inc()
            metrics.commit_seconds.observe(self._clock.monotonic() - unit.begun)
        else:
            metrics.committed_events.inc()

    def failed(self, unit: WriteUnit, error: CorantoError) -> None:
        """Count an event or a transaction that failed."""
        outcome = "unknown" if error.outcome is Outcome.UNKNOWN else "failed"
        if unit.is_transaction:
            self.ended(outcome, unit.key_hash, unit.sequence, error)
        else:
            self.metrics.events.labels(outcome).inc()

    def ended(self, outcome: str, key_hash: int, sequence: int | None, error: CorantoError | None = None) -> None:
        """Count and log a transaction that ended without a commit."""
        self.metrics.transactions.labels(outcome).inc()
        _log.log(
            _LEVELS.get(outcome, _INFO),
            "stream_writer.transaction_not_committed",
            stream=self._stream,
            outcome=outcome,
            writer=self._writer,
            sequence=sequence,
            key_hash=f"{key_hash:0{KEY_BITS // 4}x}",
            **({} if error is None else {"error": type(error).__name__}),
        )
