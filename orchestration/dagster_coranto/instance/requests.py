"""Runs that a sensor has requested, and the decision to request another one for the same purpose."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import dagster as dg

from dagster_coranto.instance.tags import RUN_KEY, SENSOR

REQUEST_TAG: Final = "coranto/request"
"""The tag of a requested run: a digest of its purpose, and of the sensor's generation."""
_MAX_BACKOFF_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The runs that a sensor has requested for one purpose, the newest first."""

    records: Sequence[dg.RunRecord]

    def due(self, interval_seconds: float) -> float | None:
        """Return the earliest time of another run, in seconds since 1970. None if none is needed.

        A run that was never created, or was deleted, is requested again immediately (0). A failed run is retried after
        `backoff_seconds`. No run is needed while one is under way, or after it has succeeded or was canceled.
        """
        if not self.records:
            return 0.0
        failed = failed_at(self.records[0])
        return None if failed is None else failed + backoff_seconds(self.failures, interval_seconds)

    @property
    def failures(self) -> int:
        """The number of consecutive failed runs."""
        failed = [record.dagster_run.status is dg.DagsterRunStatus.FAILURE for record in self.records]
        return failed.index(False) if False in failed else len(failed)


class Requests:
    """The runs that a sensor requests. Each has a purpose, which a tag identifies.

    The sensor's cursor is its generation. "Reset cursor" starts a new generation, and every purpose gets a new run.
    """

    def __init__(self, context: dg.SensorEvaluationContext, sensor: str) -> None:
        self._instance = context.instance
        self._sensor = sensor
        self._generation = context.cursor or str(time.time_ns())
        if not context.cursor:
            context.update_cursor(self._generation)

    def histories(self, purposes: Iterable[str]) -> dict[str, RunHistory]:
        """Return the runs of this generation for each purpose, by one query."""
        tags = {purpose: self._tag(purpose) for purpose in purposes}
        found: dict[str, list[dg.RunRecord]] = defaultdict(list)
        if tags:
            asked = dg.RunsFilter(tags={REQUEST_TAG: list(tags.values()), SENSOR: self._sensor})
            for record in self._instance.get_run_records(asked):
                found[record.dagster_run.tags[REQUEST_TAG]].append(record)
        return {purpose: RunHistory(found[tag]) for purpose, tag in tags.items()}

    def request(
        self, purpose: str, *, partition_key: str | None = None, tags: Mapping[str, str] | None = None
    ) -> dg.RunRequest:
        """Return the request of a run for a purpose."""
        return dg.RunRequest(
            run_key=unused_run_key(self._instance, self._sensor, purpose),
            partition_key=partition_key,
            tags={**(tags or {}), REQUEST_TAG: self._tag(purpose)},
        )

    def _tag(self, purpose: str) -> str:
        return digest_of(f"{self._generation}/{purpose}")


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The state of the last run that a sensor requested with a key, and the backoff before the next run."""

    run: dg.DagsterRun | None
    """The run. None if it was deleted, was never created, or if there was no request."""
    failures: int
    """The number of consecutive failed runs, including this one."""
    seconds: float
    """The seconds until a failed run may be retried; 0 if it may be retried now, or if the run did not fail."""

    @staticmethod
    def of(instance: dg.DagsterInstance, sensor: str, run_key: str, failures: int, interval: float) -> FollowUp:
        """Return the state of the run with a key. `failures` is the number of consecutive failed runs before it."""
        latest = latest_run(instance, sensor, run_key) if run_key else None
        failed = failed_at(latest) if latest is not None else None
        run = latest.dagster_run if latest is not None else None
        if failed is None:
            return FollowUp(run, 0, 0.0)
        left = failed + backoff_seconds(failures + 1, interval) - time.time()
        return FollowUp(run, failures + 1, max(0.0, left))

    @property
    def skip_reason(self) -> str:
        """The reason to wait after a failed run; empty if none is needed."""
        if not self.seconds:
            return ""
        return f"The last runs have failed ({self.failures} in a row); the next one follows in {self.seconds:.0f} s."


def unused_run_key(instance: dg.DagsterInstance, sensor: str, purpose: str) -> str:
    """Return a run key that the sensor has not used: the purpose, with a number if it was used.

    Dagster launches at most one run per key, whatever its outcome.
    """
    number, key = 0, purpose
    while latest_run(instance, sensor, key) is not None:
        number += 1
        key = f"{purpose}:{number}"
    return key


def latest_run(instance: dg.DagsterInstance, sensor: str, run_key: str) -> dg.RunRecord | None:
    """Return a sensor's latest run with a key. Sensors of several consumers of the same journals have the same keys."""
    records = instance.get_run_records(dg.RunsFilter(tags={RUN_KEY: run_key, SENSOR: sensor}), limit=1)
    return records[0] if records else None


def failed_at(record: dg.RunRecord) -> float | None:
    """Return the time of a run's failure, in seconds since 1970. None if it has not failed or Dagster retries it."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.FAILURE or run.is_complete_and_waiting_to_retry:
        return None
    return record.end_time or record.update_timestamp.timestamp()


def backoff_seconds(failures: int, interval_seconds: float) -> float:
    """Return the backoff in seconds after failed runs. It doubles with each failure, up to half an hour."""
    return float(min(_MAX_BACKOFF_SECONDS, interval_seconds * 2.0 ** min(failures - 1, 30)))


def digest_of(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
