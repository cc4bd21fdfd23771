"""The options of a run of a table, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class TableReport(NamedTuple):
    """The messages and transactions that a run has committed."""

    messages: int = 0
    transactions: int = 0

    def after(self, earlier: TableReport) -> TableReport:
        """Return the sums of this report and an earlier one."""
        return TableReport(self.messages + earlier.messages, self.transactions + earlier.transactions)


class RunOptions(NamedTuple):
    """The options of `run_table`. The functions are called in its thread."""

    once: bool = False
    """The run ends when all messages that were present at its start are in the table."""
    stop: Callable[[], bool] = lambda: False
    """Returns True to end the run after the current transaction."""
    wait: Callable[[], object] = lambda: time.sleep(1.0)
    """Waits briefly."""
    on_progress: Callable[[TableReport], object] = lambda report: None
    """Called with the progress of the run, several times a second or after each transaction."""
    accept_changes: str = ""
    """The code that confirms a changed input or store. The error ConsumerChanged has it."""
