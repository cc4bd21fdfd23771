"""Warnings about producers whose clocks are far off.

The warnings have no effect on sequencing: the clock of one producer never affects the state of another (`pruning.py`).
But a producer with such a clock is pruned by bytes alone, its messages have misleading times, and its machine needs
attention.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import structlog

from coranto.messages.checkpoints import Source
from coranto.messages.uuids import ProducerId, clock_to_ns

FAR_OFF_S: Final = 3600.0
"""The difference in seconds beyond which a clock is far off."""

_MAX_KNOWN: Final = 4096

_log = structlog.get_logger(__name__)


class SkewedClock(NamedTuple):
    """A producer's clock that is far off: by `seconds` ahead of the reader's clock, or behind the journal (negative).

    A producer is behind if it wrote after a message of another producer whose clock is that much later, and is not far
    ahead of the reader's. Then one of these two clocks is wrong, or the message was appended late.
    """

    producer: ProducerId
    seconds: float


def skewed_clocks(before: Source, after: Source, now: float) -> list[SkewedClock]:
    """Return the clocks that are far off, among the producers read between two states of a journal.

    `now` is the reader's time in seconds since the Unix epoch.
    """
    known = (clock_to_ns(state.last_ack) / 1e9 for state in before.producers.values())
    latest = max((time for time in known if time - now <= FAR_OFF_S), default=None)
    found = []
    for producer, state in after.producers.items():
        if state.seen_through <= before.read_through:
            continue
        time = clock_to_ns(state.last_ack) / 1e9
        if time - now > FAR_OFF_S:
            found.append(SkewedClock(producer, time - now))
        elif latest is not None and latest - time > FAR_OFF_S:
            found.append(SkewedClock(producer, time - latest))
    return found


class SkewWatch:
    """Warns about producers whose clocks are far off while a journal is read, about once per producer."""

    def __init__(self, journal: str, source: Source) -> None:
        """`source` is the state before the first message."""
        self._journal = journal
        self._before = source
        self._known: set[ProducerId] = set()

    def check(self, source: Source, now: float) -> list[SkewedClock]:
        """Check the journal's state after more was read. Return the clocks in the warning."""
        before, self._before = self._before, source
        found = [each for each in skewed_clocks(before, source, now) if each.producer not in self._known]
        if not found:
            return []
        if len(self._known) + len(found) > _MAX_KNOWN:
            self._known.clear()
        self._known.update(each.producer for each in found[:_MAX_KNOWN])
        worst = max(found, key=lambda each: abs(each.seconds))
        _log.warning(
            "producer.clock_skewed",
            journal=self._journal,
            producer=worst.producer.hex(),
            seconds_ahead=round(worst.seconds, 1),
            producers=len(found),
        )
        return found
