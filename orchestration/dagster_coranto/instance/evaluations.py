"""Evaluations of asset checks that a Dagster instance remembers."""

from __future__ import annotations

import dagster as dg
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

_ENDED = {AssetCheckExecutionRecordStatus.SUCCEEDED, AssetCheckExecutionRecordStatus.FAILED}


def last_evaluation(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> dg.AssetCheckEvaluation | None:
    """Return the last evaluation of a check, however many executions have begun since and not ended."""
    for record in instance.event_log_storage.get_asset_check_execution_history(check, limit=1, status=_ENDED):
        event = record.event.dagster_event if record.event is not None else None
        if event is not None:
            return event.asset_check_evaluation_data
    return None
