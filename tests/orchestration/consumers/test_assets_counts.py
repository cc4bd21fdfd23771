"""The counts in a consumer's materialisation."""

from __future__ import annotations

from typing import Any

from coranto.fragments.windows import Span, Window
from coranto_consumers.spark import ConsumeReport, WindowReport
from dagster_coranto.consumers.consumption import consumer_metadata
from dagster_coranto.windows.assets import window_metadata


def counts(metadata: dict[str, Any]) -> list[int]:
    return [value for value in metadata.values() if type(value) is int]


def test_metadata_counts_messages_without_acknowledgements() -> None:
    """The run read a thousand messages of two publishers, and their two acknowledgements."""
    report = ConsumeReport(1, 1000, 1002, 0, {"a": 7}, {"a": 7}, 0, 3)
    window = Window(1, 1, {"a": Span(0, 7, 1, "c1")}, 1.0)
    for metadata in (consumer_metadata(report), window_metadata(window, WindowReport(window, 1000, 1002, 3))):
        found = counts(dict(metadata))
        assert 1000 in found
        assert 1002 not in found
