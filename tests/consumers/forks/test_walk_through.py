"""The walk through docs/forks.md, word for word, on a real cluster: commands in this process, programs by its Spark."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coranto.cli import main
from coranto.cluster import EmbeddedCluster
from coranto.cluster.info import DATA_VARIABLE
from coranto.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.integration, pytest.mark.system]

PAGE = Path(__file__).parents[3] / "docs" / "forks.md"
BLOCK = re.compile(r"(?:^`(?P<file>[^`]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<content>.*?)^```", re.MULTILINE | re.DOTALL)
ECHO = re.compile(r"echo '(?P<line>.*)' \| (?P<command>.*)")
DIFFERENT = "compare"
"""The command that ends with 1: what it compares differs."""


def words_of(line: str) -> str:
    return " ".join(line.split())


class Shell:
    """Runs the lines of a console, and keeps the output of the last command."""

    def __init__(self, capture: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch) -> None:
        self._capture = capture
        self._environment = environment
        self.commands = 0

    def run(self, line: str) -> list[str]:
        self.commands += 1
        echo = ECHO.fullmatch(line)
        given, line = (f"{echo['line']}\n", echo["command"]) if echo else ("", line)
        program, *words = shlex.split(line)
        if program == "export":
            self._environment.setenv(*words[0].split("=", 1))
        elif program == "python":
            self._environment.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
        else:
            assert program == "coranto"
            self._environment.setattr(sys, "stdin", TextIOWrapper(BytesIO(given.encode())))
            expected = 1 if DIFFERENT in words else 0
            assert main(words) == expected, (line, self._capture.readouterr().err)
        return [words_of(each) for each in self._capture.readouterr().out.splitlines()]


def test_the_walk_through_does_what_it_says(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text().partition("## A changed application beside the old one\n")[2].partition("\n### ")[0]
    monkeypatch.chdir(tmp_path)
    shell, promised, printed = Shell(capsys, monkeypatch), 0, list[str]()
    for name in [name for name in os.environ if name.startswith("CORANTO_") and name != "CORANTO_PORTS"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    with EmbeddedCluster(tmp_path / "data", lease_seconds=30, etcd_fsync=False):
        for block in BLOCK.finditer(text):
            if block["kind"] != "console":
                assert block["file"], f"no file is named for {block['content'][:60]!r}"
                Path(block["file"]).write_text(block["content"])
                continue
            for line in block["content"].splitlines():
                if line.startswith("$ "):
                    printed = shell.run(line.removeprefix("$ "))
                else:
                    promised += 1
                    assert words_of(line) in printed, f"{line!r} is promised, and this is printed: {printed}"
        for zombie in ("totals-2 totals-2/shop/orders totals_2", "totals-1 totals-1/totals-2/shop/orders totals_1"):
            with pytest.raises(InvalidInput, match=r"is promoted already: it goes on as 'totals-live'|and is dropped"):
                shell.run(f"python totals.py {zombie} changed")
    assert shell.commands == 17 + 2
    assert promised == 23
