"""The backlog: content that this broker must store and has not stored yet, and the journals that it holds back.

A fragment store may pass a broker's probes and yet refuse fragments, or accept them more slowly than appends arrive.
Local files then grow. So the broker refuses appends to a journal

* while attempts to store its fragments keep failing (as it does while probes of its store fail);
* while the journal's backlog exceeds the bound of one journal, until it is down to QUARTERS/4 of that bound;
* while the backlog of all journals exceeds the broker's bound, until it is down to QUARTERS/4 of that bound. This holds
  back only journals with a backlog. Others continue, so that one store's refusals do not stop all journals.

Appends resume automatically once the store accepts fragments again. The growing fragment at the end of a journal counts
only once it is complete. Fragments that a replica leaves to the primary do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import structlog

from coranto.effects import Clock
from coranto_broker.ownership import Signal, Waiters

QUARTERS = 3
"""Appends resume once the backlog is down to this many quarters of the exceeded bound, to avoid flapping."""
FAILING_ATTEMPTS = 5
"""The consecutive failed attempts to store a fragment after which its journal is held back."""
TIMEOUT_SECONDS = 10.0
"""The time after the begin of a hold during which appends wait for its end. Later appends are refused immediately."""
_log = structlog.get_logger(__name__)


class _Failure(NamedTuple):
    url: str
    attempts: int
    error: str


class Backlog:
    """The unstored bytes of each journal, and the resulting holds. Used from one event loop."""

    def __init__(
        self,
        clock: Clock,
        *,
        journal_bytes: int = 0,
        broker_bytes: int = 0,
        on_store: Callable[[str], None] = lambda url: None,
    ) -> None:
        """`journal_bytes` and `broker_bytes` are bounds, 0 for none.

        `on_store` is called with the URL of a store that starts or stops refusing some journal's fragments.
        """
        self._clock = clock
        self._journal_bytes = journal_bytes
        self._broker_bytes = broker_bytes
        self._on_store = on_store
        self._bytes: dict[str, int] = {}
        self._total = 0
        self._full = False
        self._over: set[str] = set()
        self._failing: dict[str, _Failure] = {}
        self._since: dict[str, float] = {}  # Monotonic start time of each hold, by journal.
        self._waiters = Waiters()

    @property
    def total(self) -> int:
        """The unstored bytes of all journals."""
        return self._total

    @property
    def held(self) -> int:
        """The number of journals that are held back."""
        return len(self._since)

    def refused_by(self, url: str) -> int:
        """Return the number of journals whose fragments this store keeps refusing."""
        return sum(failure.url == url for failure in self._failing.values())

    def holds(self, journal: str) -> bool:
        """Return True if the journal is held back, regardless of its current store."""
        return journal in self._since

    # -- Events --------------------------------------------------------------------------------------------------------

    def add(self, journal: str, size: int) -> None:
        """Add `size` bytes of the journal to the backlog."""
        self._bytes[journal] = self._bytes.get(journal, 0) + size
        self._total += size
        self._update_hold(journal)

    def remove(self, journal: str, size: int) -> None:
        """Remove `size` bytes of the journal, which are stored or no longer have to be."""
        self._total -= size
        left = self._bytes[journal] - size
        if left:
            self._bytes[journal] = left
        else:
            del self._bytes[journal]
            self._succeeded(journal)
        self._update_hold(journal)

    def failed(self, journal: str, url: str, attempts: int, error: str) -> None:
        """Record that storing a fragment of the journal failed for the `attempts`th time in a row."""
        if attempts >= FAILING_ATTEMPTS:
            before = self._failing.get(journal)
            self._failing[journal] = _Failure(url, attempts, error)
            self._update_hold(journal)
            for each in {url, before.url if before is not None else url}:
                self._on_store(each)

    def stored(self, journal: str) -> None:
        """Record that a store has accepted a fragment of the journal."""
        self._succeeded(journal)
        self._update_hold(journal)

    # -- Holds ---------------------------------------------------------------------------------------------------------

    def problem(self, journal: str, url: str) -> str:
        """Return the reason for refusing appends to the journal, whose fragments go to that store, or ""."""
        if journal not in self._since:
            return ""
        waiting = self._bytes.get(journal, 0)
        failure = self._failing.get(journal)
        if failure is not None and failure.url == url:
            return (
                f"{failure.attempts} attempts to store a fragment of {journal} have failed, the last one because "
                f"{failure.error}. {waiting} bytes of it wait in local files. Appends continue once {url} "
                "takes its fragments"
            )
        if journal in self._over:
            return (
                f"{waiting} bytes of {journal} wait to be stored in {url}, and max_unpersisted_journal_bytes is "
                f"{self._journal_bytes}. Appends resume automatically at {_low(self._journal_bytes)}"
            )
        if self._full and waiting:
            return (
                f"{self._total} bytes of this broker's journals wait to be stored, {waiting} of them of {journal} in "
                f"{url}, and max_unpersisted_bytes is {self._broker_bytes}. Appends resume automatically at "
                f"{_low(self._broker_bytes)}, or once nothing of {journal} waits"
            )
        return ""

    async def wait_for_capacity(self, journal: str, url: str, until: Signal | None = None) -> str:
        """Wait briefly for a hold to end, and return `problem`. Raises Invalidated if `until` fires first."""
        while problem := self.problem(journal, url):
            left = self._since[journal] + TIMEOUT_SECONDS - self._clock.monotonic()
            if left <= 0:
                return problem
            await self._waiters.wait(until, left)
        return ""

    def _succeeded(self, journal: str) -> None:
        failure = self._failing.pop(journal, None)
        if failure is not None:
            self._on_store(failure.url)

    def _update_hold(self, journal: str) -> None:
        """Hold the journal back or release it; if the broker's bound was crossed, all journals with a backlog too."""
        waiting = self._bytes.get(journal, 0)
        if _exceeds(waiting, self._journal_bytes, before=journal in self._over):
            self._over.add(journal)
        else:
            self._over.discard(journal)
        full = _exceeds(self._total, self._broker_bytes, before=self._full)
        changed, self._full = full != self._full, full
        for each in (journal, *self._bytes) if changed else (journal,):
            self._hold(each)

    def _hold(self, journal: str) -> None:
        held = journal in self._failing or journal in self._over or (self._full and journal in self._bytes)
        if held and journal not in self._since:
            self._since[journal] = self._clock.monotonic()
            waiting = self._bytes.get(journal, 0)
            _log.warning("backlog.journal_held_back", journal=journal, unpersisted=waiting, all=self._total)
        elif not held and journal in self._since:
            del self._since[journal]
            _log.info("backlog.journal_released", journal=journal, all=self._total)
            self._waiters.wake()


def _exceeds(size: int, bound: int, *, before: bool) -> bool:
    """Return True if `size` is too much. `before` is True if it was too much before."""
    return bound > 0 and size > (_low(bound) if before else bound)


def _low(bound: int) -> int:
    return bound * QUARTERS // 4
