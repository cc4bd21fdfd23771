"""Keeps a watcher's positions, in the transaction that stores the watcher's event.

The triggerer stores an event and calls this before it commits, in its process that has the database. The positions that
the event carries go to the watcher's variable in the same transaction. So the variable always tells the end of the last
stored event, however the triggerer ends: no byte is missing from events, and none is in two.
"""

from __future__ import annotations

import json
from typing import Any

from airflow.providers.common.compat.sdk import hookimpl

from airflow_coranto.offsets import kept_positions


@hookimpl
def on_asset_changed(asset: Any) -> None:
    """Keep the positions of events of this asset that the open transaction stores."""
    from airflow import settings
    from airflow.models.asset import AssetEvent
    from airflow.models.variable import Variable

    sessions = getattr(settings, "Session", None)
    if sessions is None or not sessions.registry.has():  # No database here, or no transaction of this thread.
        return
    session = sessions()
    for event in list(session):
        if isinstance(event, AssetEvent) and (found := kept_positions(event.extra)) is not None:
            variable, positions = found
            Variable.set(variable, json.dumps(positions), session=session)
