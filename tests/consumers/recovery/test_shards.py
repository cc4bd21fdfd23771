"""Recovery of shards: failed shards are reassigned, and the plan reports failures and shards without a process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from coranto.client import ClientConfig, JournalClient
from coranto.client.publishing import publisher
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines
from coranto.recovery import Plan, Remark, StepKind, carry_out, make_plan
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recovery import ShardDoctor, shards
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.process import ConsumerProcess
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.runtime.testing import shard_spec
from coranto_consumers.stores.sql import SqlStore
from tests.consumers.runtime.conftest import Sums

CODES = pc.ReplicaStatus.Code


def shard(name: str, *codes: str, primary: int = 0, errors: Sequence[str] = (), disable: bool = False) -> object:
    """A shard with one replica for each status code."""
    statuses = [pc.ReplicaStatus(code=CODES.Value(code)) for code in codes]
    for status in statuses:
        if status.code == pc.ReplicaStatus.FAILED:
            status.errors.extend(errors)
    route = pb.Route(primary=primary)
    return pc.ListResponse.Shard(spec=pc.ShardSpec(id=name, disable=disable), status=statuses, route=route)


class ListedShards(ShardClient):
    """A client of a consumer that returns these lists of shards in order, and repeats the last one."""

    def __init__(self, *answers: Sequence[object]) -> None:
        super().__init__(ClientConfig("127.0.0.1:1"))
        self.answers = list(answers)
        self.unassigned: list[str] = []

    async def list(self, selector: str = "") -> Sequence[pc.ListResponse.Shard]:
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        return [each for each in answer if isinstance(each, pc.ListResponse.Shard)]

    async def unassign(
        self, shards: Sequence[str], *, only_failed: bool = False, dry_run: bool = False
    ) -> Sequence[str]:
        assert only_failed
        assert not dry_run
        self.unassigned += shards
        return [] if "well" in shards else shards


async def test_only_failed_shards_are_unassigned():
    client = ListedShards(
        [
            shard("broken", "PRIMARY", "FAILED", errors=["ZeroDivisionError: boom"]),
            shard("silent", "FAILED"),
            shard("no-primary", primary=-1),
            shard("off", primary=-1, disable=True),
            shard("late", "BACKFILL"),
            shard("well", "STANDBY", "PRIMARY"),
        ]
    )

    plan = await make_plan([ShardDoctor(client)])

    assert [(step.kind, step.subject) for step in plan.steps] == [
        (StepKind.UNASSIGN_SHARD, "broken"),
        (StepKind.UNASSIGN_SHARD, "silent"),
    ]
    assert plan.losses == ()
    assert plan.remarks == (
        Remark("broken", "it failed: ZeroDivisionError: boom"),
        Remark("late", "its most advanced replica is backfill, and not primary yet"),
        Remark("no-primary", "no process is its primary: are enough processes of the consumer running, with capacity?"),
        Remark("silent", "it failed: without a reason"),
    )


@pytest.mark.parametrize(
    ("later", "done", "problem"),
    [
        (shard("broken", "PRIMARY"), "unassigned, and it runs again", ""),
        (shard("broken", "FAILED", errors=["boom"]), "", "broken was unassigned, and failed again: boom"),
        (shard("broken", primary=-1), "unassigned, and no process has taken it yet", ""),
    ],
)
async def test_a_step_reports_whether_the_shard_runs_again(monkeypatch, later, done, problem):
    monkeypatch.setattr(shards, "TIMEOUT_S", 0.1 if "yet" in done else 60)
    monkeypatch.setattr(shards, "RECHECK_SECONDS", 0.01)
    failed = [shard("broken", "FAILED", errors=["boom"])]
    client = ListedShards(failed, failed, [shard("broken", "IDLE", primary=-1)], [later])
    doctor = ShardDoctor(client)

    recovery = await carry_out([doctor], (await make_plan([doctor])).hash)

    (result,) = recovery.results
    assert (result.done, result.problem) == (done, problem)
    assert recovery.succeeded is not bool(problem)


async def test_a_step_is_safe_to_repeat():
    doctor = ShardDoctor(ListedShards([shard("well", "FAILED")]))
    (step,) = (await make_plan([doctor])).steps

    assert await doctor.act(step) == "it has not failed any more"


# -- On a real cluster -------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path / "cluster", lease_seconds=60, etcd_fsync=False) as running:
        yield running


@pytest.fixture
async def client(cluster: EmbeddedCluster) -> AsyncIterator[JournalClient]:
    async with JournalClient(cluster.info.endpoint, file_root=cluster.file_root) as made:
        spec = pb.JournalSpec(name="in/one", replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
        spec.fragment.length = 1 << 20
        spec.fragment.compression_codec = pb.NONE
        spec.fragment.stores.append("file:///")
        spec.fragment.refresh_interval.FromSeconds(60)
        await made.apply([pb.ApplyRequest.Change(upsert=spec)])
        yield made


async def until_failed(doctor: ShardDoctor) -> Plan:
    while not (plan := await make_plan([doctor])).steps:
        continue  # Each plan queries the consumer.
    return plan


@pytest.mark.timeout(300)
async def test_a_failed_shard_of_a_real_consumer_runs_again_once_the_cause_is_gone(
    cluster: EmbeddedCluster, client: JournalClient, tmp_path: Path
) -> None:
    app = Sums(SqlStore(f"sqlite:///{tmp_path}/store.db"))

    def fail(message: dict[str, object]) -> None:
        raise ZeroDivisionError("boom")

    app.before = fail
    settings = ConsumerProcessSettings(
        etcd=cluster.info.etcd, etcd_prefix="/test/sums", lease_seconds=60, exit_seconds=60, id="process-a"
    )
    async with ConsumerProcess(settings, app, client) as process, ShardClient(ClientConfig(process.endpoint)) as calls:
        doctor = ShardDoctor(calls)
        await calls.apply([pc.ApplyRequest.Change(upsert=shard_spec("shard-sums", ["in/one"], max_seconds=600))])
        published = publisher(client, JsonLines())
        await published.add("in/one", {"key": "a", "n": 1})
        await published.commit()

        plan = await until_failed(doctor)
        assert [(step.kind, step.subject) for step in plan.steps] == [(StepKind.UNASSIGN_SHARD, "shard-sums")]
        assert Remark("shard-sums", "it failed: ZeroDivisionError: boom") in plan.remarks

        await carry_out([doctor], plan.hash)
        assert (await until_failed(doctor)).hash == plan.hash, "it fails again for the same cause"

        app.before = lambda message: None
        recovery = await carry_out([doctor], plan.hash)
        assert [result.done for result in recovery.results] == ["unassigned, and it runs again"]
        assert recovery.succeeded
        stat = await calls.stat("shard-sums", {"in/one": await client.head("in/one")})
        assert dict(stat.read_through) == {"in/one": await client.head("in/one")}
        assert app.sums() == {"a": (1, 1)}
