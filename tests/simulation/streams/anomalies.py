"""Anomalies, as the checkers report them."""

from __future__ import annotations

from typing import NamedTuple


class Anomaly(NamedTuple):
    """One promise that was not kept."""

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"
