"""Run the examples of a page literally: write its files and run its console lines."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Collection
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import NamedTuple

import pytest

from coranto.cli import main

BLOCK = re.compile(r"(?:^`(?P<file>[^`]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<content>.*?)^```", re.MULTILINE | re.DOTALL)
ECHO = re.compile(r"echo '(?P<line>.*)' \| (?P<command>.*)")


class Followed(NamedTuple):
    """The number of commands that were run, and of output lines that the page shows."""

    commands: int
    promised: int


class Shell:
    """A shell in this process. Commands with one of the words `failing` must exit with 1."""

    def __init__(
        self, capture: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch, failing: Collection[str]
    ) -> None:
        self._capture = capture
        self._environment = environment
        self._failing = frozenset(failing)
        self.commands = 0
        for name in [name for name in os.environ if name.startswith("CORANTO_") and name != "CORANTO_PORTS"]:
            environment.delenv(name)

    def run(self, line: str) -> list[str]:
        """Run a line, and return the printed lines."""
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
            code, expected = main(words), 1 if self._failing & set(words) else 0
            printed = self._capture.readouterr()
            assert code == expected, (line, printed.err)
            return [_words_of(each) for each in (printed.out + (printed.err if code else "")).splitlines()]
        return [_words_of(each) for each in self._capture.readouterr().out.splitlines()]

    def follow(self, text: str) -> Followed:
        """Write the files of a text, run its commands, and check their output for the shown lines."""
        promised, printed = 0, list[str]()
        for block in BLOCK.finditer(text):
            if block["kind"] != "console":
                assert block["file"], f"no file is named for {block['content'][:60]!r}"
                Path(block["file"]).write_text(block["content"])
                continue
            for line in block["content"].splitlines():
                if line.startswith("$ "):
                    printed = self.run(line.removeprefix("$ "))
                else:
                    promised += 1
                    assert _words_of(line) in printed, f"{line!r} is shown, but the output is {printed}"
        return Followed(self.commands, promised)


def _words_of(line: str) -> str:
    return " ".join(line.split())
