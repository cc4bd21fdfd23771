"""An adapter from Coranto's structured log to Dagster's log."""

from __future__ import annotations

import dagster as dg


class DagsterLog:
    """Writes structured events of Coranto (see `coranto.telemetry`) to the log of a Dagster run."""

    def __init__(self, log: dg.DagsterLogManager) -> None:
        self._log = log

    def info(self, event: str, **facts: object) -> None:
        """Log `event`, followed by its facts."""
        self._log.info(" ".join([event, *(f"{name}={value}" for name, value in facts.items())]))
