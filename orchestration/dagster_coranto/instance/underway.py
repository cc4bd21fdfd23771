"""The runs of a consumer that are under way, whether a sensor, a backfill, automation or a person launched them."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Final, Protocol

import dagster as dg

# Dagster has no public method to list backfills by status, and there may be many.
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus

from dagster_coranto.instance.heartbeat import PRESUMED_DEAD_SECONDS, last_heartbeat

CONSUMER_TAG: Final = "coranto/consumer"
"""The tag of the assets that a consumer maintains: the consumer's name."""
_GRACE_BEFORE_CONSUMING: Final = 12
"""The factor of the time limit for a started run without a first heartbeat, because it may do other work first."""


_FINISHED: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_UNFINISHED: Final = [status for status in dg.DagsterRunStatus if status not in _FINISHED]


class NamedJob(Protocol):
    """A job of any kind, such as `dg.define_asset_job` returns."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Target:
    """The assets that a sensor's runs materialise, or the job without assets that they run."""

    keys: Set[dg.AssetKey]
    job_name: str | None

    @staticmethod
    def of(
        repository: dg.RepositoryDefinition,
        job: NamedJob | None,
        selection: dg.AssetSelection | None,
    ) -> Target:
        """Return the target of a sensor. If it includes a consumer's assets, only these count."""
        if selection is not None:
            keys: Set[dg.AssetKey] = selection.resolve(repository.asset_graph)
        else:
            assert job is not None, "Dagster requires a job or a selection of each sensor"
            keys = _keys_of_job(repository.get_job(job.name))
        graph = repository.asset_graph
        consumed = {key for key in keys if graph.has(key) and CONSUMER_TAG in graph.get(key).tags}
        return Target(consumed or keys, None if keys or job is None else job.name)

    def is_run_by(self, run: dg.DagsterRun, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance) -> bool:
        """Return True if a run materialises any of the assets, or runs the job.

        The run may be from another code location, whose jobs are unknown here. So this checks the planned
        materialisations, which Dagster records when it creates a run.
        """
        if run.asset_selection is not None:
            return not self.keys.isdisjoint(run.asset_selection)
        if run.asset_check_selection:
            return False
        if self.job_name is not None:
            return run.job_name == self.job_name
        if planned := _planned(instance, run):
            return not self.keys.isdisjoint(planned)
        return repository.has_job(run.job_name) and not self.keys.isdisjoint(
            _keys_of_job(repository.get_job(run.job_name))
        )


def runs_under_way(
    instance: dg.DagsterInstance,
    repository: dg.RepositoryDefinition,
    target: Target,
    *,
    presumed_dead_seconds: float = PRESUMED_DEAD_SECONDS,
    wall: Callable[[], float] = time.time,
    warn: Callable[[str], object] = lambda text: None,
) -> list[dg.DagsterRun]:
    """Return the runs of a target that are queued or under way, the oldest first.

    Runs that are presumed dead are omitted. If such a run had a heartbeat, it is marked as failed, and its pool slot is
    freed, because it would block all later runs. If it is still alive, the consumer's fence prevents concurrent
    commits.
    """
    found = []
    records = instance.get_run_records(dg.RunsFilter(statuses=_UNFINISHED), ascending=True)
    for record in records:
        run = record.dagster_run
        if not target.is_run_by(run, repository, instance):
            continue
        if run.status is not dg.DagsterRunStatus.QUEUED:
            alive = last_heartbeat(run)
            seen = alive if alive is not None else _last_event(instance, record)
            silent = wall() - seen
            works = alive is None and run.status is dg.DagsterRunStatus.STARTED
            if silent > presumed_dead_seconds * (_GRACE_BEFORE_CONSUMING if works else 1):
                warn(f"Run {run.run_id} has had no heartbeat or event for {silent:.0f} s; it is presumed dead.")
                if alive is not None:
                    instance.report_run_failed(run, f"The consumer of this run has been silent for {silent:.0f} s.")
                    instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
                continue
        found.append(run)
    return found


def backfill_under_way(instance: dg.DagsterInstance, keys: Set[dg.AssetKey]) -> bool:
    """Return True if a backfill of any of the assets still launches or awaits runs."""
    asked = BulkActionsFilter(statuses=[BulkActionStatus.REQUESTED])
    return any(not keys.isdisjoint(each.asset_selection or ()) for each in instance.get_backfills(filters=asked))


def _keys_of_job(job: dg.JobDefinition) -> Set[dg.AssetKey]:
    return job.asset_layer.selected_asset_keys


def _planned(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[dg.AssetKey]:
    """Return the assets that a run was planned to materialise."""
    found = instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    return {record.asset_key for record in found.records if record.asset_key is not None}


def _last_event(instance: dg.DagsterInstance, record: dg.RunRecord) -> float:
    """Return the time of a run's last event, or of its creation, in seconds since 1970."""
    events = instance.get_records_for_run(record.dagster_run.run_id, limit=1, ascending=False).records
    return max([record.create_timestamp.timestamp(), *(event.timestamp for event in events)])
