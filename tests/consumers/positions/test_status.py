"""Consumers in `coranto status`: shards in processes, and checkpoints in stores."""

from __future__ import annotations

import asyncio
import base64
import json
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, create_engine, text

from coranto.checkup import Condition
from coranto.checkup.status.gathering import StatusGatherer, StatusTarget
from coranto.checkup.status.sections import GROUP
from coranto.checkup.status.values import StatusReport
from coranto.client import ClientConfig, JournalClient, SyncJournalClient
from coranto.client.loop import shared_loop
from coranto.cluster import EmbeddedCluster
from coranto.coordination.etcd import Delete, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages.checkpoints import Checkpoint, Identity, Source
from coranto.testing.command_line import CommandLine
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.positions.status import consumers
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.discovery import CONSUMERS_PREFIX
from coranto_consumers.runtime.process import ConsumerProcess
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.stores import SqlShardStore
from coranto_consumers.stores.reading import consumer_names
from coranto_consumers.stores.sql import SqlStore

pytestmark = pytest.mark.integration

LINE = b'{"n":1}\n'
Status = Callable[..., dict[str, Any]]


def spec(name: str) -> pb.JournalSpec:
    made = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
    made.fragment.length = 1 << 20
    made.fragment.compression_codec = pb.NONE
    made.fragment.stores.append("file:///")
    made.fragment.refresh_interval.FromSeconds(60)
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), lease_seconds=60, etcd_fsync=False) as running:
        with SyncJournalClient(running.info.endpoint) as client:
            client.apply([pb.ApplyRequest.Change(upsert=spec(name)) for name in ("in/few", "in/many", "in/new")])
            for name, count in (("in/few", 3), ("in/many", 1000), ("in/new", 2)):
                client.append(name, LINE * count)
        yield running


@pytest.fixture
def status(
    cluster: EmbeddedCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Status:
    """Run `coranto status -o json` with the sections of this distribution."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    sections = [EntryPoint(name, value, GROUP) for name, value in project["entry-points"][GROUP].items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: sections if group == GROUP else [])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CORANTO_DATA", str(cluster.data_dir))
    for name in ("CORANTO_ENDPOINT", "CORANTO_ETCD", "CORANTO_BROKER_ETCD", "CORANTO_CONSUMER", "CORANTO_STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    run = CommandLine(capfdbinary.readouterr)

    def call(*words: str, code: int = 0) -> dict[str, Any]:
        done = run("status", "--output", "json", "--timeout", "30", *words)
        assert done.code == code, done.output + done.errors
        found: dict[str, Any] = json.loads(done.output)
        return found

    return call


def commit(url: str, name: str, checkpoint: Checkpoint) -> None:
    store = SqlStore(url)
    fence, _ = store.raise_fence(name)
    with store.transaction(name, fence) as transaction:
        transaction.commit(checkpoint)


def problems(document: dict[str, Any]) -> dict[str, str]:
    return {each["subject"]: each["found"] for each in document["examinations"] if each["condition"] == "problem"}


def test_consumers_of_a_store_are_shown_by_lag(status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    commit(url, "ready", Checkpoint({"in/few": Source(3 * len(LINE))}))
    commit(
        url,
        "behind",
        Checkpoint({"in/few": Source(len(LINE)), "in/many": Source(0)}, identity=Identity("name:prefix=in/")),
    )
    assert list(consumer_names(url)) == ["behind", "ready"]
    found = status("--consumer", url)
    assert [(each["name"], each["behind"], each["journals"], each["most_behind"]) for each in found["consumers"]] == [
        ("behind", 1004 * len(LINE), 3, "in/many"),
        ("ready", 0, 1, ""),
    ]
    monkeypatch.setenv("CORANTO_STORE_URL", url)
    assert len(status()["consumers"]) == 2


def test_a_damaged_checkpoint_does_not_hide_other_consumers(status: Status, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    commit(url, "well", Checkpoint({"in/few": Source(0)}))
    commit(url, "damaged", Checkpoint({"in/few": Source(0)}))
    with create_engine(url).begin() as connection:
        damage = text("UPDATE gazette_checkpoints SET checkpoint = :bytes WHERE shard_fqn = 'damaged'")
        connection.execute(damage, {"bytes": base64.b64encode(b"\xff\xff\xff")})
    found = status("--consumer", url, code=1)
    assert {each["name"]: each["behind"] for each in found["consumers"]} == {"well": 3 * len(LINE), "damaged": None}
    assert problems(found).keys() == {"consumer damaged"}


def test_a_consumer_whose_journal_is_gone_is_unhealthy(status: Status, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    commit(url, "lost", Checkpoint({"in/gone": Source(7)}))
    found = status("--consumer", url, code=1)
    assert problems(found) == {"consumer lost": "in/gone: there is no such journal"}
    (consumer,) = found["consumers"]
    assert consumer["behind"] is None


def test_an_unreadable_store_is_a_problem_shown_without_its_password(status: Status, tmp_path: Path) -> None:
    (tmp_path / "broken.db").write_bytes(b"This is not a database." * 100)
    found = status("--consumer", f"sqlite:///{tmp_path}/broken.db", code=1)
    assert list(problems(found)) == [f"consumers in sqlite+pysqlite:///{tmp_path}/broken.db"]
    found = status("--consumer", "postgresql://someone:very-secret@127.0.0.1:1/none", code=1)
    assert "very-secret" not in json.dumps(found)
    assert len(problems(found)) == 1
    assert list(problems(status("--consumer", "nonsense://x", code=1)))


class Picky(Application):
    """An application that fails on messages of one journal."""

    def __init__(self, store):
        self._store = store

    def new_store(self, shard):
        return SqlShardStore(self._store, Table("none", MetaData(), Column("n", BigInteger, primary_key=True)))

    async def consume_message(self, shard, store, message, publisher):
        if message.journal == "in/many":
            raise ValueError("this message is not welcome")


async def test_shards_are_shown_with_their_lag_and_failures(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CORANTO_STORE_URL", raising=False)
    monkeypatch.delenv("CORANTO_CONSUMER", raising=False)
    info = cluster.info
    settings = ConsumerProcessSettings(
        etcd=info.etcd, etcd_prefix=f"{CONSUMERS_PREFIX}picky", id="picky-a", lease_seconds=60
    )
    target = StatusTarget(ClientConfig(info.endpoint, info.file_root), etcd=info.etcd, timeout=30.0)
    gatherer = StatusGatherer(target, [consumers])

    def reasons(report: StatusReport) -> dict[str, str]:
        return {each.subject: each.found for each in report.of(Condition.PROBLEM)}

    async with (
        JournalClient(info.endpoint) as client,
        ConsumerProcess(settings, Picky(f"sqlite:///{tmp_path}/store.db"), client) as process,
        ShardClient(ClientConfig(process.endpoint)) as shards,
        asyncio.timeout(60),
    ):
        for name, source in (("good-0", "in/few"), ("bad-0", "in/many")):
            spec = pc.ShardSpec(id=name, sources=[pc.ShardSpec.Source(journal=source)])
            spec.max_txn_duration.FromSeconds(1)
            await shards.apply([pc.ApplyRequest.Change(upsert=spec)])
        report = await gatherer.report()
        while "its status is failed" not in reasons(report).get("consumer bad-0", "") or "consumer good-0" in reasons(
            report
        ):
            report = await gatherer.report()
        await shards.stat("good-0", {"in/few": 3 * len(LINE)})
        # A process that is both named and announced is queried once.
        monkeypatch.setenv("CORANTO_CONSUMER", process.endpoint.removeprefix("http://"))
        report = await gatherer.report()
    assert len(report.consumers) == 2
    by_name = {each.name: each for each in report.consumers}
    assert (by_name["good-0"].behind, by_name["good-0"].journals) == (0, 1)
    assert by_name["bad-0"].behind is None
    assert reasons(report).keys() == {"consumer bad-0"}
    assert "this message is not welcome" in reasons(report)["consumer bad-0"]


def test_an_announced_process_that_does_not_answer_is_a_problem(status: Status, cluster: EmbeddedCluster) -> None:
    key = f"{CONSUMERS_PREFIX}sums/members/local#gone"
    member = pc.ConsumerSpec(process_spec=pb.ProcessSpec(endpoint="http://127.0.0.1:1"))

    async def announce(value: bytes | None) -> None:
        async with EtcdCoordinator(cluster.info.etcd) as coordinator:
            if value is not None:
                await coordinator.txn([], [Put(key, value)])
            else:
                await coordinator.txn([], [Delete(key)])

    assert status()["consumers"] == []
    shared_loop().run(announce(member.SerializeToString()))
    try:
        assert "consumer http://127.0.0.1:1" in problems(status(code=1))
    finally:
        shared_loop().run(announce(None))
    status()
