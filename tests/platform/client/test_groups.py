"""Groups of journals: their names and selectors."""

from __future__ import annotations

import pytest

from coranto.client.groups import JournalGroup
from coranto.errors import InvalidInput
from coranto.labels import label_set, matches, with_meta


def test_a_group_selects_the_journals_below_its_name_and_no_others() -> None:
    selector = JournalGroup("flights/events").selector
    for name, selected in (
        ("flights/events/one", True),
        ("flights/events/one/two", True),
        ("flights/events", False),
        ("flights/events-of-others/one", False),
    ):
        assert matches(selector, with_meta(name, label_set({}))) is selected, name


def test_a_group_below_a_prefix_has_the_same_journals_there() -> None:
    assert JournalGroup("flights/events").under("rerun/") == JournalGroup("rerun/flights/events")
    assert JournalGroup("flights/events").under("") == JournalGroup("flights/events")
    with pytest.raises(InvalidInput):
        JournalGroup("flights/events").under("rerun")


@pytest.mark.parametrize("name", ["", "flights/", "flights events", "/flights"])
def test_names_that_cannot_contain_journals_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        JournalGroup(name)
