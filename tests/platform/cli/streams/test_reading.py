"""`coranto streams read`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coranto.testing.command_line import CommandLine
from tests.platform.cli.streams.conftest import create


def test_invalid_positions_are_reported(run: CommandLine, tmp_path: Path) -> None:
    create(run, "places")
    position = tmp_path / "position"
    for content, problem in (("x", "Invalid JSON"), ("[]", "an object"), ('{"0":{"offset":-5}}', "not negative")):
        position.write_text(content)
        result = run("read", "places", "--position", str(position))
        assert (result.code, result.output) == (1, "")
        assert f"--position: {position}: " in result.errors
        assert problem in result.errors
        assert "Delete the file to begin at the beginning" in result.errors
        assert "pydantic" not in result.errors


def test_a_group_shares_a_stream(run: CommandLine) -> None:
    create(run, "shared")
    assert run("write", "shared", "-k", "a", input=b'{"n":1}\n{"n":2}\n{"n":3}\n').code == 0
    first = run("read", "shared", "--group", "billing", "--limit", "2")
    assert "shared has a new group billing" in first.errors
    assert run("seal", "shared").code == 0
    rest = run("read", "shared", "--group", "billing")
    assert (rest.code, rest.errors) == (0, "")
    found = [json.loads(line)["n"] for line in (first.output + rest.output).splitlines()]
    assert found == [1, 2, 3]
    assert run("read", "shared", "--group", "billing").output == ""


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("read", "orders", "--tail", "--position", "p"), "--tail: reads only new events"),
        (("read", "orders", "--group", "g", "--tail"), "--group: a group knows its position"),
        (
            ("read", "orders", "--position", "nowhere/p"),
            "--position: the folder nowhere for the position does not exist",
        ),
        (("read", "orders"), "there is no stream orders"),
    ],
)
def test_contradictory_options_are_reported(run: CommandLine, words: tuple[str, ...], problem: str) -> None:
    result = run(*words)
    assert (result.code, result.output) == (1, "")
    assert problem in result.errors
