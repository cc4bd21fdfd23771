"""Sources of settings, their precedence, and errors for wrong settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coranto.errors import InvalidInput
from coranto.member.configuration import Configuration, Origin, read_file, render
from coranto.member.configuration import load as load_settings
from coranto_broker.server.cli import app
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import Fsync
from coranto_consumers.cli.consumer import app as consumer_app

SECRET = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IHNlY3JldA=="


def load(flags: dict[str, Any], file: Path | None = None) -> Configuration[BrokerSettings]:
    return load_settings(BrokerSettings, flags, file)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_precede_the_environment_the_file_and_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_BROKER_ZONE", "of the environment")
    monkeypatch.setenv("CORANTO_BROKER_PORT", "2")
    file = written(tmp_path / "broker.toml", 'zone = "of the file"\nport = 1\nid = "mine"\nfsync = "commit"\n')
    loaded = load({"port": 3}, file)
    settings = loaded.settings
    assert (settings.port, settings.zone, settings.id, settings.host) == (3, "of the environment", "mine", "127.0.0.1")
    assert settings.fsync is Fsync.COMMIT
    assert loaded.origins == {
        "port": Origin.FLAG,
        "zone": Origin.ENVIRONMENT,
        "id": Origin.FILE,
        "fsync": Origin.FILE,
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [("b.toml", 'etcd-prefix = "/p"\nretention = false'), ("b.yaml", "etcd_prefix: /p\nretention: false\n")],
)
def test_files_of_both_formats_are_read_by_flag_and_variable(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_BROKER_CONFIG", str(written(tmp_path / name, text)))
    settings = load({}).settings
    assert (settings.etcd_prefix, settings.retention) == ("/p", False)
    assert load({}, written(tmp_path / "empty.yaml", "")).settings == BrokerSettings()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lease_secs = 5", "there is no setting 'lease_secs'; did you mean lease_seconds?"),
        ("xyz = 5", "coranto broker settings"),
        ("port = 70000", r"port \(.*broker.toml\): .*65535, not 70000"),
        ('fsync = "sometimes"', "fsync .*never.*sometimes"),
        ("port = ", "neither TOML nor"),
        ("[broker]\nport = 1", "no setting 'broker'"),
        ("auth_keys = 5", "auth_keys"),
    ],
)
def test_errors_in_a_file_are_reported(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        load({}, written(tmp_path / "broker.toml", text))
    assert "not 5" not in str(caught.value)


def test_invalid_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        load({}, tmp_path / "none.toml")
    with pytest.raises(InvalidInput, match="does not hold settings by name"):
        read_file(BrokerSettings, written(tmp_path / "list.yaml", "- 1\n"))


def test_a_wrong_variable_and_a_wrong_flag_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"lease_seconds .--lease-seconds.*not -1"):
        load({"lease_seconds": -1})
    monkeypatch.setenv("CORANTO_BROKER_PORT", "tcp://10.0.0.1:1")
    with pytest.raises(InvalidInput, match=r"port \(\$CORANTO_BROKER_PORT\).*'tcp://10.0.0.1:1'"):
        load({})


def test_keys_in_a_file_that_others_can_read_cause_a_warning(tmp_path: Path) -> None:
    file = written(tmp_path / "broker.toml", f'auth_keys = "{SECRET}"')
    file.chmod(0o644)
    loaded = load({}, file)
    assert loaded.settings.auth_keys.get_secret_value() == SECRET
    assert [str(file) in warning for warning in loaded.warnings] == [True]
    file.chmod(0o600)
    assert load({}, file).warnings == ()


def test_an_unknown_variable_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORANTO_BROKER_LEASE_SECS", "5")
    result = CliRunner().invoke(app, ["settings"])
    assert result.exit_code == 0
    assert result.stderr == "$CORANTO_BROKER_LEASE_SECS is not a setting; did you mean lease_seconds?\n"


def test_settings_are_printed_without_secrets_and_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_BROKER_AUTH_KEYS", SECRET)
    arguments = ["settings", "--port", "5", "--id", 'a "quoted" \\ name', "--fsync", "interval", "--no-retention"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert SECRET not in result.stdout
    assert "auth_keys is set, and not shown (environment)" in result.stdout
    assert "port = 5  # flag" in result.stdout
    again = load({}, written(tmp_path / "again.toml", result.stdout)).settings
    assert again == BrokerSettings(port=5, id='a "quoted" \\ name', fsync=Fsync.INTERVAL, retention=False)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_round_trips_through_the_printed_settings(zone: str) -> None:
    assert tomllib.loads(render(load({"zone": zone})))["zone"] == zone


def test_consumers_read_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORANTO_CONSUMER_CONFIG", str(written(tmp_path / "c.toml", 'zone = "z"\nshard_limit = 7\n')))
    monkeypatch.setenv("CORANTO_CONSUMER_SHARDS", "5")
    result = CliRunner().invoke(consumer_app, ["settings", "--port", "5"])
    assert result.exit_code == 0
    assert "shard_limit = 7  # file" in result.stdout
    assert result.stderr.startswith("$CORANTO_CONSUMER_SHARDS is not a setting; ")
