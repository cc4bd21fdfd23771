"""Logs for people and for machines, and progress reports."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog
from rich.console import Console

from coranto.errors import InvalidInput
from coranto.telemetry import amount, configure_logging, progress


def test_logs_for_machines_are_json_lines() -> None:
    stream = io.StringIO()
    configure_logging("info", json_lines=True, stream=stream)
    log = structlog.get_logger()
    log.debug("unheard")
    log.info("appended", journal="a/journal", bytes=3)
    logging.getLogger("some.library").warning("heard")
    logging.getLogger("some.library").info("unheard")
    first, second = stream.getvalue().splitlines()
    entry = json.loads(first)
    assert (entry["event"], entry["level"], entry["journal"], entry["bytes"]) == ("appended", "info", "a/journal", 3)
    assert entry["timestamp"].endswith("Z")
    assert "heard" in second


def test_logs_for_people_are_plain_text() -> None:
    stream = io.StringIO()
    configure_logging("debug", stream=stream)
    structlog.get_logger().debug("appended", journal="a/journal")
    assert "appended" in stream.getvalue()
    assert "journal=a/journal" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("json_lines", [False, True])
def test_tracebacks_do_not_show_the_values_of_variables(json_lines: bool) -> None:
    def fail(secret: str) -> None:
        raise ValueError(f"of {len(secret)} characters")

    stream = io.StringIO()
    configure_logging("info", json_lines=json_lines, stream=stream)
    try:
        fail("hunter" + "2")
    except ValueError:
        structlog.get_logger().exception("it failed")
    assert "ValueError" in stream.getvalue()
    assert "of 7 characters" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidInput, match="loud"):
        configure_logging("loud")


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (336776, "flights", "336,776 flights"),
        (5, "", "5"),
        (512, "bytes", "512 B"),
        (1536, "bytes", "1.5 KiB"),
        (64 << 20, "bytes", "64.0 MiB"),
        (3 << 40, "bytes", "3.0 TiB"),
        (3 << 50, "bytes", "3072.0 TiB"),
    ],
)
def test_amounts_are_formatted(count: float, unit: str, text: str) -> None:
    assert amount(count, unit) == text


class Lines:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **facts: object) -> None:
        self.said.append((event, facts))


def test_progress_is_logged_in_lines() -> None:
    now = 100.0
    lines = Lines()
    console = Console(file=io.StringIO())
    report = progress("Publishing", 200, unit="flights", log=lines, console=console, monotonic=lambda: now)
    with report:
        for _ in range(50):
            now += 0.125
            report.advance()
        report.note("almost")
        now += 5
        report.note("there")
        report.expect(400)
        now += 5
        report.advance(50)
    a_quarter: dict[str, object] = {"percent": 25, "note": "there"}
    assert lines.said == [
        ("task.started", {"task": "Publishing", "total": "200 flights"}),
        ("task.progress", {"task": "Publishing", "done": "40 flights", "of": "200 flights", "percent": 20}),
        (
            "task.progress",
            {"task": "Publishing", "done": "50 flights", "of": "200 flights", **a_quarter},
        ),
        (
            "task.progress",
            {"task": "Publishing", "done": "100 flights", "of": "400 flights", **a_quarter},
        ),
        ("task.done", {"task": "Publishing", "done": "100 flights", "seconds": 16.2, "per_second": "6 flights"}),
    ]


def test_failed_progress_is_reported_as_stopped() -> None:
    lines = Lines()
    with pytest.raises(ZeroDivisionError):
        _fail(lines)
    assert [event for event, _ in lines.said] == ["task.started", "task.stopped"]


def _fail(lines: Lines) -> None:
    with progress("Reading", log=lines, console=Console(file=io.StringIO())):
        raise ZeroDivisionError


@pytest.mark.parametrize("total", [None, 3 << 20])
def test_progress_is_shown_on_a_terminal(total: int | None) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=150)
    with progress("Appending", total, unit="bytes", console=console) as report:
        report.advance(1 << 20)
        report.note("first piece")
        report.expect(2 << 20)
        report.advance(1 << 20)
    shown = stream.getvalue()
    assert "Appending" in shown
    assert "2.0 MiB of 2.0 MiB" in shown
    assert "first piece" in shown
