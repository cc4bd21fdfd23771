"""The summary of a fragment index that the preconditions of appends use."""

from __future__ import annotations

from typing import NamedTuple


class IndexSummary(NamedTuple):
    """The summary of a fragment index: [begin, end) of all fragments. `empty` is True if there are none.

    `flushed_at` is the time when the last fragment was stored, in Unix seconds; 0 if it is not stored.
    """

    begin: int = 0
    end: int = 0
    empty: bool = True
    flushed_at: int = 0
