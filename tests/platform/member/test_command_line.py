"""Options of commands for settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from coranto_broker.server.cli import app
from coranto_broker.settings import BrokerSettings


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_setting_is_an_option_unless_it_is_secret() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for name, field in BrokerSettings.model_fields.items():
        assert (f"--{name.replace('_', '-')} " in result.stdout) is (name not in BrokerSettings.secrets()), name
        assert field.description
        assert (field.description.split()[-1] in result.stdout) or name in BrokerSettings.secrets()
    assert BrokerSettings.secrets() == {"auth_keys"}


def test_usage_errors_name_the_setting(tmp_path: Path) -> None:
    file = written(tmp_path / "broker.toml", "prot = 1")
    given: list[Any] = [["--config", str(file)], ["--port", "-1"]]
    for arguments, problem in zip(given, ("did you mean port?", "port"), strict=True):
        result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert problem in result.output
