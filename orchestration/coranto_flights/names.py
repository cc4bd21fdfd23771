"""Names that all parts of the demo use."""

from __future__ import annotations

from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).with_name("journals.yaml")
"""The specs of the journals."""
TABLE: Final = "carrier_delays"
"""The SQL table of the carriers' delays, and its asset."""


LAKE: Final = "flights_lake"
"""The asset of the Iceberg table of all flights."""
NAMESPACE: Final = "demo"
"""The namespace of Iceberg tables."""


def lake_table(table: str) -> str:
    """Return the name of the Iceberg table for the SQL table `table`, which begins with `TABLE`."""
    return f"flights{table.removeprefix(TABLE)}"


def lake_consumer_name(prefix: str) -> str:
    """Return the name of the consumer that copies flights below `prefix` into the lake."""
    return f"{prefix}flights-lake"


def consumer_name(prefix: str) -> str:
    """Return the name of the consumer of flights below `prefix`. Its fence and checkpoint are kept under this name."""
    return f"{prefix}carrier-delays"
