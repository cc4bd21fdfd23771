"""Automation conditions for what is made of journals."""

from __future__ import annotations

from typing import Any

import dagster as dg


def on_new_content() -> dg.AutomationCondition[Any]:
    """Return the condition of a consumer: run when its journals have grown, one run at a time.

    What comes after a run was requested starts another one when it has ended. `AutomationCondition.eager()` would take
    it for done with the run. Let `build_journal_observation_sensor` report the growth.
    """
    condition = dg.AutomationCondition
    updated = condition.any_deps_updated()
    # An update that is seen together with the request came after it, and must outlast it.
    grown = updated.since(condition.newly_requested() & ~updated)
    return (grown & ~condition.any_deps_missing() & ~condition.in_progress()).with_label("on_new_content")
