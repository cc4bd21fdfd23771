"""Monitoring of the producer states of a shard's sources, while this process is the primary.

It periodically reports producers with large clock skew, and counts open transactions. For journals with old open
transactions, it also looks up the begin offset: transactions whose content is gone can be pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import structlog

from coranto.client import JournalClient
from coranto.effects import Clock
from coranto.errors import CorantoError
from coranto.messages import Pruning, Source
from coranto.messages.pruning import DEFAULT_PRUNE_DISTANCE
from coranto.messages.skew import SkewWatch
from coranto_consumers.runtime.metrics import ConsumerMetrics

CHECK_SECONDS: Final = 60.0
LIST_SECONDS: Final = 3600.0
"""The minimum seconds between two listings of a journal's fragments."""

_log = structlog.get_logger(__name__)


class ProducerWatch:
    """The watch of one shard. `journals` are its sources, and `sources` are their restored states."""

    def __init__(
        self,
        shard: str,
        client: JournalClient,
        clock: Clock,
        metrics: ConsumerMetrics,
        journals: Iterable[str],
        sources: Mapping[str, Source],
    ) -> None:
        self._shard = shard
        self._client = client
        self._clock = clock
        self._metrics = metrics
        self._watches = {journal: SkewWatch(journal, sources.get(journal, Source())) for journal in journals}
        self._committed: Mapping[str, Source] = sources
        self._first_offsets: dict[str, int] = {}
        self._listed: dict[str, float] = {}

    def pruning(self) -> Pruning:
        """Return the rules for pruning producers from the next checkpoint."""
        return Pruning(self._clock.now(), first_offsets=self._first_offsets)

    def committing(self, sources: Mapping[str, Source]) -> None:
        """Record the source states of the latest checkpoint."""
        self._committed = sources

    async def run(self) -> None:
        """Check every `CHECK_SECONDS` until cancelled."""
        while True:
            await self._clock.sleep(CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Examine the states of the last checkpoint once."""
        sources, now = self._committed, self._clock.now()
        pending = 0
        for journal, watch in self._watches.items():
            source = sources.get(journal, Source())
            for skewed in watch.check(source, now):
                direction = "ahead" if skewed.seconds > 0 else "behind"
                self._metrics.skewed_producers.labels(self._shard, direction).inc()
            seen_through = [state.seen_through for state in source.producers.values() if state.is_pending]
            pending += len(seen_through)
            if seen_through and source.read_through - min(seen_through) >= DEFAULT_PRUNE_DISTANCE:
                await self._list(journal)
        self._metrics.open_transactions.labels(self._shard).set(pending)

    async def _list(self, journal: str) -> None:
        now = self._clock.monotonic()
        if now - self._listed.get(journal, -LIST_SECONDS) < LIST_SECONDS:
            return
        self._listed[journal] = now
        try:
            fragments = await self._client.fragments(journal)
        except CorantoError as error:
            _log.warning("source.begin_unknown", shard=self._shard, journal=journal, error=str(error))
            return
        if fragments:
            self._first_offsets[journal] = min(info.fragment.begin for info in fragments)
