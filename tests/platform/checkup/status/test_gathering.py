"""`coranto status` on a real cluster: healthy, and with each kind of damage."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coranto.checkup.results import Condition
from coranto.checkup.status.brokers import announced_brokers, judge_exits
from coranto.checkup.status.gathering import StatusGatherer, StatusTarget
from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.loop import shared_loop
from coranto.cluster import EmbeddedCluster
from coranto.testing.command_line import CommandLine
from coranto.wire import protocol_pb2 as pb

pytestmark = pytest.mark.integration

Status = Callable[..., dict[str, Any]]


def spec(name: str, replication: int = 2, store: str = "file:///") -> pb.JournalSpec:
    made = pb.JournalSpec(name=name, replication=replication)
    made.fragment.length = 1 << 20
    made.fragment.compression_codec = pb.NONE
    made.fragment.stores.append(store)
    made.fragment.refresh_interval.FromSeconds(60)
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with EmbeddedCluster(folder, 2, lease_seconds=60, supervise=False, etcd_fsync=False) as running:
        with SyncJournalClient(running.info.endpoint) as client:
            client.apply([pb.ApplyRequest.Change(upsert=spec(f"area/{number}")) for number in range(4)])
            for number in range(4):
                client.append(f"area/{number}", b"x\n")  # The first append records that replicas agree.
        yield running


@pytest.fixture
def client(cluster: EmbeddedCluster) -> Iterator[SyncJournalClient]:
    with SyncJournalClient(cluster.info.endpoint) as client:
        yield client


@pytest.fixture
def status(
    cluster: EmbeddedCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Status:
    """Runs `coranto status -o json` until `wanted` holds for its document, and checks its exit code."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CORANTO_DATA", str(cluster.data_dir))
    for name in ("CORANTO_ENDPOINT", "CORANTO_ETCD", "CORANTO_BROKER_ETCD", "CORANTO_CONSUMER", "CORANTO_STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    run = CommandLine(capfdbinary.readouterr)

    def call(wanted: Callable[[dict[str, Any]], bool], *words: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while True:
            done = run("status", "--output", "json", "--timeout", "30", *words)
            document: dict[str, Any] = json.loads(done.output)
            assert done.code == (0 if document["healthy"] else 1), done.errors
            if wanted(document):
                return document
            assert time.monotonic() < deadline, done.output

    return call


def subjects(document: dict[str, Any], condition: str = "problem") -> dict[str, str]:
    return {each["subject"]: each["found"] for each in document["examinations"] if each["condition"] == condition}


def texts(document: dict[str, Any]) -> list[str]:
    return [each["text"] for each in document["changes"]]


def test_a_healthy_cluster_has_no_problem(status: Status, client: SyncJournalClient, cluster: EmbeddedCluster) -> None:
    found = status(lambda document: bool(document["healthy"]))
    assert [(each["name"], each["problem"]) for each in found["brokers"]] == [
        ("local#broker-0", ""),
        ("local#broker-1", ""),
    ]
    assert sum(each["journals"] for each in found["brokers"]) == found["journals"] == 4
    good = subjects(found, "ok")
    assert {"versions", "etcd's version", "etcd's size", "store file:///"} <= good.keys()
    assert all(abs(each["clock_difference"]) < 5 for each in found["brokers"])
    assert found["compared_with"] is None

    client.apply([pb.ApplyRequest.Change(upsert=spec("other/0"))])
    client.append("other/0", b"x\n")
    again = status(lambda document: bool(document["healthy"]))
    assert again["compared_with"] == found["at"]
    assert "1 journal created: other/0" in texts(again)
    client.apply([pb.ApplyRequest.Change(delete="other/0", expect_mod_revision=-1)])
    assert "1 journal deleted: other/0" in texts(status(lambda document: document["journals"] == 4))


def test_the_last_audit_is_shown(
    status: Status, cluster: EmbeddedCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    begun = time.time()
    audited = CommandLine(capfdbinary.readouterr)("audit", "run", "name:prefix=area/")
    assert audited.code == 0, audited.output + audited.errors
    (audit,) = status(lambda document: document["audits"][0]["at"] is not None)["audits"]
    assert audit["store"] == "file:///"
    assert begun - 1 < audit["at"] < time.time() + 1


def test_a_journal_that_cannot_be_placed_is_reported(status: Status, client: SyncJournalClient) -> None:
    client.apply([pb.ApplyRequest.Change(upsert=spec("wide/0", replication=3))])
    try:
        found = status(lambda document: any("replicas_missing" in each for each in subjects(document)))
        assert (
            "wide/0: only 2 brokers hold it, but its replication is 3"
            in subjects(found)["journals with replicas_missing"]
        )
        (problem,) = [each for each in found["journal_problems"] if each["condition"] == "problem"]
        assert (problem["kind"], problem["count"], problem["examples"]) == ("replicas_missing", 1, ["wide/0"])
    finally:
        client.apply([pb.ApplyRequest.Change(delete="wide/0", expect_mod_revision=-1)])
    cured = status(lambda document: bool(document["healthy"]))
    assert "no longer a problem: journals with replicas_missing" in texts(cured)


def test_a_failing_store_is_reported(status: Status, client: SyncJournalClient, cluster: EmbeddedCluster) -> None:
    blocked = cluster.info.file_root / "blocked"
    client.apply([pb.ApplyRequest.Change(upsert=spec("blocked/0", store="file:///blocked/"))])
    try:
        shutil.rmtree(blocked, ignore_errors=True)
        blocked.write_text("A file is where the store's folder should be.")
        found = status(lambda document: "store file:///blocked/" in subjects(document))
        assert "store file:///" in subjects(found, "ok")
        assert "(1 journal)" in subjects(found)["store file:///blocked/"]
    finally:
        blocked.unlink(missing_ok=True)
        client.apply([pb.ApplyRequest.Change(delete="blocked/0", expect_mod_revision=-1)])
    status(lambda document: bool(document["healthy"]))


def test_a_killed_broker_is_reported(status: Status, cluster: EmbeddedCluster) -> None:
    before = status(lambda document: bool(document["healthy"]))
    killed = cluster.info.endpoints[1]
    cluster.kill_broker(1)
    try:
        found = status(lambda document: True)
        assert "cannot connect" in subjects(found)[f"broker {killed}"]
        led = before["brokers"][1]["journals"]
        assert led > 0
        (problem,) = [each for each in found["journal_problems"] if each["kind"] == "no_primary"]
        assert problem["count"] == led
        assert "its primary local#broker-1 does not answer" in problem["found"]
        assert "broker local#broker-1 no longer answers" in texts(found)
    finally:
        cluster.start_broker(1)
        cluster.wait_ready()
    back = status(lambda document: not any(each["problem"] for each in document["brokers"]))
    assert "broker local#broker-1 answers, and did not before" in texts(back)
    assert "broker local#broker-1 started again" in texts(back)


def test_a_broker_that_stops_answering_is_reported(status: Status, cluster: EmbeddedCluster) -> None:
    """It is the first one queried. The others are queried after a second."""
    status(lambda document: bool(document["healthy"]))
    cluster.signal_broker(0, signal.SIGSTOP)
    try:
        found = status(lambda document: document["journals"] > 0, "--timeout", "4")
    finally:
        cluster.signal_broker(0, signal.SIGCONT)
    assert subjects(found)[f"broker {cluster.info.endpoints[0]}"] == "did not answer within 4 s"
    assert [each["problem"] for each in found["brokers"] if each["name"]] == [""]
    assert found["journals"] == 4
    assert "journals" not in subjects(found)
    status(lambda document: bool(document["healthy"]))


def test_brokers_without_journals_are_found_by_any_member_of_etcd(cluster: EmbeddedCluster) -> None:
    etcd, prefix = f"127.0.0.1:1,{cluster.info.etcd}", cluster.info.etcd_prefix
    found = shared_loop().run(announced_brokers(etcd, None, prefix, 8.0))
    assert sorted(each.endpoint.removeprefix("http://") for each in found) == sorted(cluster.info.endpoints)
    assert not list(judge_exits(found))
    (exiting,) = judge_exits([replace(found[0], exiting=True)])
    assert (exiting.condition, exiting.found) == (Condition.WARNING, "local#broker-0 is exiting")
    assert shared_loop().run(announced_brokers(etcd, None, "/no/such/prefix", 8.0)) == []


def test_a_cluster_that_does_not_answer_is_reported() -> None:
    target = StatusTarget(ClientConfig("127.0.0.1:1"), etcd="127.0.0.1:1", timeout=10.0)
    report = shared_loop().run(StatusGatherer(target).report())
    assert not report.is_healthy
    assert report.snapshot is None
    bad = {each.subject: each for each in report.examinations if each.condition == "problem"}
    assert bad.keys() == {"broker 127.0.0.1:1", "journals", "etcd"}
    assert all(each.advice for each in bad.values())
