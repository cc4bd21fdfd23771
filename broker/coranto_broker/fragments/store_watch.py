"""Monitoring of fragment stores: their health, and the journals that are held back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from coranto.effects import Clock
from coranto.fragments.stores import StoreRegistry
from coranto_broker.fragments.backlog import Backlog
from coranto_broker.fragments.store_probe import StoreHealth
from coranto_broker.metrics import Metrics
from coranto_broker.ownership import Signal
from coranto_broker.settings import BrokerSettings


class StoreWatch:
    """The health of fragment stores, and the backlog of unstored content."""

    def __init__(
        self,
        settings: BrokerSettings,
        clock: Clock,
        stores: StoreRegistry,
        metrics: Metrics,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._metrics = metrics
        self.backlog = Backlog(
            clock,
            journal_bytes=settings.max_unpersisted_journal_bytes,
            broker_bytes=settings.max_unpersisted_bytes,
            on_store=self._seen,
        )
        self._health = StoreHealth(stores, clock, spawn, self._probed, self._forgotten)
        self._healthy: dict[str, bool] = {}

    def held_back(self, journal: str, url: str) -> str:
        """Return the reason why appends to a journal with this first store are held back; empty if they are not."""
        return self._health.last_problem(url) or self.backlog.problem(journal, url)

    def is_healthy(self, journal: str, url: str) -> bool:
        """Return True if the store is known to work and its backlog does not hold the journal back."""
        return self._health.is_healthy(url) and not self.backlog.problem(journal, url)

    async def problem(self, journal: str, url: str, until: Signal | None) -> str:
        """Return the reason why a fragment store does not accept a journal's content, or "" if it does.

        Waits a limited time for a problem to pass. Raises Invalidated if `until` fires first.
        """
        return await self._health.problem(url, until) or await self.backlog.wait_for_capacity(journal, url, until)

    def _probed(self, url: str, healthy: bool) -> None:
        self._healthy[url] = healthy
        self._seen(url)

    def _forgotten(self, url: str) -> None:
        del self._healthy[url]
        self._metrics.store_forgotten(url)

    def _seen(self, url: str) -> None:
        """Report a store's health. A store that accepts probes but refuses fragments counts as unhealthy."""
        if url in self._healthy:
            self._metrics.store_probed(url, self._healthy[url] and not self.backlog.refused_by(url))
