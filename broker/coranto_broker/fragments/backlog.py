"""The backlog: content that this broker is to store and has not stored yet, and which journals are held back by it.

A fragment store may take a broker's probes and yet refuse fragments, or take them more slowly than journals are
appended to. Local files then grow. So appends to a journal are refused

* while attempts to store its fragments go on failing, as they are while probes of its store fail;
* while more of the journal waits than one journal may have waiting, until it is QUARTERS/4 of that again;
* while more of all journals waits than the broker may have waiting, until it is QUARTERS/4 of that again. This holds
  for journals of which something waits: others go on, so that what one store refuses does not stop everybody.

All of it ends by itself once the store takes fragments again. What grows at the end of a journal does not count before
it is a complete fragment, nor does what a replica leaves to its primary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from coranto.effects import Clock
from coranto_broker.ownership import Invalidated, Signal

QUARTERS = 3
"""Of a bound that was exceeded: what has to be left for appends to go on, lest they be let go and held all the time."""
FAILING_ATTEMPTS = 5
"""So many attempts to store a fragment that fail, one after the other, are no mishap any more."""
PATIENCE_SECONDS = 10.0
"""How long an append waits to be let go. Those that come later than that after the first wait no more."""
_log = structlog.get_logger(__name__)


class _Failure(NamedTuple):
    url: str
    attempts: int
    error: str


class Backlog:
    """Bytes that wait, by journal, and what follows from them. Used from one event loop."""

    def __init__(
        self,
        clock: Clock,
        *,
        journal_bytes: int = 0,
        broker_bytes: int = 0,
        on_store: Callable[[str], None] = lambda url: None,
    ) -> None:
        """`journal_bytes` and `broker_bytes` are bounds, 0 for none.

        `on_store` hears of stores that begin or cease to refuse some journal's fragments.
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
        self._since: dict[str, float] = {}  # When journals that are held back began to be, by monotonic time.
        self._waiters: set[asyncio.Future[object]] = set()

    @property
    def total(self) -> int:
        """Bytes that wait, of all journals."""
        return self._total

    @property
    def held(self) -> int:
        """Journals that are held back."""
        return len(self._since)

    def refused_by(self, url: str) -> int:
        """Journals whose fragments this store goes on refusing."""
        return sum(failure.url == url for failure in self._failing.values())

    def holds(self, journal: str) -> bool:
        """Whether the journal is held back, whatever its store is now."""
        return journal in self._since

    # -- What happens --------------------------------------------------------------------------------------------------

    def add(self, journal: str, size: int) -> None:
        """So many bytes of the journal are to be stored."""
        self._bytes[journal] = self._bytes.get(journal, 0) + size
        self._total += size
        self._weigh(journal)

    def remove(self, journal: str, size: int) -> None:
        """They are stored, or need not be any more."""
        self._total -= size
        left = self._bytes[journal] - size
        if left:
            self._bytes[journal] = left
        else:
            del self._bytes[journal]
            self._succeeded(journal)
        self._weigh(journal)

    def failed(self, journal: str, url: str, attempts: int, error: str) -> None:
        """A fragment of the journal could not be stored, for the `attempts`th time in a row."""
        if attempts >= FAILING_ATTEMPTS:
            before = self._failing.get(journal)
            self._failing[journal] = _Failure(url, attempts, error)
            self._weigh(journal)
            for each in {url, before.url if before is not None else url}:
                self._on_store(each)

    def stored(self, journal: str) -> None:
        """A store has taken a fragment of the journal."""
        self._succeeded(journal)
        self._weigh(journal)

    # -- What follows --------------------------------------------------------------------------------------------------

    def problem(self, journal: str, url: str) -> str:
        """Why the journal, whose fragments go to that store, takes no appends; empty when it does."""
        if journal not in self._since:
            return ""
        waiting = self._bytes.get(journal, 0)
        failure = self._failing.get(journal)
        if failure is not None and failure.url == url:
            return (
                f"{failure.attempts} attempts to store a fragment of {journal} have failed, the last one because "
                f"{failure.error}. {waiting} bytes of it wait in local files. Appends go on by themselves once {url} "
                "takes its fragments"
            )
        if journal in self._over:
            return (
                f"{waiting} bytes of {journal} wait to be stored in {url}, and max_unpersisted_journal_bytes is "
                f"{self._journal_bytes}. Appends go on by themselves at {_low(self._journal_bytes)}"
            )
        if self._full and waiting:
            return (
                f"{self._total} bytes of this broker's journals wait to be stored, {waiting} of them of {journal} in "
                f"{url}, and max_unpersisted_bytes is {self._broker_bytes}. Appends go on by themselves at "
                f"{_low(self._broker_bytes)}, or once nothing of {journal} waits"
            )
        return ""

    async def room(self, journal: str, url: str, until: Signal | None = None) -> str:
        """As `problem`, but that it waits a while for it to pass. Raises Invalidated when `until` fires first."""
        while problem := self.problem(journal, url):
            left = self._since[journal] + PATIENCE_SECONDS - self._clock.monotonic()
            if left <= 0:
                return problem
            await self._change(left, until)
        return ""

    async def _change(self, seconds: float, until: Signal | None) -> None:
        """Return when some journal is let go, or after so many seconds."""
        if until is not None and until.fired:
            raise Invalidated
        waiter: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        if until is not None:
            until.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return
        finally:
            self._waiters.discard(waiter)
            if until is not None:
                until.discard(waiter)

    def _succeeded(self, journal: str) -> None:
        failure = self._failing.pop(journal, None)
        if failure is not None:
            self._on_store(failure.url)

    def _weigh(self, journal: str) -> None:
        """Hold the journal back, or let it go; and all others, when it is the broker's bound that is passed."""
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
            _log.warning("appends wait for the fragment store", journal=journal, unpersisted=waiting, all=self._total)
        elif not held and journal in self._since:
            del self._since[journal]
            _log.info("appends go on: the fragment store takes fragments", journal=journal, all=self._total)
            waiters, self._waiters = self._waiters, set()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def _exceeds(size: int, bound: int, *, before: bool) -> bool:
    """Whether `size` is too much, given whether it was `before`."""
    return bound > 0 and size > (_low(bound) if before else bound)


def _low(bound: int) -> int:
    return bound * QUARTERS // 4
