"""Search for the messages whose rows a store rejects, by trying parts of a transaction. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from coranto.errors import RejectedRow

MAX_REJECTED: Final = 1000
"""The maximum number of rejected messages in one transaction. Finding each takes several attempts."""

Attempt = Callable[[Collection[int], int], RejectedRow | None]
"""Tries the first messages of a transaction, up to a count, without some of them. Returns the rejection, or None."""


class TooManyRejected(Exception):
    """A store rejects more messages than the maximum. Consumers catch it."""

    def __init__(self, found: dict[int, RejectedRow]) -> None:
        super().__init__(f"{len(found)} rejected messages")
        self.found = found


def find_rejected(
    count: int, attempt: Attempt, problem: RejectedRow, most: int = MAX_REJECTED
) -> dict[int, RejectedRow]:
    """Return the rejected messages of a transaction of `count`, by number. Without them, the store accepts the others.

    `problem` is the rejection of the whole transaction. The store rejects each returned message together with the
    accepted messages before it. Messages that only need a row of a later message are not returned. Raises `problem` if
    no message causes it, and TooManyRejected for more than `most`.
    """
    found: dict[int, RejectedRow] = {}
    low = 0  # The store accepts [0, low) without the found messages.
    failure: RejectedRow | None = problem
    while failure is not None:
        if low >= count:
            raise failure
        if len(found) >= most:
            raise TooManyRejected(found)
        high = count
        while high - low > 1:
            middle = (low + high) // 2
            earlier = attempt(found.keys(), middle)
            if earlier is None:
                low = middle
            else:
                high, failure = middle, earlier
        found[high - 1] = failure
        low = high
        failure = attempt(found.keys(), count)
    for number in list(found) if len(found) > 1 else []:
        # The message may have needed a row of a later message.
        if attempt(found.keys() - {number}, count) is None:
            del found[number]
    return found


def find_nulls(
    columns: Sequence[str], attempt: Callable[[Collection[str]], RejectedRow | None]
) -> frozenset[str] | None:
    """Return the columns that must be null for the store to accept a message. None if it rejects even all nulls.

    `attempt` tries the message with some columns null. A column stays null only if the store rejects its value.
    """
    nulls = frozenset(columns)
    if not nulls or attempt(nulls) is not None:
        return None
    for column in columns:
        if attempt(nulls - {column}) is None:
            nulls -= {column}
    return nulls
