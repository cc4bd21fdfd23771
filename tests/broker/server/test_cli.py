"""The command line and the settings of a broker."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coranto.coordination.etcd_client import EtcdCoordinator
from coranto_broker.server.cli import app
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import Fsync

runner = CliRunner()


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORANTO_BROKER_PORT", "1234")
    monkeypatch.setenv("CORANTO_BROKER_FSYNC", "commit")
    settings = BrokerSettings(id="mine")
    assert (settings.port, settings.fsync, settings.id) == (1234, Fsync.COMMIT, "mine")
    assert BrokerSettings(port=99).port == 99


def test_the_command_line_passes_settings_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[BrokerSettings] = []

    async def run(settings: BrokerSettings) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr("coranto_broker.server.cli.run", run)
    arguments = (
        f"serve --etcd e:1 --etcd-prefix /p --host h --port 5 --zone z --id the-broker --data-dir {tmp_path} "
        f"--file-root {tmp_path} --lease-seconds 3 --fsync interval --log-level debug --log-json"
    )
    result = runner.invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    (settings,) = given
    assert settings == BrokerSettings(
        etcd="e:1",
        etcd_prefix="/p",
        host="h",
        port=5,
        zone="z",
        id="the-broker",
        data_dir=tmp_path,
        file_root=tmp_path,
        lease_seconds=3,
        fsync=Fsync.INTERVAL,
        log_level="debug",
        log_json=True,
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "70000"], "port"),
        (["--lease-seconds", "0"], "lease_seconds"),
        (["--fsync", "sometimes"], "sometimes"),
        (["--log-level", "chatty"], "chatty"),
    ],
)
def test_bad_settings_are_usage_errors(arguments: list[str], problem: str) -> None:
    result = runner.invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert problem in result.output


def test_a_broker_without_etcd_says_so(
    tmp_path: Path, free_port: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = functools.partial(EtcdCoordinator, timeout_seconds=0.3)
    monkeypatch.setattr("coranto.member.process.EtcdCoordinator", impatient)
    arguments = ["serve", "--etcd", f"127.0.0.1:{free_port}", "--port", "0", "--data-dir", str(tmp_path)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert "member.cannot_run" in capfd.readouterr().err + result.output
