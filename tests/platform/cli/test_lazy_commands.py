"""Groups of commands that are imported when they are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from coranto.cli.lazy_commands import LazyCommand, lazy_group
from coranto.errors import CorantoError


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    (tmp_path / "lazy_greeting.py").write_text(
        "import typer\n"
        "def greet(name: str) -> str:\n"
        "    'Greet.'\n"
        "    return f'hello {name}'\n"
        "app = typer.Typer(help='More.')\n"
        "@app.command()\n"
        "def part() -> str: return 'bye'\n"
        "@app.callback()\n"
        "def root() -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lazy_greeting", raising=False)
    (tmp_path / "lazy_needy.py").write_text("import sqlalchemy.no_such_module\n")
    commands = {
        "greet": LazyCommand("lazy_greeting:greet"),
        "more": LazyCommand("lazy_greeting:app"),
        "needy": LazyCommand("lazy_needy:app", "Needs more.", "Others"),
    }
    app = typer.Typer(cls=lazy_group(commands))
    app.command("own")(lambda: "own")
    app.callback()(lambda: None)
    return app


def test_a_command_is_imported_when_it_is_named(group: typer.Typer) -> None:
    assert group(args=["own"], standalone_mode=False) == "own"
    assert "lazy_greeting" not in sys.modules
    assert group(args=["greet", "you"], standalone_mode=False) == "hello you"
    assert group(args=["more", "part"], standalone_mode=False) == "bye"


def test_the_help_lists_all_commands(group: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    group(args=["--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert all(each in shown for each in ("greet", "Greet.", "more", "More.", "needy", "Needs more.", "Others", "own"))
    with pytest.raises(Exception, match="No such command"):
        group(args=["greeting"], standalone_mode=False)


def test_a_command_whose_extra_is_missing_names_the_extra(group: typer.Typer) -> None:
    with pytest.raises(CorantoError, match=r"`coranto needy` cannot be loaded: .*pip install 'coranto\[consumers\]'"):
        group(args=["needy", "--help"], standalone_mode=False, prog_name="coranto")


@pytest.mark.parametrize("words", ["consumer lag x --store sqlite:////no/such.db", "consumer offsets --help"])
def test_a_command_imports_no_other_commands(words: str) -> None:
    heavy = (
        "pyarrow",
        "pyspark",
        "coranto_consumers.audit",
        "coranto_consumers.recoverylog",
        "coranto.streams",
        "aiohttp",
    )
    code = (
        "import sys; from coranto.cli import main; main(sys.argv[1:]); "
        f"print([each for each in {heavy!r} if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
