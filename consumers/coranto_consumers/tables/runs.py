"""The options of a run of a table, and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class RunOptions(NamedTuple):
    """The options of `run_table`."""

    once: bool
    stop: Callable[[], bool]
    wait: Callable[[], object]
    accept_changes: str


class TableReport(NamedTuple):
    """The messages and transactions that a run has committed."""

    messages: int
    transactions: int
