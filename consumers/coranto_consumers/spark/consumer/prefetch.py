"""Reading ahead: while one transaction commits, the input of the next one is planned and read.

What was read is used only if the next transaction is planned as it was then: the same ranges, from the same states
of its sources. Otherwise it is let go. So reading ahead decides nothing about what is processed, it only saves time.
Nothing that depends on it is written before its own turn comes: neither rows nor messages.

A run without an end looks again at what there is to read when all that it knew of is read. That look is taken ahead,
too: its *extents* come with the plan that follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from coranto.messages.checkpoints import Source
from coranto_consumers.spark.journals.discovery import ContentExtent
from coranto_consumers.spark.journals.ranges import Range

T = TypeVar("T")


class PlannedInput(NamedTuple):
    """The plan of a transaction's input: all that the input depends on."""

    ranges: tuple[Range, ...]
    sources: Mapping[str, Source]

    @classmethod
    def of(cls, ranges: Sequence[Range], sources: Mapping[str, Source]) -> Self:
        return cls(tuple(ranges), {each.journal: sources[each.journal] for each in ranges})


@dataclass(frozen=True, slots=True)
class NextInput(Generic[T]):
    """An input that is expected to be the next one. Entering `reading` reads it."""

    planned: PlannedInput
    reading: AbstractContextManager[T]
    extents: Mapping[str, ContentExtent] | None = None
    """The content that there is, if it was looked at again for the plan."""


class InputAhead(Generic[T]):
    """Plans and reads at most one input ahead, in a thread. Use it from one thread, as a context manager.

    Leaving the context waits for a read that is under way, and lets its input go.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="coranto-read-ahead")
        self._ahead: tuple[Future[NextInput[T] | None], Future[tuple[T, ExitStack] | None]] | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self, plan: Callable[[], NextInput[T] | None]) -> None:
        """Begin to plan an input by a function, and to read it if there is one. What was read before is let go."""
        self._let_go()
        following = self._pool.submit(plan)
        self._ahead = following, self._pool.submit(_entered, following)

    def extents(self) -> Mapping[str, ContentExtent] | None:
        """Return the content that there was when the input ahead was planned, if it was looked at for that."""
        found = self._next()
        return None if found is None else found.extents

    def take(self, wanted: PlannedInput) -> AbstractContextManager[T] | None:
        """Return the input that was read ahead, as a context, if it is the wanted one. Another one is let go.

        Waits for the plan. Entering the context waits for the input, and raises what reading it has raised.
        """
        if self._ahead is None:
            return None
        _, read = self._ahead
        found = self._next()
        if found is None or found.planned != wanted:
            self._let_go()
            return None
        self._ahead = None
        return _taken(read)

    def _next(self) -> NextInput[T] | None:
        """Return what was planned. Nobody wants what planning has met; it is met again in its own turn."""
        if self._ahead is None or self._ahead[0].exception() is not None:
            return None
        return self._ahead[0].result()

    def _let_go(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        _, read = ahead
        if read.exception() is None and (found := read.result()) is not None:
            found[1].close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._let_go()
        finally:
            self._pool.shutdown()


def _entered(following: Future[NextInput[T] | None]) -> tuple[T, ExitStack] | None:
    found = following.result()  # It was planned before, in the same thread.
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
