"""Retries of calls to brokers, fragment stores, SQL stores, catalogs and etcd: one schedule of waits for all.

A job has a timeout. A service retries without limit, and logs one line per minute.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import structlog

from coranto.effects import Clock
from coranto.errors import CorantoError

_SCHEDULE = (0.05, 0.05, 0.1, 0.1, 0.25, 0.5, *[1.0] * 30)
"""Waits in seconds. They stay short until a dead broker's lease has expired, when another broker takes over."""
_LATER = 5.0

JOB_SECONDS: Final = 600.0
"""The default timeout of a job, such as a run of a Spark consumer until it has caught up."""

REPORT_SECONDS: Final = 60.0
"""The minimum time between two log lines about the failures of one operation."""
_CALL_SECONDS: Final = 5.0
"""A call that has been retried for this long is logged."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The waits between attempts: capped exponential backoff.

    `timeout` is in seconds from the first failure. `seed` determines the jitter, which shortens each wait by up to a
    half; without one, waits are exact. `scale` multiplies all waits.
    """

    timeout: float = math.inf
    seed: int | None = None
    scale: float = 1.0

    def wait(self, attempt: int) -> float:
        """Return the seconds to wait after failure number `attempt` (from 0) since the last progress."""
        wait = self.scale * (_SCHEDULE[attempt] if attempt < len(_SCHEDULE) else _LATER)
        return wait if self.seed is None else wait * random.Random(f"{self.seed}/{attempt}").uniform(0.5, 1.0)

    def waits(self) -> Iterator[float]:
        """Yield the waits whose sum is within the timeout, for attempts that take no time."""
        attempt, left = 0, self.timeout
        while (wait := self.wait(attempt)) <= left:
            yield wait
            attempt, left = attempt + 1, left - wait


class Retry:
    """Counts the failures of an operation since its last progress, and decides on the next wait, or to give up.

    Gives up when the next wait would exceed the policy's timeout since the first failure.
    """

    def __init__(self, policy: RetryPolicy | float = math.inf) -> None:
        """A number is the timeout in seconds of the default policy."""
        self._policy = policy if isinstance(policy, RetryPolicy) else RetryPolicy(policy)
        self._failures = 0
        self._since = 0.0
        self._reported = -math.inf

    def progressed(self) -> None:
        self._failures = 0

    @property
    def failures(self) -> int:
        return self._failures

    def seconds(self, now: float) -> float:
        """Return the time since the first failure after the last progress; 0 without a failure."""
        return now - self._since if self._failures else 0.0

    def failed(self, now: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up. `now` is a monotonic time."""
        if self._failures == 0:
            self._since = now
        wait = self._policy.wait(self._failures)
        self._failures += 1
        return wait if now + wait - self._since <= self._policy.timeout else None

    def is_report_due(self, now: float) -> bool:
        """Return True if a log line about the failures is due. The next one is due `REPORT_SECONDS` later."""
        if now - self._reported < REPORT_SECONDS:
            return False
        self._reported = now
        return True


async def wait_or_raise(retry: Retry, clock: Clock, error: CorantoError) -> None:
    """Wait before the next attempt of a call, or raise the error if the retry timeout has expired.

    Logs a call that has been retried for five seconds, and then once per minute.
    """
    now = clock.monotonic()
    delay = retry.failed(now)
    if delay is None:
        raise error
    seconds = retry.seconds(now)
    if seconds >= _CALL_SECONDS and retry.is_report_due(now):
        _log.warning("client.waiting", seconds=round(seconds), error=str(error))
    await clock.sleep(delay)
