"""A limit on each caller's blocking reads, since each takes memory, and time at every append."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coranto.errors import LimitExceeded


class TooManyReads(LimitExceeded):
    """A blocking read was refused because its caller has too many under way."""


class BlockingReads:
    """Counts the blocking reads under way by caller (`coranto.security.admission.caller_of`)."""

    def __init__(self, most: int, on_refusal: Callable[[], object]) -> None:
        """Each caller may have `most` at a time; 0: any number. `on_refusal` is called for each refused read."""
        self._most = most
        self._on_refusal = on_refusal
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def under_way(self, caller: str) -> Iterator[None]:
        """Count a read during the block. At the caller's limit, raise TooManyReads instead."""
        if self._most and self._under_way.get(caller, 0) >= self._most:
            self._on_refusal()
            raise TooManyReads(
                f"{caller} has {self._most} blocking reads under way at this broker, and may have no more "
                "(max_blocking_reads). End some, read more content by each, or try again later; reads that do not "
                "block are not limited"
            )
        self._under_way[caller] += 1
        try:
            yield
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]
