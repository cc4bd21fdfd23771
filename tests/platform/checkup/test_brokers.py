"""`coranto doctor` on a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coranto.testing import SyncCluster
from coranto.testing.command_line import CommandLine


@pytest.mark.integration
def test_the_command_reports_brokers_and_exits_with_1_for_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CORANTO_DATA", "CORANTO_ETCD", "CORANTO_BROKER_ETCD", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)
    run = CommandLine(capfdbinary.readouterr)
    with SyncCluster(brokers=2) as cluster:
        cluster.create("doctor/000")
        monkeypatch.setenv("CORANTO_ENDPOINT", cluster.endpoint)
        well = run("doctor", "--output", "json", "--store", "file:///", "--file-root", str(tmp_path))
        assert well.code == 0, well.output
        found = {each["subject"]: each["condition"] for each in json.loads(well.output)}
        brokers = [
            condition for subject, condition in found.items() if subject.startswith(("broker ", "clock of broker"))
        ]
        assert len(brokers) >= 2
        assert set(brokers) == {"ok"}
        monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
        other = json.loads(run("doctor", "--output", "json").output)
        assert any("the client has 9.9" in each["found"] and each["condition"] == "warning" for each in other)
        monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    unreachable = run("doctor", "--endpoint", "127.0.0.1:1", "--output", "json")
    assert unreachable.code == 1
    assert [each["advice"] for each in json.loads(unreachable.output) if each["condition"] == "problem"]
    piped = run("doctor").output.splitlines()
    assert "    give --etcd host:port to examine it" in piped
    assert max(map(len, piped)) < 120, "it fits a pipe"
