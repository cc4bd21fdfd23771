"""Commands of plugins."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
import typer

from coranto.cli.lazy_commands import lazy_group
from coranto.cli.plugins import plugin_commands


def entry(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, "coranto.commands")


def use(plugin: importlib.metadata.EntryPoint, *words: str) -> object:
    app = typer.Typer(cls=lazy_group(plugin_commands([plugin])))

    @app.callback()
    def root() -> None:
        """The root."""

    return app(args=list(words), standalone_mode=False, prog_name="coranto")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_plugin.py").write_text(
        "import typer\n"
        "app = typer.Typer()\n"
        "@app.callback()\n"
        "def root() -> None: ...\n"
        "@app.command()\n"
        "def greet(name: str) -> str: return f'hello {name}'\n"
        "nothing = 3\n"
    )
    (tmp_path / "needy_plugin.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "a_plugin", raising=False)


def test_a_plugins_commands_are_added(plugins: None) -> None:
    assert use(entry("greeter", "a_plugin:app"), "greeter", "greet", "you") == "hello you"
    with pytest.raises(Exception, match=r"a_plugin:nothing of `coranto bad` is neither a function nor a typer\.Typer"):
        use(entry("bad", "a_plugin:nothing"), "bad")
    with pytest.raises(Exception, match=r"`coranto needy` .*a_module_that_nobody_has.*pip install 'needy_plugin'"):
        use(entry("needy", "needy_plugin:app"), "needy", "any", "--thing")


def test_the_listing_names_a_plugin_without_its_import(plugins: None, capsys: pytest.CaptureFixture[str]) -> None:
    use(entry("greeter", "a_plugin:app"), "--help")
    shown = capsys.readouterr().out
    assert "greeter" in shown
    assert "Commands of a_plugin." in shown
    assert "a_plugin" not in sys.modules


@pytest.mark.parametrize(
    ("module", "extra"), [("coranto_broker", "broker"), ("dagster_coranto", "dagster"), ("pyspark_coranto", "spark")]
)
def test_a_missing_extra_is_named(module: str, extra: str) -> None:
    with pytest.raises(Exception, match=rf"pip install 'coranto\[{extra}\]'"):
        use(entry("part", f"{module}.no_such_module:app"), "part", "--help")
