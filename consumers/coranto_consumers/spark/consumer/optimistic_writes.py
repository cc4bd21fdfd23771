"""The choice of transactions that one job reads and writes.

Normally a transaction takes two jobs: one reads, and once the committed messages are known, another writes the
application's outputs of them. Usually all messages are committed. So one job may write optimistically, as if all were,
and the driver checks the ranges' summaries afterwards. If a message turns out not to be committed, the written rows are
never merged, and the transaction takes two jobs. Such an attempt adds about half to the cost of a transaction.

It is chosen where it is likely to succeed: no producer has an open transaction, the application writes one table and no
journal, and the last attempt succeeded. An `IcebergStore` does without, because it sweeps unused files only later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coranto.messages.checkpoints import Source
from coranto_consumers.spark.application.outputs import Outputs
from coranto_consumers.spark.journals.ranges import WORTHWHILE_BYTES, Range

_MAX_SKIPPED = 256


class OptimisticWrites:
    """Chooses the transactions of one consumer that are written optimistically."""

    def __init__(self, is_possible: bool = True) -> None:
        self._skipped = 0
        self._to_skip = 0
        self._is_possible = is_possible

    def is_worthwhile(self, ranges: Iterable[Range], sources: Mapping[str, Source]) -> bool:
        """Return True if one job is likely to write a transaction over ranges, from the states of sources."""
        ranges = list(ranges)
        return (
            self._is_possible
            and self._skipped >= self._to_skip
            and sum(each.length for each in ranges) > WORTHWHILE_BYTES
            and not any(state.begin >= 0 for each in ranges for state in sources[each.journal].producers.values())
        )

    def allows(self, outputs: Outputs) -> bool:
        """Return True for outputs that one job can write. Otherwise this application is not tried again."""
        self._is_possible = not outputs.journals and len(outputs.tables) + len(outputs.sql) == 1
        return self._is_possible

    def took_two_jobs(self, *, wasted: bool) -> None:
        """Record a transaction that took two jobs, and if they followed a `wasted` optimistic one."""
        self._skipped += 1
        if wasted:
            self._skipped, self._to_skip = 0, min(_MAX_SKIPPED, max(1, 2 * self._to_skip))

    def took_one_job(self) -> None:
        self._to_skip = 0
