"""The choice of transactions that are read and written in one job.

A transaction takes two jobs: one reads, and Spark keeps the rows; when it is known which of them are committed, another
writes what the application makes of these. Mostly all of them are. So tasks may write at once, as if all were, and the
driver looks at the ranges' summaries afterwards. What was written before that is worth no more than what a failed task
wrote: if a single message turns out not to be committed, nothing merges it, and the transaction takes two jobs after
all. So this decides nothing about what is processed, it only saves time, as reading ahead does.

It is tried where it is likely to do: no producer has a transaction open, the application writes one table and no
journal, and it did the last time. Files of an `IcebergStore` that count for nothing are swept only later, so it is left
out there. What was read in vain costs a transaction about half as much again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coranto.messages.checkpoints import Source
from coranto_consumers.spark.application.application import Outputs
from coranto_consumers.spark.journals.ranges import WORTHWHILE_BYTES, Range

_MOST_SKIPPED = 256


class WritingAtOnce:
    """Chooses the transactions of one consumer that are written at once."""

    def __init__(self, is_possible: bool = True) -> None:
        self._skipped = 0
        self._to_skip = 0
        self._is_possible = is_possible

    def is_worthwhile(self, ranges: Iterable[Range], sources: Mapping[str, Source]) -> bool:
        """Return True if a transaction over ranges, from the states of sources, is likely to be written at once."""
        ranges = list(ranges)
        return (
            self._is_possible
            and self._skipped >= self._to_skip
            and sum(each.length for each in ranges) > WORTHWHILE_BYTES
            and not any(state.begin >= 0 for each in ranges for state in sources[each.journal].producers.values())
        )

    def require_one_table(self, outputs: Outputs) -> None:
        """Raise NotAtOnce for outputs that one job does not write."""
        if outputs.journals or len(outputs.tables) + len(outputs.sql) != 1:
            self._is_possible = False
            raise NotAtOnce

    def took_two_jobs(self, *, in_vain: bool) -> None:
        """Take in that a transaction has taken two jobs, `in_vain` behind a first one that wrote at once."""
        self._skipped += 1
        if in_vain:
            self._skipped, self._to_skip = 0, min(_MOST_SKIPPED, max(1, 2 * self._to_skip))

    def took_one_job(self) -> None:
        """Take in that a transaction was written at once."""
        self._to_skip = 0


class NotAtOnce(Exception):
    """The outputs of an application cannot be written at once. It never leaves a consumer."""
