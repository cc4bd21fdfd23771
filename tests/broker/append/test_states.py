"""The states of an append, as drawn in the protocol documentation."""

from __future__ import annotations

import re
from pathlib import Path

from coranto_broker.append.states import TRANSITIONS, State

DOCS = Path(__file__).parents[3] / "docs"


def test_the_documented_state_machine_matches_the_code() -> None:
    text = (DOCS / "protocol.md").read_text()
    drawn = {
        (source, target)
        for source, target in re.findall(r"^    (\w+) --> (\w+)", text, re.MULTILINE)
        if "[*]" not in (source, target)
    }
    table = {
        (source.name.lower(), target.name.lower())
        for (source, _), target in TRANSITIONS.items()
        if target is not State.ERROR  # "Every blocking state also ends in *error*."
    }
    assert drawn == table
