"""docs/operations.md describes the current broker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coranto.wire import protocol_pb2 as pb
from coranto_broker.authorization import RULES
from coranto_broker.http.gateway import METHODS
from coranto_broker.metrics import WATCHED, Metrics
from coranto_broker.settings import BrokerSettings
from tools.settings_table import table

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def operations() -> str:
    return (DOCS / "operations.md").read_text()


def test_the_sites_table_of_settings_is_current() -> None:
    lines = ["| setting | default | |", "|---|---|---|"]
    for name, field in BrokerSettings.model_fields.items():
        default = field.get_default()
        shown = "" if default in (None, "") or name in BrokerSettings.secrets() else f"`{plain(default)}`"
        lines.append(f"| `{name}` | {shown} | {field.description} |")
    assert table("coranto_broker.settings").splitlines() == lines


def plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def test_every_status_has_a_row(operations: str) -> None:
    rows = [line for line in operations.splitlines() if line.startswith("| `")]
    for status in map(pb.Status.Name, pb.Status.values()):
        assert any(f"`{status}`" in row.split("|")[1] for row in rows), status


def test_every_metric_is_explained(operations: str) -> None:
    metrics = Metrics()
    metrics.watch({"zone": "z"}, dict.fromkeys(WATCHED, lambda: 0.0))
    names = {metric for metric in metrics.registry._names_to_collectors if metric.startswith("coranto_")}
    families = {re.sub(r"_(created|bucket|sum|count)$", "", name) for name in names}
    shown = {name for name in families if f"`{name}`" in operations or f"`{name}{{" in operations}
    # A counter is listed by its name with or without `_total`.
    missing = {name for name in families - shown if f"{name}_total" not in shown and f"{name}_info" not in shown}
    assert not missing


def test_security_names_every_call() -> None:
    text = (DOCS / "security.md").read_text()
    for name in (*RULES, *METHODS):
        assert re.search(rf"\b{name}\b", text), name
