"""Automation conditions for assets that are derived from journals."""

from __future__ import annotations

from typing import Any, Final

import dagster as dg

_RETRIES: Final = "*/10 * * * *"


def on_new_content() -> dg.AutomationCondition[Any]:
    """Return the condition of a consumer: run when its journals have grown, one run at a time.

    Content that arrives after a run was requested starts another run when the first run has ended.
    `AutomationCondition.eager()` would count this content as processed by the first run. Failed runs are retried every
    ten minutes. Let `build_journal_observation_sensor` report the growth.
    """
    condition = dg.AutomationCondition
    updated = condition.any_deps_updated()
    # An update seen together with the request came after it, so it must trigger another run.
    grown = updated.since(condition.newly_requested() & ~updated)
    again = condition.execution_failed() & condition.cron_tick_passed(_RETRIES)
    return ((grown | again) & ~condition.any_deps_missing() & ~condition.in_progress()).with_label("on_new_content")
