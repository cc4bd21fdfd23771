"""Positions as a watcher keeps them, and the events that carry them."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_coranto.offsets import MARK, event_of, from_kept, kept_positions, to_kept, variable_name
from coranto.client.positions import JournalPosition, grown_bytes
from coranto.errors import InvalidInput

BEFORE = {"a/0": JournalPosition(10, 3), "a/1": JournalPosition(20, 4)}
NOW = {"a/0": JournalPosition(15, 3), "a/1": JournalPosition(7, 9), "a/2": JournalPosition(5, 11)}


def test_positions_come_back_from_what_is_kept() -> None:
    assert from_kept(to_kept(BEFORE)) == BEFORE


@pytest.mark.parametrize("kept", [{"a/0": 7}, {"a/0": [1]}, {"a/0": ["x", "y"]}, ["a"]])
def test_what_is_no_position_is_refused(kept: Any) -> None:
    with pytest.raises(InvalidInput, match="positions"):
        from_kept(kept)


def test_growth_counts_new_journals_and_those_that_were_made_anew() -> None:
    assert grown_bytes(NOW, BEFORE) == 5 + 7 + 5
    assert grown_bytes(BEFORE, BEFORE) == 0
    assert grown_bytes({}, BEFORE) == 0


def test_an_event_carries_the_positions_of_its_watcher() -> None:
    variable = variable_name("", {"group": "a"})
    event = event_of("a", variable, BEFORE, NOW, 17)
    assert (event["since"], event["bytes"]) == ({"a/0": 10, "a/1": 20}, 17)
    assert kept_positions({"from_trigger": True, "payload": event}) == (variable, to_kept(NOW))


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
    ],
)
def test_events_of_others_name_no_variable(payload: Any) -> None:
    assert kept_positions({"payload": payload}) is None
    assert kept_positions(None) is None


def test_the_variable_belongs_to_the_name_or_to_all_arguments() -> None:
    assert variable_name("alerts", {"group": "a"}) == variable_name("alerts", {"group": "b"}) == f"{MARK}.alerts"
    one, other = variable_name("", {"group": "a/b", "interval": 1}), variable_name("", {"group": "a/b", "interval": 2})
    assert one != other
    assert one.startswith(f"{MARK}.a_b.")
