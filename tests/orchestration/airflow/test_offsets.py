"""Positions stored by a watcher, and events with positions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_coranto.offsets import (
    MARK,
    StoredEvent,
    event_of,
    from_stored,
    reconcile_event,
    to_stored,
    variable_name,
    watcher_payload,
)
from coranto.client.positions import JournalPosition, grown_bytes
from coranto.errors import InvalidInput

BEFORE = {"a/0": JournalPosition(10, 3), "a/1": JournalPosition(20, 4)}
NOW = {"a/0": JournalPosition(15, 3), "a/1": JournalPosition(7, 9), "a/2": JournalPosition(5, 11)}


def test_stored_positions_are_restored() -> None:
    for positions in (BEFORE, {"a/0": JournalPosition(10, 3, "b0-3")}):
        assert from_stored(to_stored(positions)) == positions


@pytest.mark.parametrize("state", [{"a/0": 7}, {"a/0": [1]}, {"a/0": ["x", "y"]}, ["a"]])
def test_invalid_positions_are_refused(state: Any) -> None:
    with pytest.raises(InvalidInput, match="positions"):
        from_stored(state)


def test_growth_counts_new_and_recreated_journals() -> None:
    assert grown_bytes(NOW, BEFORE) == 5 + 7 + 5
    assert grown_bytes(BEFORE, BEFORE) == 0
    assert grown_bytes({}, BEFORE) == 0


def test_an_id_identifies_a_journal_for_any_etcd_revision() -> None:
    before = {"a/0": JournalPosition(10, 3, "b0-3")}
    applied_again = {"a/0": JournalPosition(15, 9, "b0-3")}
    recreated = {"a/0": JournalPosition(15, 3, "b1-3")}
    assert grown_bytes(applied_again, before) == 5
    assert grown_bytes(recreated, before) == 15
    event = event_of("a", f"{MARK}.a", "e1", before, recreated, 15)
    assert event["since"] == {"a/0": 0}
    assert watcher_payload({"payload": event}) == event


def test_an_event_has_the_positions_of_its_watcher() -> None:
    variable = variable_name("", {"group": "a"})
    event = event_of("a", variable, "e1", BEFORE, NOW, 17)
    assert (event["since"], event["bytes"], event["after"]) == ({"a/0": 10, "a/1": 0}, 17, "e1"), "a/1 was recreated"
    assert watcher_payload({"from_trigger": True, "payload": event}) == event
    assert event["event"] != event_of("a", variable, "e1", BEFORE, NOW, 17)["event"]


def test_an_event_after_the_last_stored_one_is_stored_unchanged() -> None:
    event = event_of("a", f"{MARK}.a", "e1", BEFORE, NOW, 17)
    for stored in (StoredEvent("e1", to_stored(BEFORE)), None):
        reconciled, state = reconcile_event(event, stored)
        assert reconciled == {name: value for name, value in event.items() if name != "after"}
        assert watcher_payload({"payload": reconciled}) is None, "a reloaded event is not reconciled again"
        assert state == StoredEvent(event["event"], to_stored(NOW), event["since"], 17)
        assert StoredEvent.from_json(state.to_json()) == state
        assert reconcile_event(event, state) == (reconciled, state)  # Another asset has the same watcher.


def test_an_event_of_an_overtaken_watcher_becomes_the_growth_after_the_stored_event() -> None:
    begin = StoredEvent("e1", to_stored(BEFORE))
    ahead = {"a/0": JournalPosition(12, 3), "a/1": JournalPosition(9, 9)}
    _, stored = reconcile_event(event_of("a", f"{MARK}.a", "e1", BEFORE, ahead, 11), begin)
    late = event_of("a", f"{MARK}.a", "e1", BEFORE, NOW, 17)
    reconciled, state = reconcile_event(late, stored)
    assert (reconciled["since"], reconciled["bytes"]) == ({"a/0": 12, "a/1": 9}, 3 + 5)
    assert reconciled["heads"] == {"a/0": 15, "a/1": 9, "a/2": 5}
    assert state.positions == reconciled["positions"]
    # The other watcher continues after its own event, and repeats nothing.
    again, _ = reconcile_event(event_of("a", f"{MARK}.a", stored.event, ahead, NOW, 10), state)
    assert (again["bytes"], again["since"]) == (0, again["heads"])


def test_events_and_variables_contain_the_ids_of_journals() -> None:
    now = {"a/0": JournalPosition(8, 5, "c1-5"), "a/1": JournalPosition(9, 3, "c1-3")}
    before = {"a/0": JournalPosition(7, 3, "c1-3"), "a/1": JournalPosition(4, 3, "c1-3")}
    event = json.loads(json.dumps(event_of("a", f"{MARK}.a", "e1", before, now, 13)))
    assert event["since"] == {"a/0": 0, "a/1": {"offset": 4, "journal_id": "c1-3"}}
    assert event["heads"] == {
        "a/0": {"offset": 8, "journal_id": "c1-5"},
        "a/1": {"offset": 9, "journal_id": "c1-3"},
    }
    assert watcher_payload({"payload": event}) == event
    reconciled, state = reconcile_event(event, None)
    assert (reconciled["since"], reconciled["heads"]) == (event["since"], event["heads"])
    assert reconcile_event(event, StoredEvent.from_json(state.to_json()))[0] == reconciled
    assert watcher_payload({"payload": {**event, "since": {"a/0": "7"}}}) is None


def test_positions_stored_by_an_early_version_are_read() -> None:
    assert StoredEvent.from_json('{"positions": [3, 7]}') == StoredEvent("", {"positions": [3, 7]})
    with pytest.raises(InvalidInput, match="delete the variable"):
        StoredEvent.from_json('{"positions": {"a": 7}}')
    with pytest.raises(InvalidInput, match="delete the variable"):
        StoredEvent.from_json("[]")


@pytest.mark.parametrize(
    "payload",
    [
        None,
        "text",
        {},
        {MARK: "admin_password", "positions": {}},
        {MARK: f"{MARK}.x", "positions": []},
        {MARK: f"{MARK}.x", "positions": {"a": 7}},
        {MARK: f"{MARK}.x", "positions": {"a": [1, "2"]}},
        {MARK: 7, "positions": {}},
        {MARK: f"{MARK}.x", "positions": {}, "since": {}, "bytes": "many", "event": "1", "after": ""},
        {MARK: f"{MARK}.x", "positions": {}, "since": {}, "bytes": 1, "after": ""},
    ],
)
def test_other_events_name_no_variable(payload: Any) -> None:
    assert watcher_payload({"payload": payload}) is None
    assert watcher_payload(None) is None


def test_the_variable_depends_on_the_name_or_on_all_arguments() -> None:
    assert variable_name("alerts", {"group": "a"}) == variable_name("alerts", {"group": "b"}) == f"{MARK}.alerts"
    one, other = variable_name("", {"group": "a/b", "interval": 1}), variable_name("", {"group": "a/b", "interval": 2})
    assert one != other
    assert one.startswith(f"{MARK}.a_b.")
