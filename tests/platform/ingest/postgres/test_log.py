"""Positions in the log of PostgreSQL."""

from __future__ import annotations

import pytest

from coranto.errors import CorruptData
from coranto.ingest.postgres.log import LogPosition


@pytest.mark.parametrize("text", ["0/16B3748", "0/16B3748+3", "0/16B3748@2", "A/0+12@7"])
def test_a_position_round_trips(text: str) -> None:
    assert str(LogPosition.parse(text)) == text


@pytest.mark.parametrize("text", ["", "0/1+x", "0/1@x", "0/1@2+3", "0/1+-1"])
def test_invalid_positions_are_refused(text: str) -> None:
    with pytest.raises(CorruptData, match="not a position in the log"):
        LogPosition.parse(text)
