"""`coranto doctor` on real parts: an old Java, taken ports, an etcd that never compacts, a read-only store, clocks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from coranto.checkup import Condition, etcd, machine
from coranto.checkup.clock import clock_result
from coranto.checkup.stores import store
from coranto.cluster import EtcdServer
from coranto.cluster.etcd_server import ask_etcd
from coranto.testing import SyncCluster
from coranto.testing.command_line import CommandLine
from coranto.testing.s3_server import AwsKey, S3Server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False) as server:
        yield server.endpoint


def java_program(folder: Path, text: str) -> None:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("told", "needed", "condition"),
    [
        ('openjdk version "17.0.9" 2023-10-17', True, Condition.OK),
        ('openjdk version "1.8.0_392"', True, Condition.PROBLEM),
        ('openjdk version "11.0.2" 2019-01-15', True, Condition.PROBLEM),
        ('openjdk version "11.0.2" 2019-01-15', False, Condition.WARNING),
        ("no JVM", True, Condition.PROBLEM),
    ],
)
def test_java_must_be_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, needed: bool, condition: Condition
) -> None:
    java_program(tmp_path, told)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    result = machine.java(needed=needed)
    assert result.condition is condition
    assert (condition is Condition.OK) == (result.advice == "")


def test_a_java_home_without_java_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert machine.java(needed=True).condition is Condition.PROBLEM
    assert str(tmp_path) in machine.java(needed=True).found
    assert machine.java(needed=False).condition is Condition.NOT_LOOKED_AT


@pytest.mark.parametrize(
    ("version", "condition"), [((3, 10), Condition.PROBLEM), ((3, 11), Condition.OK), ((3, 99), Condition.WARNING)]
)
def test_python_must_be_one_that_was_tried(version: tuple[int, int], condition: Condition) -> None:
    assert machine.python(version).condition is condition


def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        results = {each.subject: each for each in machine.ports([port])}
    assert results[f"port {port}"].condition is Condition.PROBLEM
    assert results["ports"].condition is Condition.OK


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    assert machine.data_directory(tmp_path).condition is not Condition.PROBLEM
    (tmp_path / "file").write_text("")
    assert machine.data_directory(tmp_path / "file").condition is Condition.PROBLEM
    assert not (tmp_path / ".coranto-doctor").exists()


def test_a_young_etcd_is_well_but_for_its_version(etcd_endpoint: str) -> None:
    verdicts = {each.subject: each.condition for each in etcd.etcd(etcd_endpoint)}
    assert verdicts == {
        "etcd's version": Condition.WARNING,  # The embedded one is 3.5.1.
        "etcd's size": Condition.OK,
        "etcd's compaction": Condition.OK,
        "clock of etcd": Condition.OK,
    }


def test_compaction_is_seen_in_the_history(etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("3.5.2", Condition.WARNING),
        ("3.5.16", Condition.OK),
        ("3.6.0", Condition.OK),
        ("", Condition.PROBLEM),
    ],
)
def test_versions_of_etcd_are_judged(version: str, condition: Condition) -> None:
    assert etcd._version(version).condition is condition


def test_a_closed_port_of_etcd_is_told() -> None:
    (result,) = etcd.etcd("127.0.0.1:1")
    assert result.condition is Condition.PROBLEM
    assert "--etcd" in result.advice


@pytest.mark.parametrize(
    ("difference", "condition"), [(0.4, Condition.OK), (-30.0, Condition.WARNING), (3600.0, Condition.PROBLEM)]
)
def test_clocks_are_compared(difference: float, condition: Condition) -> None:
    assert clock_result("somebody", difference, 0.1).condition is condition


async def test_a_read_only_store_is_found_out(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.require_signatures(False)
    for name, value in (s3.environment | AwsKey("owner", "secret").environment).items():
        monkeypatch.setenv(name, value)
    url = s3.store_url("doctor")
    assert (await store(url, None)).condition is Condition.OK
    reader = s3.add_user("reader", "s3:ListBucket", "s3:GetObject")
    for name, value in reader.environment.items():
        monkeypatch.setenv(name, value)
    s3.require_signatures()
    try:
        result = await store(url, None)
    finally:
        s3.require_signatures(False)
    assert result.condition is Condition.PROBLEM
    assert "allowed: nothing" in result.found
    assert "put" in result.advice


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket("doctor")
        yield server


async def test_a_file_store_without_a_root_is_told(tmp_path: Path) -> None:
    assert (await store("file:///", None)).condition is Condition.PROBLEM
    assert (await store("file:///", tmp_path)).condition is Condition.OK


def test_the_command_tells_of_brokers_and_ends_with_1_for_a_problem(
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
    gone = run("doctor", "--endpoint", "127.0.0.1:1", "--output", "json")
    assert gone.code == 1
    assert [each["advice"] for each in json.loads(gone.output) if each["condition"] == "problem"]
    assert "what to do" in run("doctor").output


def test_a_client_of_another_clock_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from coranto.checkup import brokers
    from coranto.client import ClientConfig
    from coranto.client.loop import shared_loop

    with SyncCluster(brokers=1) as cluster:
        import time

        monkeypatch.setattr(brokers, "time", SimpleNamespace(time=lambda: time.time() - 1000))
        results = shared_loop().run(brokers.brokers(ClientConfig(cluster.endpoint)))
    (clock,) = [each for each in results if each.subject.startswith("clock of")]
    assert clock.condition is Condition.PROBLEM
    assert "ahead of" in clock.found
