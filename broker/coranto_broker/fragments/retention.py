"""Retention: the primary of a journal removes stored fragments that are older than the journal's retention.

After each listing of the stores, the primary plans another round (`coranto.fragments.retention` chooses fragments). It
removes them one by one, lowest offsets first, so that the rest has no gap wherever the round ends. If a store fails,
the round ends, and the next listing starts another. All journals of a broker share one rate limit.

A journal keeps content that it shares with its forks. Its spec is checked again right before each removal, and a change
ends the round. A fork does not remove shared fragments, which belong to its source, but its listings omit those that
are older than the fork's own retention.

A fragment is removed from this broker's index just before its file is removed, so that reads of it jump to the rest.
Other replicas keep it in their indexes until they list the stores again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import structlog

from coranto.effects import Clock
from coranto.errors import CorantoError
from coranto.fragments.forks import held_from
from coranto.fragments.fragment import Fragment
from coranto.fragments.retention import expired
from coranto.fragments.stores import StoreRegistry
from coranto.specs.validation import duration_seconds
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.index import FragmentIndex
from coranto_broker.metrics import Metrics

_log = structlog.get_logger(__name__)


class Retention:
    """Enforces the retention of the journals of one broker."""

    def __init__(
        self,
        stores: StoreRegistry,
        clock: Clock,
        metrics: Metrics,
        *,
        is_primary: Callable[[str], bool],
        spec_of: Callable[[str], pb.JournalSpec | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        per_second: float,
    ) -> None:
        """`is_primary` returns True if this broker is a journal's primary now, and `spec_of` its current spec.

        `per_second` bounds removals.
        """
        self._stores = stores
        self._clock = clock
        self._metrics = metrics
        self._is_primary = is_primary
        self._spec_of = spec_of
        self._spawn = spawn
        self._pause = 1 / per_second
        self._pace = asyncio.Lock()
        self._under_way: set[str] = set()

    def listed(self, spec: pb.JournalSpec, listed: Sequence[Fragment], index: FragmentIndex) -> None:
        """Remove expired fragments in the background, after a listing of the stores that `index` already includes."""
        seconds = duration_seconds(spec.fragment.retention)
        if seconds <= 0 or spec.name in self._under_way or not self._is_primary(spec.name):
            return
        # A fragment with a local file is perhaps being stored now, or not listed yet.
        local = [replace(entry.fragment, backing_store="") for entry in index.entries if entry.content is not None]
        gone = expired([*listed, *local], seconds, self._clock.now(), held_from(spec))
        gone = [each for each in gone if each.journal == spec.name]
        if gone:
            self._under_way.add(spec.name)
            self._spawn(self._remove(spec.name, seconds, gone, index))

    def _allows(self, journal: str, seconds: float, fragment: Fragment) -> bool:
        """Return True if this broker may still remove a fragment, by the journal's current spec and primary."""
        spec = self._spec_of(journal)
        return (
            spec is not None
            and self._is_primary(journal)
            and duration_seconds(spec.fragment.retention) == seconds
            and fragment.end <= held_from(spec)
        )

    async def _remove(self, journal: str, seconds: float, gone: Sequence[Fragment], index: FragmentIndex) -> None:
        count = size = 0
        try:
            for fragment in gone:
                async with self._pace:
                    await self._clock.sleep(self._pause)
                    if not self._allows(journal, seconds, fragment):
                        return  # The next listing begins another round.
                    index.forget_through(fragment.end)
                    await self._stores.get(fragment.backing_store).remove(fragment)
                count, size = count + 1, size + fragment.length
                self._metrics.removed.inc()
                self._metrics.removed_bytes.inc(fragment.length)
                _log.debug("fragment.removed", fragment=fragment.content_path, store=fragment.backing_store)
        except CorantoError as error:
            self._metrics.removal_failures.inc()
            _log.warning("fragment.removal_failed", journal=journal, error=str(error))
        finally:
            self._under_way.discard(journal)
            if count:
                _log.info(
                    "retention.removed",
                    journal=journal,
                    fragments=count,
                    bytes=size,
                    first_offset=index.entries.begin_offset,
                )
