"""Evaluations of asset checks in a Dagster instance."""

from __future__ import annotations

import dagster as dg

_PAGE = 20


def last_evaluation(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> dg.AssetCheckEvaluation | None:
    """Return the last evaluation of a check, ignoring later executions that have not ended."""
    cursor: int | None = None
    while records := instance.event_log_storage.get_asset_check_execution_history(check, _PAGE, cursor):
        for record in records:
            event = record.event.dagster_event if record.event is not None else None
            if event is not None and event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
                return event.asset_check_evaluation_data
        cursor = records[-1].id
    return None
