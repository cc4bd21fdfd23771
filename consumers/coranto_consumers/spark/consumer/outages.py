"""Retries of a Spark consumer while a store, broker or fragment store is unavailable.

The consumer continues from its last commit under its fence. It never raises the fence again, because that would fence
off an instance that has started in the meantime. A commit whose response was lost may have been applied (`RunCommits`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from coranto.client.retry import Retry, RetryPolicy
from coranto.errors import CorantoError, StreamError
from coranto_consumers.spark.consumer.progress import ConsumeReport, Hooks, OnProgress
from coranto_consumers.spark.session.task_errors import errors_of_tasks
from coranto_consumers.stores.engines import is_transient

T = TypeVar("T")
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Outages:
    """The retries of one run. `report` gets the progress at each failure, and may fail because of the same outage."""

    consumer: str
    policy: RetryPolicy
    hooks: Hooks
    report: OnProgress
    monotonic: Callable[[], float] = time.monotonic
    retries: int = 0
    _retry: Retry = field(init=False)

    def __post_init__(self) -> None:
        seed = self.policy.seed if self.policy.seed is not None else int.from_bytes(os.urandom(8))
        self._retry = Retry(replace(self.policy, seed=seed))

    def progressed(self) -> bool:
        """Record progress, which ends an outage. Returns True if there was an outage."""
        if not self._retry.failures:
            return False
        seconds = self._retry.seconds(self.monotonic())
        _log.info("consumer.continued", consumer=self.consumer, seconds=round(seconds, 1))
        self._retry.progressed()
        return True

    def run(
        self, attempt: Callable[[], T], known: Callable[[], ConsumeReport], stop: Callable[[], bool] = lambda: False
    ) -> T | None:
        """Call `attempt` until it succeeds. Returns None once `stop` returns True. `known` returns the progress."""
        while True:
            try:
                with errors_of_tasks():
                    return attempt()
            except Exception as error:
                now = self.monotonic()
                pause = self._retry.failed(now) if _is_retriable(error) else None
                if pause is None:
                    raise
                self.retries += 1
                seconds = self._retry.seconds(now)
                try:
                    self.report(replace(known(), retries=self.retries, outage_seconds=seconds))
                except Exception as failure:
                    if not _is_retriable(failure):
                        raise
                    # A listener may use the same store, for example to report rows of tables.
                    kind = type(failure).__name__
                    _log.info("consumer.progress_listener_failed", consumer=self.consumer, error=kind)
                if self._retry.is_report_due(now):
                    _log.warning(
                        "consumer.retrying",
                        consumer=self.consumer,
                        error=str(error) if isinstance(error, CorantoError) else type(error).__name__,
                        failures=self._retry.failures,
                        seconds=round(seconds, 1),
                    )
            if not stop():
                self.hooks.pause(pause)
                if not stop():
                    continue
            return None


def _is_retriable(error: Exception) -> bool:
    if isinstance(error, CorantoError):
        # Retrying does not change the segments of a stream; an operator must.
        return error.retriable and not isinstance(error, StreamError)
    return is_transient(error)
