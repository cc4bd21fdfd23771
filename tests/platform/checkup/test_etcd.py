"""Checks of an etcd: its age, its version and its history."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.checkup import Condition, etcd
from coranto.cluster import EtcdServer
from coranto.cluster.etcd_server import ask_etcd
from tests.platform.cluster.children import write_program


@pytest.fixture(scope="module")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False) as server:
        yield server.endpoint


def test_a_young_etcd_is_healthy_if_its_version_is_supported(etcd_endpoint: str) -> None:
    verdicts = {each.subject: each.condition for each in etcd.etcd(etcd_endpoint)}
    program = etcd.program()
    assert program.condition in (Condition.OK, Condition.WARNING)
    assert verdicts == {
        "etcd's version": program.condition,
        "etcd's size": Condition.OK,
        "etcd's compaction": Condition.OK,
        "clock of etcd": Condition.OK,
    }


def test_compaction_is_detected_from_the_history(etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "FEW_REVISIONS", 20)
    for number in range(40):
        put: dict[str, object] = {"key": "a2V5", "value": f"{number:08}"}
        ask_etcd(etcd_endpoint, None, "/v3/kv/put", put, 5.0)

    def compaction() -> tuple[Condition, str]:
        (found,) = [each for each in etcd.etcd(etcd_endpoint) if each.subject == "etcd's compaction"]
        return found.condition, found.found

    condition, found = compaction()
    assert condition is Condition.WARNING
    assert "none was ever compacted" in found
    ask_etcd(etcd_endpoint, None, "/v3/kv/compaction", {"revision": "30"}, 5.0)
    condition, found = compaction()
    latest = int(found.split(" of ")[1].split()[0])
    assert (condition, found) == (Condition.OK, f"{latest - 30 + 1} of {latest} revisions are kept")


@pytest.mark.parametrize(
    ("version", "condition"),
    [
        ("3.3.27", Condition.PROBLEM),
        ("3.4.0", Condition.WARNING),
        ("3.4.21", Condition.WARNING),
        ("3.4.22", Condition.OK),
        ("3.5.0", Condition.WARNING),
        ("3.5.5", Condition.WARNING),
        ("3.5.6", Condition.OK),
        ("3.5.16", Condition.OK),
        ("3.6.0", Condition.OK),
        ("", Condition.PROBLEM),
    ],
)
def test_versions_of_etcd_are_checked(version: str, condition: Condition) -> None:
    assert etcd._version(version).condition is condition


def test_an_active_alarm_is_reported_with_its_remedy(tmp_path: Path) -> None:
    """Under an alarm, etcd's health check answers with an error."""
    with EtcdServer(tmp_path, fsync=False) as server:
        ask_etcd(server.endpoint, None, "/v3/maintenance/alarm", {"action": "ACTIVATE", "alarm": "NOSPACE"}, 5.0)
        found = {each.subject: each for each in etcd.etcd(server.endpoint)}
        alarm = found["etcd's alarms"]
        assert (alarm.condition, alarm.found) == (Condition.PROBLEM, "NOSPACE is active")
        assert "defrag" in alarm.advice
        assert found.keys() == {"etcd's version", "etcd's alarms", "etcd's size", "etcd's compaction", "clock of etcd"}
        ask_etcd(server.endpoint, None, "/v3/maintenance/alarm", {"action": "DEACTIVATE", "alarm": "NOSPACE"}, 5.0)
        assert "etcd's alarms" not in {each.subject for each in etcd.etcd(server.endpoint)}


def test_the_etcd_program_of_embedded_clusters_is_checked(tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    environment = {"CORANTO_ETCD_BINARY": str(program)}
    assert etcd.program(environment).condition is Condition.PROBLEM
    for version, condition in (("3.5.1", Condition.WARNING), ("3.5.21", Condition.OK)):
        write_program(program, version)
        judged = etcd.program(environment)
        assert (judged.condition, judged.found.partition(":")[0]) == (condition, f"{program} ({version})")


def test_a_closed_port_of_etcd_is_reported() -> None:
    (result,) = etcd.etcd("127.0.0.1:1")
    assert result.condition is Condition.PROBLEM
    assert "--etcd" in result.advice


async def test_each_of_several_endpoints_is_checked_even_if_one_is_not_an_etcd(etcd_endpoint: str) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-elsewhere\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        other = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        results = await asyncio.to_thread(etcd.etcd, f"{etcd_endpoint}, {other}")
    conditions = {each.subject: each.condition for each in results}
    assert conditions[f"etcd's size ({etcd_endpoint})"] is Condition.OK
    assert conditions[f"etcd ({other})"] is Condition.PROBLEM
    assert "no answer over HTTP: SSH" in results[-1].found
