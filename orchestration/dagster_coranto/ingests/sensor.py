"""A sensor that runs an ingest: it reports the lag, and requests a run when rows wait in the source."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import Final, cast

import dagster as dg
from pydantic import BaseModel

from coranto.errors import ClusterError, Unavailable
from dagster_coranto.ingests.assets import INGESTS
from dagster_coranto.ingests.definition import IngestState
from dagster_coranto.ingests.freshness import FRESH, FRESH_SECONDS, evaluate_freshness
from dagster_coranto.instance.heartbeat import PRESUMED_DEAD_SECONDS
from dagster_coranto.instance.requests import FollowUp, unused_run_key
from dagster_coranto.instance.underway import NamedJob, Target, runs_under_way
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import initialize_resource
from dagster_coranto.translation.metadata import namespaced

REPORT_SECONDS: Final = 60.0


class IngestSensorCursor(BaseModel, frozen=True):
    """The last requested run with the lag at that time, and the last report."""

    run_key: str = ""
    failures: int = 0
    lag: int = 0
    reported: str = ""
    reported_at: float = 0.0


def build_ingest_sensor(
    ingest: dg.AssetsDefinition,
    *,
    journals: JournalResource,
    job: NamedJob | None = None,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    report_seconds: float = REPORT_SECONDS,
    fresh_seconds: float | None = FRESH_SECONDS,
    default_sensor_status: dg.DefaultSensorStatus | None = None,
    wall: Callable[[], float] = time,
) -> dg.SensorDefinition:
    """Return a sensor that requests a run of an ingest's asset, or of `job`, when rows wait in the source.

    At most one run is under way at a time. Failed runs are retried after a backoff that doubles with each failure, up
    to half an hour. After a canceled run, the next run starts when the lag is larger than before. If the lag has
    changed, it is reported as an observation, at most every `report_seconds`, with the check `is_fresh` unless
    `fresh_seconds` is None. While the cluster or the source does not answer, ticks are skipped.
    """
    definition = INGESTS.of(ingest)
    sensor_name = name or f"ingest_{definition.names.name.replace('-', '_')}_sensor"
    target = None if job is not None else dg.AssetSelection.assets(definition.key)

    def events(context: dg.SensorEvaluationContext, state: IngestState) -> list[dg.AssetObservation]:
        observed = dg.AssetObservation(
            definition.key, metadata=state.metadata(), tags={"dagster/data_version": state.version}
        )
        if fresh_seconds is None:
            return [observed]
        passed, description = evaluate_freshness(context.instance, definition.key, state, fresh_seconds)
        verdict = dg.AssetCheckEvaluation(
            asset_key=definition.key,
            check_name=FRESH,
            passed=passed,
            description=description,
            metadata=namespaced({"lag": state.lag}),
        )
        return [observed, cast(dg.AssetObservation, verdict)]

    @dg.sensor(
        name=sensor_name,
        job=cast(dg.JobDefinition | None, job),
        target=target,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_sensor_status or dg.DefaultSensorStatus.RUNNING,
        description=f"Requests a run when rows wait in the source of {definition.names.name}, one at a time.",
    )
    def ingest_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        before = IngestSensorCursor.model_validate_json(context.cursor) if context.cursor else IngestSensorCursor()
        try:
            state = definition.state(initialize_resource(journals))
        except (ClusterError, Unavailable) as error:
            return dg.SkipReason(f"The lag is unknown: {error}")
        now, found, cursor = wall(), [], before
        # Freshness changes over time only while rows wait.
        shown = f"{state.digest}/{now // report_seconds if state.lag else 0:.0f}"
        if shown != before.reported and not 0 <= now - before.reported_at < report_seconds:
            found = events(context, state)
            cursor = before.model_copy(update={"reported": shown, "reported_at": now})
        reason, last = _reason(context, before, state)
        if reason:
            return dg.SensorResult(skip_reason=reason, asset_events=found, cursor=cursor.model_dump_json())
        run_key = unused_run_key(context.instance, sensor_name, state.digest)
        cursor = cursor.model_copy(update={"run_key": run_key, "failures": last.failures, "lag": state.lag})
        return dg.SensorResult(
            run_requests=[dg.RunRequest(run_key=run_key)], asset_events=found, cursor=cursor.model_dump_json()
        )

    def _reason(
        context: dg.SensorEvaluationContext, before: IngestSensorCursor, state: IngestState
    ) -> tuple[str, FollowUp]:
        """Return the reason to request no run (empty to request one), and the state of the last run."""
        last = FollowUp.of(context.instance, sensor_name, before.run_key, before.failures, minimum_interval_seconds)
        if (repository := context.repository_def) is not None:
            under_way = runs_under_way(
                context.instance,
                repository,
                Target.of(repository, job, target),
                presumed_dead_seconds=PRESUMED_DEAD_SECONDS,
                warn=context.log.warning,
            )
            if under_way:
                return f"Run {under_way[0].run_id} is under way; {state.lag} rows or bytes wait.", last
        if last.seconds:
            return last.skip_reason, last
        if not state.lag:
            return "The source has no more rows.", last
        if last.run is not None and last.run.status is dg.DagsterRunStatus.CANCELED and state.lag <= before.lag:
            return f"The last run was canceled. The next one follows when more than {before.lag} wait.", last
        return "", last

    return ingest_sensor
