"""The health of fragment stores, by probes (`coranto.client.store_probe`).

`StoreHealth` watches the stores of journals with appends. A store is probed at the first request for its health, then
every half hour, and sooner after a failure. Probing ends after FORGET_SECONDS without a request.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from coranto.client.store_probe import probe
from coranto.effects import Clock
from coranto.errors import CorantoError
from coranto.fragments.stores import StoreRegistry
from coranto_broker.ownership import Signal, Waiters

HEALTHY_SECONDS = 30 * 60.0
BACKOFF_SECONDS = (0.0, 0.1, 1.0, 1.0, 10.0, 10.0, 100.0)
FORGET_SECONDS = 2 * 60 * 60.0
TOLERATED_FAILURES = 5
"""The number of failed probes that an append waits for before it fails."""
_log = structlog.get_logger(__name__)


class StoreHealth:
    """The health of fragment stores, by URL."""

    def __init__(
        self,
        stores: StoreRegistry,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_probe: Callable[[str, bool], None] = lambda url, healthy: None,
        on_forget: Callable[[str], None] = lambda url: None,
    ) -> None:
        """`spawn` runs the probing of a store in the background.

        `on_probe` is called after each probe with the URL and whether the store is healthy. `on_forget` is called with
        the URL of a store that is no longer probed.
        """
        self._stores = stores
        self._clock = clock
        self._spawn = spawn
        self._on_probe = on_probe
        self._on_forget = on_forget
        self._watched: dict[str, _Watched] = {}

    def is_healthy(self, url: str) -> bool:
        """Return True if the last probe succeeded, so that `problem` would return "" immediately."""
        watched = self._watched.get(url)
        if watched is None:
            return False
        watched.unasked = 0.0
        return watched.problem == ""

    def last_problem(self, url: str) -> str:
        """Return the problem that the last probe found; "" if it found none, or if there was no probe."""
        watched = self._watched.get(url)
        return (watched.problem or "") if watched is not None else ""

    async def problem(self, url: str, until: Signal | None = None) -> str:
        """Return the problem of a store, or "" if it is healthy.

        Waits for the first probe and, while probes fail, for a few more. Raises Invalidated if `until` fires first.
        """
        watched = self._watched.get(url)
        if watched is None:
            watched = self._watched[url] = _Watched()
            self._spawn(self._watch(url, watched))
        watched.unasked = 0.0
        failures = 0
        while watched.problem != "":
            if watched.problem is not None:
                failures += 1
                if failures > TOLERATED_FAILURES or watched.failures > TOLERATED_FAILURES:
                    return watched.problem
            await watched.next_probe(until)
        return ""

    async def _watch(self, url: str, watched: _Watched) -> None:
        while watched.unasked < FORGET_SECONDS:
            try:
                await probe(self._stores.get(url))
                watched.done("")
            except CorantoError as error:
                _log.warning("store.unhealthy", store=url, error=str(error), failures=watched.failures + 1)
                watched.done(error.public_text)
            self._on_probe(url, not watched.failures)
            failures = watched.failures
            pause = BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS)) - 1] if failures else HEALTHY_SECONDS
            await self._clock.sleep(pause)
            watched.unasked = 0.0 if watched.is_awaited else watched.unasked + pause
        del self._watched[url]
        self._on_forget(url)


class _Watched:
    """One store: the problem that the last probe found (None: not probed yet), and the consecutive failures."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.failures = 0
        self.unasked = 0.0
        """Minimum number of seconds since the last request."""
        self._waiters = Waiters()

    @property
    def is_awaited(self) -> bool:
        """True while there are waiters for the next probe."""
        return bool(self._waiters)

    def done(self, problem: str) -> None:
        self.problem = problem
        self.failures = self.failures + 1 if problem else 0
        self._waiters.wake()

    async def next_probe(self, until: Signal | None) -> None:
        await self._waiters.wait(until)
