"""Prefetch: plan and read the next transaction's input while the current transaction commits.

The input is used only if the next transaction's plan is equal: the same ranges, from the same states. So prefetch never
changes the result. A service lists the journals again once it has caught up; prefetch does this, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

from coranto_consumers.journals.discovery import Extents
from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark.committed.sequencing import Sources

T = TypeVar("T")


class PlannedInput(NamedTuple):
    """Everything that a transaction's input depends on."""

    ranges: tuple[Range, ...]
    sources: Sources

    @classmethod
    def of(cls, ranges: Sequence[Range], sources: Sources) -> Self:
        return cls(tuple(ranges), {each.journal: sources[each.journal] for each in ranges})


@dataclass(frozen=True, slots=True)
class NextInput(Generic[T]):
    """The input of the expected next plan. Entering `reading` reads the input."""

    planned: PlannedInput
    reading: AbstractContextManager[T]
    extents: Extents | None = None
    """The content of the journals, if they were listed again for the plan."""


class Prefetcher(Generic[T]):
    """Plans and reads at most one input ahead, in a background thread. Leaving the context discards the input."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="coranto-read-ahead")
        self._ahead: tuple[Future[NextInput[T] | None], Future[tuple[T, ExitStack] | None]] | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self, plan: Callable[[], NextInput[T] | None]) -> None:
        """Call `plan` in the background, and read the input that it returns. Discards an earlier prefetch."""
        self._discard()
        following = self._pool.submit(plan)
        self._ahead = following, self._pool.submit(_entered, following)

    def extents(self) -> Extents | None:
        """Return the content of the journals, if the prefetch has listed them. Waits for the prefetched plan."""
        found = self._next()
        return None if found is None else found.extents

    def take(self, wanted: PlannedInput) -> AbstractContextManager[T] | None:
        """Return the prefetched input if its plan equals `wanted`, else None. Entering it waits until it is read."""
        if self._ahead is None:
            return None
        _, read = self._ahead
        found = self._next()
        if found is None or found.planned != wanted:
            self._discard()
            return None
        self._ahead = None
        return _taken(read)

    def _next(self) -> NextInput[T] | None:
        """Return the prefetched plan. Planning errors are dropped, because the transaction then plans again."""
        if self._ahead is None or self._ahead[0].exception() is not None:
            return None
        return self._ahead[0].result()

    def _discard(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        _, read = ahead
        if read.exception() is None and (found := read.result()) is not None:
            found[1].close()

    def __exit__(self, *error: object) -> None:
        try:
            self._discard()
        finally:
            self._pool.shutdown()


def _entered(following: Future[NextInput[T] | None]) -> tuple[T, ExitStack] | None:
    found = following.result()  # Done: the pool's only thread has run the plan before.
    if found is None:
        return None
    stack = ExitStack()
    return stack.enter_context(found.reading), stack


@contextmanager
def _taken(read: Future[tuple[T, ExitStack] | None]) -> Iterator[T]:
    entered = read.result()
    assert entered is not None  # There was a plan.
    found, stack = entered
    with stack:
        yield found
