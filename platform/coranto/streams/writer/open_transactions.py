"""The open transactions of one writer: at most one per key, and none for longer than its timeout."""

from __future__ import annotations

import asyncio
import math
from typing import Generic, TypeVar

from coranto.effects import Clock
from coranto.errors import TransactionInProgress
from coranto.streams.writer.counters import WriterCounters
from coranto.streams.writer.transactions import Transaction, TransactionState

E = TypeVar("E")


class OpenTransactions(Generic[E]):
    """The open transactions of one writer; see the module. For one event loop."""

    def __init__(self, stream: str, clock: Clock, counters: WriterCounters) -> None:
        self._stream = stream
        self._clock = clock
        self._counters = counters
        self._open: dict[str, Transaction[E]] = {}
        self._reaper: asyncio.Task[None] | None = None
        self._reaps_at = math.inf

    def add(self, transaction: Transaction[E]) -> None:
        """Add a transaction and start its timeout. Raises TransactionInProgress."""
        key = transaction.key
        if (other := self._open.get(key)) is not None:
            other.expire_if_due()
        if key in self._open:
            raise TransactionInProgress(
                f"a transaction on {key!r} is open already; commit or abort it, or use another writer"
            )
        transaction.deadline = self._clock.monotonic() + transaction.timeout
        self._open[key] = transaction
        self._counters.metrics.open.inc()
        if transaction.deadline < self._reaps_at:
            if self._reaper is not None:
                self._reaper.cancel()
            self._reaps_at = transaction.deadline
            self._reaper = asyncio.create_task(self._reap(), name=f"timeouts of {self._stream}")

    def remove(self, transaction: Transaction[E]) -> None:
        """Remove a transaction that is no longer open."""
        if self._open.get(transaction.key) is transaction:
            del self._open[transaction.key]
            self._counters.metrics.open.dec()

    def ended(self, transaction: Transaction[E]) -> None:
        """Remove and count a transaction that was aborted or timed out."""
        self.remove(transaction)
        timed_out = transaction.raw_state is TransactionState.TIMED_OUT
        self._counters.ended("timed_out" if timed_out else "aborted", transaction.key_hash, transaction.sequence)

    async def close(self) -> None:
        """Abort all open transactions."""
        for transaction in list(self._open.values()):
            transaction.abort()
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)

    async def _reap(self) -> None:
        """Time out transactions that are no longer used, so that their events are dropped."""
        while self._reaps_at < math.inf:
            if (wait := self._reaps_at - self._clock.monotonic()) > 0:
                await self._clock.sleep(wait)
            for transaction in list(self._open.values()):
                transaction.expire_if_due()
            self._reaps_at = min((transaction.deadline for transaction in self._open.values()), default=math.inf)
        self._reaper = None
