"""What a fragment index tells the preconditions of appends."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """What the fragment index knows: [begin, end) of all fragments, and whether there are any.

    `flushed_at` is when the last of them was stored, in Unix seconds; 0 if it is not.
    """

    begin: int = 0
    end: int = 0
    empty: bool = True
    flushed_at: int = 0
