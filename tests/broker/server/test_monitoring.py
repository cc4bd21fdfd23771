"""The dashboard and alerts in deploy/ name metrics of the broker, and each alert has an entry in the runbook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from coranto_broker.append.overload import REASONS
from coranto_broker.settings import BrokerSettings
from tests.broker.running import running_broker

ROOT = Path(__file__).parents[3]
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/coranto-alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((ROOT / "deploy/grafana/coranto-brokers.json").read_text())
NAME = re.compile(r"\b(?:coranto|process)_[a-z_]+\b")


def expressions() -> list[str]:
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = [each["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return [*(alert["expr"] for alert in ALERTS), *shown, *asked]


async def test_every_named_metric_is_one_of_a_running_broker(broker_settings: BrokerSettings) -> None:
    async with running_broker(broker_settings.model_copy(update={"metrics_port": 0})) as (process, _):
        async with aiohttp.ClientSession() as session, session.get(f"{process.metrics_endpoint}/metrics") as answer:
            text = await answer.text()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    there = {name + suffix for name, kind in kinds.items() for suffix in suffixes.get(kind, ("",))}
    named = {name for each in expressions() for name in NAME.findall(each)}
    assert len(named) > 25
    assert named <= there
    for reason in REASONS:
        assert f'coranto_append_streams_ended_total{{reason="{reason}"}} 0.0' in text
    counted = {name for name, kind in kinds.items() if kind == "counter"}
    for each in (alert["expr"] for alert in ALERTS):
        for name in set(NAME.findall(each)) & counted:
            assert re.search(rf"(rate|increase)\({name}\b", each), f"{name} only grows: compare its rate"


def test_the_dashboard_shows_every_metric_of_the_broker_but_its_identity() -> None:
    found = re.findall(r"`(coranto_[a-z_]+)(?:\{[a-z,]*\})?`", (ROOT / "docs/operations.md").read_text())
    documented = {name for name in found if not name.startswith(("coranto_shard_", "coranto_spark_"))}  # Consumers'.
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for each in expressions() for name in NAME.findall(each)}
    assert documented - {"coranto_checkpoints"} <= shown | {"coranto_broker"}, sorted(documented - shown)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_every_alert_has_its_entry_in_the_runbook(alert: dict[str, Any]) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    entries = re.findall(rf"^\| `{alert['alert']}` \| (.+) \|$", page, re.MULTILINE)
    assert len(entries) == 1, f"docs/operations.md, Alerts: one row for {alert['alert']}"
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"].endswith(".")


def test_the_runbook_has_no_entry_without_an_alert() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    assert set(re.findall(r"^\| `(Coranto\w+)` \|", page, re.MULTILINE)) == {alert["alert"] for alert in ALERTS}


def test_only_bytes_have_units_of_bytes() -> None:
    for panel in DASHBOARD["panels"]:
        config = panel["fieldConfig"]
        units = {
            override["matcher"]["options"]: each["value"]
            for override in config["overrides"]
            for each in override["properties"]
            if each["id"] == "unit"
        }
        for target in panel["targets"]:
            unit = units.get(target["legendFormat"], config["defaults"]["unit"])
            assert ("bytes" in target["expr"]) == (unit in ("bytes", "Bps")), (panel["title"], target["legendFormat"])


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
