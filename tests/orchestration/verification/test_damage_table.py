"""The damage table on real brokers, in files and in S3, with one replica and with three, some of it through Dagster.

Each kind of damage has checks immediately and after brokers have listed their stores again, a recovery plan, and a
result: passed checks, or a plan that names the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.client.loop import run_blocking
from coranto.cluster import EmbeddedCluster
from coranto.fragments.fragment import Fragment, sum_of
from coranto.fragments.store_endpoints import VARIABLE
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import Checkpoint, Source
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.audit import ConsumerCheck, SqlEvidence, parse_expectation
from coranto_consumers.recovery import RepairableDatabase, StoreDoctor
from coranto_consumers.stores.merge import Replace, plan_merge
from coranto_consumers.stores.staging import StageWriter, stage_of
from tests.consumers.audit.conftest import EXPECTATIONS, ORDERS, Scene
from tests.consumers.recovery.test_stores import write_checkpoint
from tests.faults.links import ProxiedLink, Proxy
from tests.orchestration.verification.damaged import BROKERS, BUCKET, SIZE, STORED, Checked, Place, Row, until
from tests.sampling import sampled
from tests.servers.s3 import ANY_KEY, S3Server

pytestmark = pytest.mark.timeout(600)

KINDS = 4
"""The number of journals in a row: in files and in S3, with one replica and with three."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Brokers that can be killed, an S3 server behind a proxy that can be cut, and journals outside of the rows."""
    link = ProxiedLink()
    with S3Server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as environment:
        server.create_bucket(BUCKET)
        gate = Proxy(int(server.endpoint.rpartition(":")[2]), lambda pid: link)
        run_blocking(gate.start())
        for name, value in (ANY_KEY.environment | {VARIABLE: f"http://{gate.endpoint}"}).items():
            environment.setenv(name, value)
        folder = tmp_path_factory.mktemp("cluster")
        with EmbeddedCluster(
            folder, BROKERS, lease_seconds=2, supervise=False, etcd_fsync=False, stop_seconds=3
        ) as cluster:
            environment.setenv("CORANTO_ENDPOINT", ",".join(cluster.info.endpoints))
            environment.setenv("CORANTO_FILE_ROOT", str(cluster.file_root))
            made = Place(cluster, server, gate, link)
            made.create_others()
            yield made
            made.close()
        run_blocking(gate.close())


def kinds(checked: Checked) -> set[str]:
    assert not checked.passed
    return set(checked.kinds)


@pytest.mark.parametrize("variants", sampled([["first-", "all-"], ["middle-", "last-"]], 2))
def test_deleted_and_damaged_fragments(place: Place, variants: list[str]) -> None:
    with Row(place, f"deleted-{variants[0].strip('-')}", [*variants, "flipped-"]) as row:
        doomed = {
            journal: {"first": stored[:1], "middle": stored[1:2], "last": stored[-1:], "all": stored}[variant[:-1]]
            for variant, journals in row.of.items()
            if variant != "flipped-"
            for journal in journals
            for stored in [journal.stored]
        }
        for journal, fragments in doomed.items():
            journal.remove(*fragments)
        for journal in row.of["flipped-"]:
            journal.put(journal.stored[1], b"X" * SIZE)
        assert "content_lost" in kinds(row.check())
        assert {"content_lost", "content_differs"} <= kinds(row.deep_check())
        until(
            lambda: all(
                not ({each.begin for each in gone} & set(known))
                for journal, gone in doomed.items()
                for known in journal.begins()
            )
        )
        assert kinds(row.check()) == {"content_lost", "content_differs"}

        plan = row.plan()
        assert plan.steps == {"set_aside_fragment": len(row.of["flipped-"]), "accept_loss": 1}
        assert plan.hash == row.plan().hash, "a later plan has the same hash"
        for journal in row.journals:
            assert f"{journal.name}: content [" in plan.gone
        for journal, fragments in doomed.items():
            for fragment in fragments:
                assert f"A file {fragment.content_path} in {journal.url}" in plan.gone
                assert f"the SHA-1 {fragment.sum.hex()}" in plan.gone
        row.recover(plan)


@pytest.mark.exhaustive
def test_deleted_fragments_that_brokers_have_cached(place: Place) -> None:
    """The plan restores them from the caches, immediately and after brokers have listed the store."""
    with Row(place, "cached", dagster=True) as row:
        doomed = {journal: journal.stored[1] for journal in row.journals}
        for journal, fragment in doomed.items():
            for endpoint in journal.info.route.endpoints:
                reading = place.replica(endpoint).read(journal.name, SIZE, end_offset=2 * SIZE, direct=False)
                assert b"".join(chunk.content for chunk in reading) == b"B" * SIZE
            journal.remove(fragment)
        early = row.plan()
        assert (early.steps, early.gone) == ({"restore_fragment": KINDS}, "")
        until(lambda: all(SIZE not in known for journal in row.journals for known in journal.begins()))
        plan = row.plan()
        assert (plan.steps, plan.gone, plan.hash) == (early.steps, "", early.hash)
        row.recover(early)
        for journal, fragment in doomed.items():
            assert fragment.content_path in {each.content_path for each in journal.stored}


def test_a_flipped_byte_in_a_spool(place: Place) -> None:
    with Row(place, "spool") as row:
        for journal in row.journals:
            spool = journal.spools[0]
            content = spool.read_bytes()
            with spool.open("r+b") as file:
                file.write(bytes([content[0] ^ 1]))
        assert row.check().passed, "a cheap check reads no content"
        assert kinds(row.deep_check()) == {"spool_differs"}

        # Brokers repair it from another replica, if there is one.
        plan = row.plan()
        assert plan.steps == {}
        for journal in row.journals:
            gone = (
                f"{journal.name}: content [{journal.head - SIZE}, {journal.head}) is damaged on the disk of each broker"
            )
            assert (gone in plan.gone) is (journal.replication == 1)
        assert plan.metadata["summary"] == "0 steps; 2 losses for good"
        assert plan.gone.count("whose content has the SHA-1") == 2

        # No step can repair the loss, but an external copy does.
        for journal in row.journals:
            if journal.replication == 1:
                (live,) = [each for listing in journal.listings() for each in listing if not each.backing_store]
                journal.put(live, bytes([65 + STORED]) * SIZE)
        until(lambda: row.deep_check().passed)
        assert row.plan().metadata["summary"] == "nothing to recover"


@pytest.mark.exhaustive
def test_objects_with_wrong_names(place: Place) -> None:
    far = 1 << 30
    with Row(place, "names") as row:
        for journal in row.journals:
            good = journal.stored[1]
            journal.put(replace(good, sum=sum_of(b"something else")), b"B" * SIZE)
            journal.put(Fragment(journal.name, far, far + 4, sum_of(b"fake"), good.codec), b"fake")
        early = row.check()
        assert {"content_replaced", "object_unknown"} <= kinds(early)
        until(lambda: all(far in known for journal in row.journals for known in journal.begins()))
        assert kinds(row.check()) == {"consistency_lost", "content_replaced", "object_unknown"}
        assert kinds(row.deep_check()) == {"consistency_lost", "content_differs", "object_unknown"}

        plan = row.plan()
        assert plan.steps == {"set_aside_fragment": 2 * KINDS}
        assert not plan.gone
        row.recover(plan)
        for journal in row.journals:
            assert place.client.append(journal.name, b"goes on", retry_timeout=60).begin == journal.head


@pytest.mark.exhaustive
def test_one_disk_is_wiped(place: Place) -> None:
    with Row(place, "one-disk") as row:
        (alone, *_) = [each for each in row.journals if each.replication == 1]
        number = int(alone.info.route.members[0].suffix.rpartition("-")[2])
        losers = [each for each in row.journals if each.is_only_on(number)]
        place.cluster.kill_broker(number)
        assert "unanswered" in kinds(row.check()) | kinds(row.check())
        place.wipe(number)
        place.cluster.start_broker(number)
        until(
            lambda: all(each.in_sync and each.listed for each in place.client.heads(f"name:prefix={row.group.name}/"))
        )
        assert kinds(row.check()) == kinds(row.deep_check()) == {"consistency_lost", "content_lost", "head_fell"}

        plan = row.plan()
        assert plan.steps == {"reset_head": len(losers), "accept_loss": 1}
        assert plan.gone.count(f"content [{STORED * SIZE}, {(STORED + 1) * SIZE}) is gone") == len(losers)
        row.recover(plan)
        for journal in row.journals:
            assert place.client.head(journal.name) == journal.head - SIZE * (journal in losers)


@pytest.mark.exhaustive
def test_all_disks_are_wiped(place: Place) -> None:
    with Row(place, "all-disks") as row:
        for number in range(BROKERS):
            place.cluster.kill_broker(number)
        for number in range(BROKERS):
            place.wipe(number)
            place.cluster.start_broker(number)
        until(
            lambda: all(each.in_sync and each.listed for each in place.client.heads(f"name:prefix={row.group.name}/"))
        )
        assert kinds(row.check()) == kinds(row.deep_check()) == {"consistency_lost", "content_lost", "head_fell"}

        plan = row.plan()
        assert plan.steps == {"reset_head": KINDS, "accept_loss": 1}
        assert plan.gone.count(f"content [{STORED * SIZE}, {(STORED + 1) * SIZE}) is gone") == KINDS
        row.recover(plan)
        for journal in row.journals:
            assert place.client.append(journal.name, b"goes on", retry_timeout=60).begin == STORED * SIZE


def test_deleted_and_recreated_journals(place: Place) -> None:
    with Row(place, "recreated", dagster=True) as row:
        place.client.apply(
            [
                pb.ApplyRequest.Change(delete=each.name, expect_mod_revision=each.info.mod_revision)
                for each in row.journals
            ]
        )
        assert kinds(row.check()) == {"nothing_selected", "journal_gone"}
        plan = row.plan()
        assert plan.steps == {"accept_loss": 1}
        assert plan.gone == ""
        assert plan.kept.count("it does not exist any more") == KINDS
        assert plan.kept.count(f"keeps [{STORED * SIZE}, {(STORED + 1) * SIZE})") == KINDS
        place.client.apply([pb.ApplyRequest.Change(upsert=each.spec()) for each in row.journals])
        damage = {"consistency_lost", "content_lost", "head_fell", "journal_recreated"}
        until(lambda: kinds(row.check()) == damage)
        assert kinds(row.deep_check()) == damage

        refused = row.approve(plan.hash)
        assert not refused.succeeded
        plan = row.plan()
        assert refused.hash == plan.hash
        assert plan.steps == {"restore_fragment": KINDS, "reset_head": KINDS, "accept_loss": 1}
        assert plan.gone.count("it was deleted and created again") == KINDS
        row.recover(plan)
        for journal in row.journals:
            assert place.client.append(journal.name, b"goes on", retry_timeout=60).begin == journal.head


@pytest.mark.exhaustive
def test_shortened_and_restored_retention(place: Place) -> None:
    with Row(place, "retention") as row:
        for journal in row.journals:
            journal.change(lambda spec: spec.fragment.retention.FromSeconds(1))
        until(lambda: all(len(journal.stored) < STORED for journal in row.journals))
        for journal in row.journals:
            journal.change(lambda spec: spec.fragment.ClearField("retention"))
        assert "content_lost" in kinds(row.check())
        until(lambda: all(len(known) == len(each.stored) for each in row.journals for known in each.begins()))
        explained = "a retention that was shortened for a while would explain it"
        for checked in (row.check(), row.deep_check()):
            assert kinds(checked) == {"content_lost"}
            assert checked.findings.count(explained) == KINDS

        plan = row.plan()
        assert plan.steps == {"accept_loss": 1}
        explained = "shortening and lengthening its retention again would explain that"
        for journal in row.journals:
            lost = [line for line in plan.gone.splitlines() if journal.name in line]
            assert lost
            assert all(explained in line for line in lost)
        row.recover(plan)


@pytest.mark.exhaustive
def test_temporarily_unavailable_stores(place: Place) -> None:
    root = place.cluster.file_root
    with Row(place, "away", folder="away/") as row:
        place.link.cut()
        (root / "away").rename(root / "hidden")
        (root / "away").touch()
        with ThreadPoolExecutor(2) as pool:  # Both retry the store several times.
            checking, planning = pool.submit(row.check), pool.submit(row.plan)
        assert kinds(checking.result()) == {"store_unreachable", "memory_unreachable"}
        plan = planning.result()
        assert (plan.steps, plan.gone) == ({}, "")
        for journal in row.journals:
            assert f"{journal.name}: its content in {journal.url} cannot be examined now" in plan.left_alone

        place.link.heal()
        (root / "away").unlink()
        (root / "hidden").rename(root / "away")
        for journal in row.journals:
            journal.fill(1)  # Stores accept content again.
        until(lambda: row.check().passed)
        assert row.deep_check().passed
        assert row.plan().metadata["summary"] == "nothing to recover"


class ConsumerRow(Row):
    """A consumer's store that is damaged and repaired repeatedly."""

    def __init__(self, place: Place, url: str) -> None:
        super().__init__(place, "consumer")
        names = ("in/one", "in/two", "out/one")
        labels = label_set([(CONTENT_TYPE, JSON_LINES)])
        specs = [pb.JournalSpec(name=name, replication=3, labels=labels, fragment=place.fragment()) for name in names]
        place.client.apply([pb.ApplyRequest.Change(upsert=spec) for spec in specs])
        self.scene = run_blocking(self._scene(url))
        self.more = lambda client, stores: [self._check(client, accept=False)]
        self.doctors = lambda client, stores: [
            StoreDoctor(client, RepairableDatabase(self.scene.store), lambda accept: self._check(client, accept=accept))
        ]

    async def _scene(self, url: str) -> Scene:
        return Scene(JournalClient(",".join(self.place.cluster.info.endpoints), retry_timeout=60), url)

    def _check(self, client: JournalClient, *, accept: bool) -> ConsumerCheck:
        return ConsumerCheck(
            "orders",
            client,
            SqlEvidence(self.scene.store),
            ["shard-orders"],
            expectations=[parse_expectation(each) for each in EXPECTATIONS],
            memory=self.scene.memory,
            accept=accept,
            timeout_s=0.2,
        )

    @property
    def checkpoint(self) -> Checkpoint:
        return self.scene.store.read("shard-orders").checkpoint

    def damage(self, kind: str, old: Checkpoint) -> None:
        scene, now = self.scene, self.checkpoint
        match kind:
            case "set back":
                write_checkpoint(scene, old)
            case "set forward":
                source = now.sources["in/one"]
                head = self.place.client.head("in/one")
                write_checkpoint(scene, Checkpoint({**now.sources, "in/one": Source(head, source.producers)}))
            case "deleted":
                scene.execute("DELETE FROM gazette_checkpoints")
            case "rows left staged":
                stage = stage_of(scene.store, plan_merge(ORDERS, ["id", "cents"], ["id"], {"cents": Replace()}))
                with StageWriter(scene.store.url, stage, "shard-orders", 1, "attempt-1") as writer:
                    writer.write([{"id": "x", "cents": 1}] * 3)
            case "acknowledgements not appended":
                builder = scene.producer()
                builder.add("out/one", {"cents": 1})
                run_blocking(scene.flush(builder))
                write_checkpoint(scene, Checkpoint(now.sources, builder.ack_intents()))


CONSUMER: dict[str, tuple[set[str], Counter[str]]] = {
    "set back": ({"checkpoint_set_back", "expectation_failed"}, Counter(restore_checkpoint=1)),
    "set forward": ({"checkpoint_differs", "expectation_failed"}, Counter(restore_checkpoint=1)),
    "deleted": ({"checkpoint_gone", "not_examined"}, Counter(restore_checkpoint=1)),
    "rows left staged": ({"rows_left_staged"}, Counter(delete_staged_rows=1)),
    "acknowledgements not appended": ({"acknowledgement_missing"}, Counter(append_acknowledgements=1)),
}


@pytest.mark.exhaustive
def test_a_consumers_store(place: Place, tmp_path: Path) -> None:
    row = ConsumerRow(place, f"sqlite:///{tmp_path}/store.db")
    scene = row.scene
    try:
        run_blocking(scene.publish(10))
        run_blocking(scene.consume())
        old = row.checkpoint
        run_blocking(scene.publish(10))
        run_blocking(scene.consume())
        assert row.check().passed
        run_blocking(scene.publish(4))  # Not consumed yet.
        for kind, (found, steps) in CONSUMER.items():
            row.dagster = kind == "set back"
            row.damage(kind, old)
            assert kinds(row.check()) == found, kind
            plan = row.plan()
            assert (plan.steps, plan.gone) == (steps, ""), kind
            row.recover(plan)
        run_blocking(scene.consume())
        assert row.check().passed
        with scene.store.engine.connect() as connection:
            assert connection.execute(ORDERS.select()).fetchall().__len__() == 24
    finally:
        run_blocking(scene.client.close())
