"""Reading ahead: while one transaction commits, the input of the next one is read.

What was read is used only if the next transaction is planned as it was then: the same ranges, from the same states
of its sources. Otherwise it is let go. So reading ahead decides nothing about what is processed, it only saves time.
Nothing that depends on it is written before its own turn comes: neither rows nor messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from coranto.messages.checkpoints import Source
from coranto_consumers.spark.ranges import Range

T = TypeVar("T")


class PlannedInput(NamedTuple):
    """The plan of a transaction's input: all that the input depends on."""

    ranges: tuple[Range, ...]
    sources: Mapping[str, Source]

    @classmethod
    def of(cls, ranges: Sequence[Range], sources: Mapping[str, Source]) -> Self:
        return cls(tuple(ranges), {each.journal: sources[each.journal] for each in ranges})


class InputAhead(Generic[T]):
    """Reads at most one input ahead, in a thread. Use it from one thread, as a context manager.

    Leaving the context waits for a read that is under way, and lets its input go.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="coranto-read-ahead")
        self._ahead: tuple[PlannedInput, Future[tuple[T, ExitStack]]] | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self, planned: PlannedInput, reading: AbstractContextManager[T]) -> None:
        """Begin to read an input, by entering `reading`. What was read ahead before is let go."""
        self._let_go()
        self._ahead = planned, self._pool.submit(_entered, reading)

    def take(self, wanted: PlannedInput) -> AbstractContextManager[T] | None:
        """Return the input that was read ahead, as a context, if it is the wanted one. Another one is let go.

        Entering the context waits for the input, and raises what reading it has raised.
        """
        if self._ahead is None:
            return None
        planned, read = self._ahead
        if planned != wanted:
            self._let_go()
            return None
        self._ahead = None
        return _taken(read)

    def _let_go(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        _, read = ahead
        if read.exception() is None:  # Nobody wants what it has met; it is met again in its own turn.
            read.result()[1].close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._let_go()
        finally:
            self._pool.shutdown()


def _entered(reading: AbstractContextManager[T]) -> tuple[T, ExitStack]:
    stack = ExitStack()
    return stack.enter_context(reading), stack


@contextmanager
def _taken(read: Future[tuple[T, ExitStack]]) -> Iterator[T]:
    found, stack = read.result()
    with stack:
        yield found
