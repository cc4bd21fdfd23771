"""The search for messages of a shard whose rows the store rejects. Pure.

A store reports that it rejects a row of a transaction, but not the message that the row comes from. The shard then
restarts from its checkpoint with half as many messages in a transaction, until the message is alone in its transaction.
Transactions without it commit. After each commit, transactions get larger again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from coranto.errors import RejectedRow
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy

Treatment = frozenset[str] | None
"""The columns of a message that are set to null. None: the message is left out, and becomes a dead letter."""
Treatments = Mapping[tuple[str, int], Treatment]
"""The treatments of messages, by journal and offset."""

_UNLIMITED: Final = 1 << 16
_MAX_KEPT: Final = 10_000


class Consumed(NamedTuple):
    """A consumed message, with its treatment if its rows are rejected."""

    journal: str
    offset: int
    misfits: MisfitPolicy | DeadLetters
    columns: tuple[str, ...] = ()
    """The columns of the message that may be null."""


class RejectionSearch:
    """The rejected messages of one shard that this process has found, across runs of its primary."""

    def __init__(self) -> None:
        self.max_messages: int | None = None
        """The maximum number of messages in a transaction during a search. None: no limit."""
        self.treatments: dict[tuple[str, int], Treatment] = {}
        """The treatments of found messages, by journal and offset."""
        self._may_continue = False

    def completed(self) -> None:
        """Record that a transaction has committed."""
        if self.max_messages is not None:
            more = 2 * self.max_messages
            self.max_messages = more if more < _UNLIMITED else None

    def record_rejection(self, problem: RejectedRow, messages: int, last: Consumed | None) -> RejectedRow:
        """Record that the store rejected a row of a transaction of `messages` messages. `last` is the last one.

        Returns the error, with journal and offset if the message is found.
        """
        self._may_continue = True
        if self.max_messages is None or messages > 1:
            self.max_messages = max(1, messages // 2)
            return problem
        if last is None:
            self._may_continue = False
            return problem
        found = problem.at(last.journal, last.offset)
        self._may_continue = self._treat(last)
        return found

    def may_continue(self) -> bool:
        """Return True, once, if the shard may restart after the error of the last `record_rejection`."""
        may, self._may_continue = self._may_continue, False
        return may

    def _treat(self, found: Consumed) -> bool:
        """Choose the next treatment of a message. Return False if there is none."""
        place = (found.journal, found.offset)
        if isinstance(found.misfits, DeadLetters):
            if place in self.treatments:
                return False  # The store rejects the dead letter, too.
            self._keep(place, None)
            return True
        if found.misfits is not MisfitPolicy.NULLS or not found.columns:
            return False
        # Each column alone, and then all: the store commits the first accepted form, so the fewest nulls come first.
        ways = [frozenset({name}) for name in found.columns]
        ways += [frozenset(found.columns)] if len(ways) > 1 else []
        before = self.treatments.get(place)
        following = 0 if before is None else ways.index(before) + 1
        if following == len(ways):
            return False
        self._keep(place, ways[following])
        return True

    def _keep(self, place: tuple[str, int], treatment: Treatment) -> None:
        self.treatments[place] = treatment
        if len(self.treatments) > _MAX_KEPT:  # The first ones were consumed long ago.
            del self.treatments[next(iter(self.treatments))]
