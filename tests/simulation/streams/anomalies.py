"""Anomalies that the checkers report."""

from __future__ import annotations

from typing import NamedTuple


class Anomaly(NamedTuple):
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"
