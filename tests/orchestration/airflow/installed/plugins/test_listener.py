"""The listener with Airflow's real database: a watcher's positions and its event are stored atomically."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from airflow.assets.manager import AssetManager
from airflow.listeners.listener import get_listener_manager
from airflow.models.asset import AssetActive, AssetEvent, AssetModel
from airflow.models.variable import Variable
from airflow.utils.session import create_session
from sqlalchemy import delete, select

from airflow_coranto.offsets import MARK, StoredEvent
from airflow_coranto.plugins import listener

pytestmark = pytest.mark.usefixtures("database")
NAME = f"{MARK}.events"
URI = "journal://prod/flights/events"
OTHER = "journal://staging/flights/events"
JOURNAL = "flights/events/0"


def payload(event: int, after: int, begin: int, head: int) -> dict[str, Any]:
    return {
        "group": "flights/events",
        "bytes": head - begin,
        "since": {JOURNAL: begin},
        "heads": {JOURNAL: head},
        "positions": {JOURNAL: [7, head]},
        "event": str(event),
        "after": str(after),
        MARK: NAME,
    }


class Crash(Exception):
    """The triggerer dies before it commits."""


def as_registered(asset: AssetModel) -> Any:
    """Return an asset in the form that the triggerer registers, which differs in Airflow 3.1."""
    return asset.to_serialized() if hasattr(asset, "to_serialized") else asset.to_public()


def store_event(*event: int, uris: Sequence[str] = (URI,), crash: bool = False) -> None:
    """Store an event of assets, in one transaction, as the triggerer does (`Trigger.submit_event`)."""
    payloads = payload(*event)
    with create_session() as session:
        for uri in uris:
            asset = session.scalars(select(AssetModel).where(AssetModel.uri == uri)).one()
            extra = {"from_trigger": True, "payload": payloads}
            AssetManager.register_asset_change(asset=as_registered(asset), extra=extra, session=session)
        if crash:
            raise Crash


def kept() -> tuple[list[tuple[int, int, int]], Any]:
    """Return begin, end and bytes of stored events, and the positions in the variable."""
    with create_session() as session:
        payloads = [event.extra["payload"] for event in session.scalars(select(AssetEvent).order_by(AssetEvent.id))]
        variable = session.scalars(select(Variable).where(Variable.key == NAME)).one_or_none()
        stored = StoredEvent.from_json(variable.val).positions if variable is not None and variable.val else None
        return [(each["since"][JOURNAL], each["heads"][JOURNAL], each["bytes"]) for each in payloads], stored


@pytest.fixture(autouse=True)
def asset() -> None:
    with create_session() as session:
        for model in (AssetEvent, AssetActive, AssetModel, Variable):
            session.execute(delete(model))
        for uri in (URI, OTHER):
            session.add(AssetModel(name=uri, uri=uri))
            session.add(AssetActive(name=uri, uri=uri))


def test_the_plugin_registers_the_listener() -> None:
    assert listener in get_listener_manager().pm.get_plugins()


def test_positions_are_stored_with_their_event() -> None:
    store_event(1, 0, 0, 5)
    assert kept() == ([(0, 5, 5)], {JOURNAL: [7, 5]})
    store_event(2, 1, 5, 9)
    assert kept() == ([(0, 5, 5), (5, 9, 4)], {JOURNAL: [7, 9]})


def test_a_crash_before_the_commit_stores_neither() -> None:
    store_event(1, 0, 0, 5)
    with pytest.raises(Crash):
        store_event(2, 1, 5, 9, crash=True)
    assert kept() == ([(0, 5, 5)], {JOURNAL: [7, 5]})


def test_two_running_triggerers_repeat_no_byte() -> None:
    store_event(1, 0, 0, 5)
    store_event(2, 1, 5, 9)  # By the new triggerer.
    store_event(3, 1, 5, 12)  # By the triggerer that was considered dead.
    store_event(4, 2, 9, 12)
    assert kept() == ([(0, 5, 5), (5, 9, 4), (9, 12, 3), (12, 12, 0)], {JOURNAL: [7, 12]})


def test_an_event_loaded_in_a_session_is_not_changed() -> None:
    store_event(1, 0, 0, 5)
    store_event(2, 1, 5, 9)
    with create_session() as session:
        loaded = session.scalars(select(AssetEvent)).all()
        other = session.scalars(select(AssetModel).where(AssetModel.uri == OTHER)).one()
        AssetManager.register_asset_change(asset=as_registered(other), extra={}, session=session)
        assert len(loaded) == 2
        session.delete(session.scalars(select(AssetEvent).where(AssetEvent.asset_id == other.id)).one())
    assert kept() == ([(0, 5, 5), (5, 9, 4)], {JOURNAL: [7, 9]})


def test_assets_with_the_same_watcher_get_the_same_event() -> None:
    store_event(1, 0, 0, 5)
    store_event(3, 0, 0, 12, uris=(URI, OTHER))
    assert kept() == ([(0, 5, 5), (5, 12, 7), (5, 12, 7)], {JOURNAL: [7, 12]})


def test_the_next_event_repairs_a_damaged_variable() -> None:
    Variable.set(NAME, "nonsense")
    store_event(2, 1, 5, 9)
    assert kept() == ([(5, 9, 4)], {JOURNAL: [7, 9]})


def test_other_events_change_no_variable() -> None:
    Variable.set("admin_password", "unchanged")
    with create_session() as session:
        asset = session.scalars(select(AssetModel).where(AssetModel.uri == URI)).one()
        extra = {"payload": {**payload(1, 0, 0, 5), MARK: "admin_password"}}
        AssetManager.register_asset_change(asset=as_registered(asset), extra=extra, session=session)
    assert Variable.get("admin_password") == "unchanged"
