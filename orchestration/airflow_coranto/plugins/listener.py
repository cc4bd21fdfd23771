"""Listener that stores a watcher's positions in the transaction of the watcher's event.

The triggerer stores an event and calls the listener before it commits, in its process with database access. The
listener writes the event's positions to the watcher's variable in the same transaction. So the variable always has the
end of the last stored event, even after a crash: no byte is missing from events. No byte is in two events either: if
two watchers are active, the later event is stored as growth beyond the last stored event (`offsets.reconcile_event`).
"""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import hookimpl

from airflow_coranto.offsets import MARK, StoredEvent, reconcile_event, watcher_payload
from airflow_coranto.variables import DESCRIPTION
from coranto.errors import InvalidInput


@hookimpl
def on_asset_changed(asset: Any) -> None:
    """Reconcile the asset events in the open transaction, and store their positions."""
    from airflow import settings
    from airflow.models.asset import AssetEvent
    from airflow.models.variable import Variable

    sessions = getattr(settings, "Session", None)
    if sessions is None or not sessions.registry.has():  # No database here, or no transaction of this thread.
        return
    session = sessions()
    stored: list[Any] = [each for each in session if isinstance(each, AssetEvent)]
    for event in stored:
        if (payload := watcher_payload(event.extra)) is not None:
            row = _row(session, payload[MARK])
            reconciled, state = reconcile_event(payload, _stored(row))
            event.extra = {**(event.extra or {}), "payload": reconciled}
            if row is not None:
                row.set_val(state.to_json())
            else:
                Variable.set(payload[MARK], state.to_json(), description=DESCRIPTION, session=session)


def _row(session: Any, variable: str) -> Any:
    """Return a variable's row, or None. The row is locked until the transaction ends, so other triggerers wait."""
    from airflow.models.variable import Variable
    from sqlalchemy import select

    query = select(Variable).where(Variable.key == variable).with_for_update()
    return session.scalars(query, execution_options={"populate_existing": True}).one_or_none()


def _stored(row: Any) -> StoredEvent | None:
    """Return the event in a variable's row. None if the row is missing or invalid; the new event replaces it then."""
    try:
        return StoredEvent.from_json(row.val) if row is not None and row.val else None
    except InvalidInput:
        return None
