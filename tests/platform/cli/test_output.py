"""External text in errors and logs does not control the reader's terminal."""

from __future__ import annotations

import io

import pytest
import structlog
from rich.console import Console

from coranto.cli.output import note, print_table, printable
from coranto.telemetry import configure_logging

# A window title, a cleared screen, an overwritten line, reversed text, and markup that would fail.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b2J\rgood\u202edab\u2028[/red][red]\nnext"
HARMLESS = "\\x1b]0;owned\\x07\\x1b[2J\\x9b2J\\rgood\\u202edab\\u2028[/red][red]\\nnext"


def test_control_characters_are_escaped_as_in_python() -> None:
    assert printable(HOSTILE) == HARMLESS
    assert printable("Köln – 東京 [x] 🙂") == "Köln – 東京 [x] 🙂"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_tables_escape_hostile_cells(is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    print_table(["A", "B"], [[HOSTILE, "b"]], Console(file=out, force_terminal=is_terminal, width=300))
    shown = out.getvalue() + capsys.readouterr().out
    assert HARMLESS in shown
    assert not set(shown.replace("\x1b[1m", "").replace("\x1b[0m", "")) & set("\x07\x9b\r\u202e\u2028\x1b")


def test_notes_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    note(HOSTILE)
    assert capsys.readouterr().err == f"coranto: {HARMLESS}\n"


def test_logs_for_people_are_escaped() -> None:
    out = io.StringIO()
    configure_logging("info", stream=out)
    try:
        structlog.get_logger("test").info("failed", error="\x1b[2J", stack="one\n\x1b]0;owned\x07two")
    finally:
        configure_logging("info")
    assert "\x1b" not in out.getvalue()
    assert "one\n\\x1b]0;owned\\x07two" in out.getvalue()
