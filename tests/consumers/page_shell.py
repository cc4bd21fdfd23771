"""Pages whose examples are followed word by word: their files, and the lines of their consoles."""

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
    """The commands that were run, and the lines of output that a page promised."""

    commands: int
    promised: int


class Shell:
    """Runs the lines of a console in this process. Commands with one of the words `failing` have to end with 1."""

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
        """Run a line, and return the lines that it printed."""
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
        """Write the files of a text, run its commands, and look for what they are said to print."""
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
                    assert _words_of(line) in printed, f"{line!r} is promised, and this is printed: {printed}"
        return Followed(self.commands, promised)


def _words_of(line: str) -> str:
    return " ".join(line.split())
