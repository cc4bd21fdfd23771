"""Every command in the documents exists, with its options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from coranto.cli.app import _build

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _console(text: str) -> Iterator[str]:
    """Return the commands of a page's console blocks."""
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            for part in re.split(r"\s\|\s", re.split(r"\s+#\s", line)[0]):
                if part.removeprefix(".venv/bin/").startswith("coranto "):
                    yield part.removeprefix(".venv/bin/").rstrip("& ")


def _inline(text: str) -> Iterator[str]:
    """Return the commands within the text, such as `coranto streams resume`."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(r"`(coranto [a-z][^`]*)`", prose):
        yield re.sub(r"[\[\]…]", " ", found.replace("\\|", "|"))


def _commands() -> list[tuple[str, str]]:
    return [
        (page.name, each) for page in PAGES for text in [page.read_text()] for each in [*_console(text), *_inline(text)]
    ]


def test_the_documents_have_commands() -> None:
    assert len(_commands()) > 40


@pytest.mark.parametrize(("page", "line"), sorted(set(_commands())))
def test_the_command_exists(page: str, line: str) -> None:
    words = shlex.split(line)[1:]
    command = typer.main.get_command(_build())
    at = 0
    for word in words:
        subcommands = set(command.list_commands(None)) if hasattr(command, "list_commands") else None
        default = getattr(command, "default_command", None)
        if subcommands is None or (word.startswith("-") and default is None):
            break
        names = word.split("|")
        if default is not None and not set(names) <= subcommands:
            command = command.get_command(
                None, default
            )  # Such as `coranto audit SELECTOR` and `coranto audit --accept`.
            break
        assert set(names) <= subcommands, f"{page}: {line}"
        command, at = command.get_command(None, names[0]), at + 1
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in words[at:] if re.match(r"--?[a-z]", word)}
    assert given <= known | {"--help", "-h", "--verbose"}, f"{page}: {line}"
