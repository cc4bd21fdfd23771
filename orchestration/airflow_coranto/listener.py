"""Keeps a watcher's positions, in the transaction that stores the watcher's event.

The triggerer stores an event and calls this before it commits, in its process that has the database. The positions that
the event carries go to the watcher's variable in the same transaction. So the variable always tells the end of the last
stored event, however the triggerer ends: no byte is missing from events. Nor is one in two: an event of a watcher that
another has overtaken is stored as growth beyond the last stored event (see `offsets.settle`).
"""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import hookimpl

from airflow_coranto.offsets import MARK, StoredEvent, settle, watched
from airflow_coranto.variables import DESCRIPTION
from coranto.errors import InvalidInput


@hookimpl
def on_asset_changed(asset: Any) -> None:
    """Settle the events of this asset that the open transaction stores, and keep their positions."""
    from airflow import settings
    from airflow.models.asset import AssetEvent
    from airflow.models.variable import Variable

    sessions = getattr(settings, "Session", None)
    if sessions is None or not sessions.registry.has():  # No database here, or no transaction of this thread.
        return
    session = sessions()
    for event in list(session):
        if isinstance(event, AssetEvent) and (payload := watched(event.extra)) is not None:
            variable = payload[MARK]
            settled, kept = settle(payload, _stored(session, variable))
            event.extra = {**(event.extra or {}), "payload": settled}
            Variable.set(variable, kept.to_json(), description=DESCRIPTION, session=session)


def _stored(session: Any, variable: str) -> StoredEvent | None:
    """Return what a variable keeps, and hold its row until the transaction ends: another triggerer waits here."""
    from airflow.models.variable import Variable
    from sqlalchemy import select

    query = select(Variable).where(Variable.key == variable).with_for_update()
    row = session.scalars(query, execution_options={"populate_existing": True}).one_or_none()
    try:
        return StoredEvent.from_json(row.val) if row is not None and row.val else None
    except InvalidInput:  # Somebody has broken it. The event that is being stored makes it whole.
        return None
