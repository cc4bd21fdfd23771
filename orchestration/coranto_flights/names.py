"""Names that every part of the demo gives to what it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).with_name("journals.yaml")
"""The specs of the journals."""
TABLE: Final = "carrier_delays"
"""The SQL table of the carriers' delays, and its asset."""


def consumer_name(prefix: str) -> str:
    """Return the name of the consumer of flights below `prefix`. Its fence and checkpoint are kept under this name."""
    return f"{prefix}carrier-delays"
