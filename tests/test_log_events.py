"""Log events follow the convention of docs/operations.md: `subsystem.event_name`, with facts as fields."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("broker", "consumers", "platform", "orchestration")
LEVELS = {"debug", "info", "warning", "error", "exception", "log"}
EVENT = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*\.[a-z][a-z0-9]*(_[a-z0-9]+)*")


@functools.cache
def sources() -> list[tuple[Path, list[ast.AST]]]:
    """Return the nodes of all modules that log."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = [(path.relative_to(ROOT), text) for path in paths if "structlog" in (text := path.read_text())]
    return [(path, list(ast.walk(ast.parse(text)))) for path, text in texts]


def is_logger(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "structlog.get_logger"


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the place, the level and the call of every log entry."""
    for path, nodes in sources():
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                logger = node.func.value
                if is_logger(logger) or (isinstance(logger, ast.Name) and logger.id == "_log"):
                    yield f"{path}:{node.lineno}", node.func.attr, node


def events() -> dict[str, str]:
    """Return all events, with one place that logs each."""
    found: dict[str, str] = {}
    for place, level, call in calls():
        event = call.args[1 if level == "log" else 0]
        assert isinstance(event, ast.Constant), f"{place}: the event is not written out"
        found[str(event.value)] = place
    return found


def test_every_event_has_a_subsystem_and_a_name() -> None:
    found = events()
    assert len(found) > 100
    wrong = {place: event for event, place in found.items() if not EVENT.fullmatch(event)}
    assert not wrong


def test_facts_are_fields() -> None:
    for place, level, call in calls():
        assert len(call.args) == (2 if level == "log" else 1), f"{place}: facts are given by name"
        assert all(each.arg != "event" for each in call.keywords), place


def test_every_logger_is_checked_by_these_tests() -> None:
    for path, nodes in sources():
        called = {node.func for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Assign) and is_logger(node.value):
                assert [ast.unparse(target) for target in node.targets] == ["_log"], f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and node.attr in LEVELS and ast.unparse(node.value) == "_log":
                assert node in called, f"{path}:{node.lineno}: call it directly"


def test_the_alert_table_has_exactly_the_events_that_are_logged() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("### Events to alert on\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", section, re.MULTILINE)
    alerts = {event for cell in named for event in re.findall(r"`([^`]+)`", cell)}
    assert len(alerts) > 15
    assert alerts <= events().keys(), sorted(alerts - events().keys())
    errors = {
        str(call.args[0].value)
        for _, level, call in calls()
        if level in {"error", "exception"} and isinstance(call.args[0], ast.Constant)
    }
    assert errors <= alerts, f"errors that the table lacks: {sorted(errors - alerts)}"
