"""The listener on Airflow's real database: a watcher's positions are stored with its event, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.assets.manager import AssetManager
from airflow.listeners.listener import get_listener_manager
from airflow.models.asset import AssetActive, AssetEvent, AssetModel
from airflow.models.variable import Variable
from airflow.utils.session import create_session
from sqlalchemy import delete, select

from airflow_coranto import listener
from airflow_coranto.offsets import MARK

pytestmark = pytest.mark.usefixtures("database")
NAME = f"{MARK}.events"
URI = "journal://prod/flights/events"


def payload(head: int) -> dict[str, Any]:
    return {"group": "flights/events", "positions": {"flights/events/0": [7, head]}, MARK: NAME}


class Crash(Exception):
    """The triggerer dies before it commits."""


def as_registered(asset: AssetModel) -> Any:
    """Return an asset as the triggerer registers its changes: Airflow 3.1 has another form of it."""
    return asset.to_serialized() if hasattr(asset, "to_serialized") else asset.to_public()


def store_event(head: int, *, crash: bool = False) -> None:
    """Store an event of the asset, in one transaction, as the triggerer does (`Trigger.submit_event`)."""
    with create_session() as session:
        asset = session.scalars(select(AssetModel).where(AssetModel.uri == URI)).one()
        extra = {"from_trigger": True, "payload": payload(head)}
        AssetManager.register_asset_change(asset=as_registered(asset), extra=extra, session=session)
        if crash:
            raise Crash


def kept() -> tuple[list[int], Any]:
    """Return the heads of stored events, and the positions in the variable."""
    with create_session() as session:
        events = [
            event.extra["payload"]["positions"]["flights/events/0"][1] for event in session.scalars(select(AssetEvent))
        ]
        variable = session.scalars(select(Variable).where(Variable.key == NAME)).one_or_none()
        return events, json.loads(variable.val) if variable is not None and variable.val else None


@pytest.fixture(autouse=True)
def asset() -> None:
    with create_session() as session:
        for model in (AssetEvent, AssetActive, AssetModel, Variable):
            session.execute(delete(model))
        session.add(AssetModel(name=URI, uri=URI))
        session.add(AssetActive(name=URI, uri=URI))


def test_the_plugin_brings_the_listener() -> None:
    assert listener in get_listener_manager().pm.get_plugins()


def test_positions_are_stored_with_their_event() -> None:
    store_event(5)
    assert kept() == ([5], {"flights/events/0": [7, 5]})
    store_event(9)
    assert kept() == ([5, 9], {"flights/events/0": [7, 9]})


def test_a_crash_before_the_commit_stores_neither() -> None:
    store_event(5)
    with pytest.raises(Crash):
        store_event(9, crash=True)
    assert kept() == ([5], {"flights/events/0": [7, 5]})


def test_events_of_others_touch_no_variable() -> None:
    Variable.set("admin_password", "unchanged")
    with create_session() as session:
        asset = session.scalars(select(AssetModel).where(AssetModel.uri == URI)).one()
        extra = {"payload": {MARK: "admin_password", "positions": {}}}
        AssetManager.register_asset_change(asset=as_registered(asset), extra=extra, session=session)
    assert Variable.get("admin_password") == "unchanged"
