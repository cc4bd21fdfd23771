"""A sensor that calls a user's function for each failed asset check, for example to send an e-mail."""

import json
from collections.abc import Callable, Iterable

import dagster as dg

from coranto.errors import InvalidInput

AlertFunction = Callable[[dg.SensorEvaluationContext, dg.AssetCheckEvaluation], object]


def build_failed_check_sensor(
    alert: AlertFunction,
    *,
    name: str = "alert_on_failed_checks",
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    assets: Iterable[dg.AssetKey] | None = None,
    minimum_interval_seconds: int = 30,
    default_sensor_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """Return a sensor that calls `alert` once for each failed evaluation of a check.

    Only the latest evaluation between two ticks counts. `severity` ERROR excludes warnings. `assets` limits the sensor
    to checks of these assets. Checks that failed before the sensor was first started are ignored; failures while it is
    stopped are reported when it starts again. If `alert` raises an error, the tick fails, and the next tick calls it
    again. So an alert is never lost, but may be repeated. Raises InvalidInput for an interval below 1 s.
    """
    if minimum_interval_seconds < 1:
        raise InvalidInput(f"{minimum_interval_seconds} s is below 1 s", field="minimum_interval_seconds")
    wanted = None if assets is None else frozenset(assets)

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_sensor_status,
        description="Alerts when an asset check fails.",
    )
    def failed_checks(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        first = not context.cursor
        alerted: dict[str, int] = json.loads(context.cursor) if context.cursor else {}
        started = context.last_sensor_start_time or 0.0
        graph = context.repository_def.asset_graph if context.repository_def is not None else None
        checks = graph.asset_check_keys if graph is not None else ()
        keys = [key for key in checks if wanted is None or key.asset_key in wanted]
        latest = context.instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
        failed: dict[str, int] = {}
        alerts = 0
        for key, record in latest.items():
            event = record.event.dagster_event if record.event is not None else None
            if event is None or event.event_type is not dg.DagsterEventType.ASSET_CHECK_EVALUATION:
                continue  # The check is planned, or running.
            evaluation = event.asset_check_evaluation_data
            if evaluation.passed:
                continue
            if severity is dg.AssetCheckSeverity.ERROR and evaluation.severity is not severity:
                continue
            name_of = key.to_user_string()
            failed[name_of] = record.id
            if alerted.get(name_of) == record.id or (first and record.create_timestamp < started):
                continue
            alert(context, evaluation)
            alerts += 1
            context.update_cursor(json.dumps({**alerted, **failed}))
        context.update_cursor(json.dumps(failed))
        return dg.SkipReason(f"{len(failed)} of {len(keys)} checks fail, {alerts} of them newly.")

    return failed_checks
