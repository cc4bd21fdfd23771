"""Finding the messages whose rows a store rejects, by trying parts of a transaction. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from coranto.errors import RejectedRow

MAX_REJECTED: Final = 1000
"""The most messages of one transaction that are left out, or given nulls. Each one takes some tries to find."""

Attempt = Callable[[Collection[int], int], RejectedRow | None]
"""Tries the first messages of a transaction, up to a count and without some numbers. Returns the rejection."""


class TooManyRejected(Exception):
    """A store rejects more messages than are to be looked for. It never leaves a consumer."""

    def __init__(self, found: dict[int, RejectedRow]) -> None:
        super().__init__(f"{len(found)} rejected messages")
        self.found = found


def find_rejected(
    count: int, attempt: Attempt, problem: RejectedRow, most: int = MAX_REJECTED
) -> dict[int, RejectedRow]:
    """Return the messages, by number, whose omission lets the store take the others of a transaction of `count`.

    `problem` is the rejection of all. In their order, the store does not take any of these messages with
    those before it; and no one of them is taken with all the others. Raises `problem` if no message causes it,
    and TooManyRejected for more than `most`.
    """
    found: dict[int, RejectedRow] = {}
    low = 0  # The store takes [0, low) without the found ones.
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
        # It may have lacked a row that a later message brings.
        if attempt(found.keys() - {number}, count) is None:
            del found[number]
    return found


def find_nulls(
    columns: Sequence[str], attempt: Callable[[Collection[str]], RejectedRow | None]
) -> frozenset[str] | None:
    """Return columns of a message that have to be null for the store to take it. None if it never takes it.

    No value of the columns can be kept with the others' nulls. `attempt` tries the message with some columns null.
    """
    nulls = frozenset(columns)
    if not nulls or attempt(nulls) is not None:
        return None
    for column in columns:
        if attempt(nulls - {column}) is None:
            nulls -= {column}
    return nulls
