"""Outages of what a Spark consumer depends on: the store, brokers, fragment stores.

After a transient failure the consumer waits by the one policy of retries, and continues from its last commit under the
fence that it has. It never raises its fence again: another instance that has started meanwhile would be fenced off.

A commit may have taken place although its answer was lost, so what was being committed is remembered, and compared with
the checkpoint that the store has when it answers again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from coranto.client.retry import Retry, RetryPolicy
from coranto.errors import CorantoError, CorruptData, StreamError
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.spark.consumer.progress import ConsumeReport, Hooks
from coranto_consumers.spark.session.task_errors import errors_of_tasks
from coranto_consumers.stores.engines import is_transient

T = TypeVar("T")
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class RunCommits:
    """The commits of one run, as far as its driver knows them."""

    checkpoint: Checkpoint | None = None
    """The last checkpoint that is known to be committed."""
    report: ConsumeReport | None = None
    """The progress of the run as of that checkpoint."""
    _committing: tuple[Checkpoint, ConsumeReport] | None = None

    def forget(self) -> None:
        """Forget all: another run begins."""
        self.checkpoint = self.report = self._committing = None

    def begin(self, checkpoint: Checkpoint, report: ConsumeReport) -> None:
        """Note what is about to be committed, and the progress of the run if it is."""
        self._committing = checkpoint, report

    def committed(self) -> None:
        """Note that it is committed."""
        assert self._committing is not None
        self.checkpoint, self.report = self._committing
        self._committing = None

    def restored(self, checkpoint: Checkpoint, name: str) -> None:
        """Note the checkpoint that the store has after a failure. Raises CorruptData for one that is older."""
        if self._committing is not None and checkpoint == _as_stored(self._committing[0]):
            self.committed()
        elif self.checkpoint is None or checkpoint != _as_stored(self.checkpoint):
            raise CorruptData(
                f"{name} has an earlier checkpoint than this consumer has committed: it lost commits, as in a failover "
                "to a server that lacks them. Start the consumer again: it continues from the checkpoint that is "
                "there, and what it published since is published again"
            )
        self._committing = None


@dataclass(slots=True)
class Outages:
    """The retries of one run. `told` is called with the progress at each failure. It may fail by the same outage."""

    consumer: str
    policy: RetryPolicy
    hooks: Hooks
    told: Callable[[ConsumeReport], None]
    monotonic: Callable[[], float] = time.monotonic
    retries: int = 0
    _retry: Retry = field(init=False)

    def __post_init__(self) -> None:
        seed = self.policy.seed if self.policy.seed is not None else int.from_bytes(os.urandom(8))
        self._retry = Retry(replace(self.policy, seed=seed))

    def progressed(self) -> bool:
        """Note progress, which ends an outage. Returns True if there was one."""
        if not self._retry.failures:
            return False
        seconds = self._retry.seconds(self.monotonic())
        _log.info("consumer.continued", consumer=self.consumer, seconds=round(seconds, 1))
        self._retry.progressed()
        return True

    def run(
        self,
        attempt: Callable[[], T],
        known: Callable[[], ConsumeReport],
        stop: Callable[[], bool] = lambda: False,
    ) -> T | None:
        """Call `attempt` until it returns. Return its result; None if `stop` ends the retries.

        `known` returns the progress so far. Raises an error that is not transient, and the last one after the timeout.
        """
        while True:
            try:
                with errors_of_tasks():
                    return attempt()
            except Exception as error:
                now = self.monotonic()
                pause = self._retry.failed(now) if _may_pass(error) else None
                if pause is None:
                    raise
                self.retries += 1
                seconds = self._retry.seconds(now)
                self._tell(replace(known(), retries=self.retries, outage_seconds=seconds))
                if self._retry.is_report_due(now):
                    _log.warning(
                        "consumer.retrying",
                        consumer=self.consumer,
                        error=str(error) if isinstance(error, CorantoError) else type(error).__name__,
                        failures=self._retry.failures,
                        seconds=round(seconds, 1),
                    )
            if stop():
                return None
            self.hooks.pause(pause)
            if stop():
                return None

    def _tell(self, report: ConsumeReport) -> None:
        try:
            self.told(report)
        except Exception as error:
            if not _may_pass(error):
                raise
            # A listener may use the same store, as one that reports rows of tables does.
            _log.info("consumer.progress_not_told", consumer=self.consumer, error=type(error).__name__)


def _as_stored(checkpoint: Checkpoint) -> Checkpoint:
    return Checkpoint.from_bytes(checkpoint.to_bytes())


def _may_pass(error: Exception) -> bool:
    if isinstance(error, CorantoError):
        # The segments of a stream may be as they are until an operator changes them.
        return error.retriable and not isinstance(error, StreamError)
    return is_transient(error)
