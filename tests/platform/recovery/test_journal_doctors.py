"""Recovery of journals of real brokers, with one replica and with three, from real damage to their stores and disks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coranto.audit import audit_journal
from coranto.client import JournalClient, JournalInfo
from coranto.cluster import EmbeddedCluster
from coranto.errors import IndexHasGreaterOffset, InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.recovery import (
    ContentDoctor,
    Doctor,
    HeadDoctor,
    JournalDoctor,
    NotApproved,
    Plan,
    StepKind,
    carry_out,
    make_plan,
)
from coranto.wire import protocol_pb2 as pb

pytestmark = pytest.mark.integration

BROKERS = 3
SIZE = 3000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with EmbeddedCluster(folder, BROKERS, lease_seconds=2, supervise=False, etcd_fsync=False) as running:
        yield running


@pytest.fixture
async def client(cluster: EmbeddedCluster) -> AsyncIterator[JournalClient]:
    async with JournalClient(",".join(cluster.info.endpoints), file_root=cluster.file_root, patience=60) as made:
        yield made


@pytest.fixture
async def hasty(cluster: EmbeddedCluster) -> AsyncIterator[JournalClient]:
    """A client with the patience of a command."""
    async with JournalClient(",".join(cluster.info.endpoints), file_root=cluster.file_root, patience=1) as made:
        yield made


class Journal:
    """A journal with some stored fragments."""

    def __init__(self, cluster: EmbeddedCluster, client: JournalClient, name: str, replication: int) -> None:
        self.cluster, self.client, self.name, self.replication = cluster, client, name, replication
        self.stores = StoreRegistry(cluster.file_root)

    async def create(self, fragments: int = 3, refresh_seconds: int = 1) -> list[Fragment]:
        spec = pb.JournalSpec(name=self.name, replication=self.replication)
        spec.fragment.length = 1024
        spec.fragment.compression_codec = pb.NONE
        spec.fragment.stores.append("file:///")
        spec.fragment.refresh_interval.FromSeconds(refresh_seconds)
        await self.client.apply([pb.ApplyRequest.Change(upsert=spec)])
        for number in range(fragments + 1):  # The last one stays with the brokers.
            await self.client.append(self.name, bytes([65 + number]) * SIZE)
        return await self.stored(fragments)

    async def stored(self, count: int) -> list[Fragment]:
        """Wait until the index knows exactly `count` stored fragments, and return them."""
        async with asyncio.timeout(60):
            while True:
                listed = [info.fragment for info in await self.client.fragments(self.name)]
                persisted = [each for each in listed if each.backing_store]
                if len(persisted) == count:
                    return persisted
                await asyncio.sleep(0.1)

    async def forgotten(self, begin: int) -> None:
        """Wait until the index knows no stored fragment that begins at `begin`."""
        async with asyncio.timeout(60):
            while True:
                listed = [info.fragment for info in await self.client.fragments(self.name)]
                if all(each.begin != begin or not each.backing_store for each in listed):
                    return
                await asyncio.sleep(0.1)

    async def dropped(self, fragment: Fragment) -> None:
        """Wait until no broker has a local file of the fragment."""
        async with asyncio.timeout(60):
            while True:
                if not [*self.cluster.data_dir.glob(f"brokers/*/spools/**/{fragment.begin:016x}.content")]:
                    return
                await asyncio.sleep(0.1)

    def path(self, fragment: Fragment) -> Path:
        return self.cluster.file_root / fragment.content_path

    async def info(self) -> JournalInfo:
        (found,) = (await self.client.list(f"name={self.name}")).journals
        return found

    async def doctors(self) -> list[Doctor]:
        info = await self.info()
        return [ContentDoctor(self.client, self.stores, [info]), HeadDoctor(self.client, [info])]

    async def plan(self) -> Plan:
        return await make_plan(await self.doctors())


async def test_a_sound_journal_has_an_empty_plan(cluster, client):
    journal = Journal(cluster, client, "sound/r3", 3)
    await journal.create()

    assert (await journal.plan()).is_empty


async def test_a_damaged_fragment_comes_back_from_a_brokers_copy(cluster, client):
    journal = Journal(cluster, client, "flipped/r3", 3)
    fragments = await journal.create()
    # Every broker of the journal has served it, so each has it in its cache.
    for endpoint in (await journal.info()).route.endpoints:
        async with JournalClient(endpoint, route_cache=0) as broker:
            assert [chunk async for chunk in broker.read(journal.name, SIZE, end_offset=2 * SIZE, direct=False)]
    damaged = journal.path(fragments[1])
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100] + b"x" + content[101:])

    plan = await journal.plan()
    assert [step.kind for step in plan.steps] == [StepKind.RESTORE_FRAGMENT]
    assert plan.losses == ()
    with pytest.raises(NotApproved):
        await carry_out(await journal.doctors(), "0" * 16)
    assert damaged.read_bytes() != content

    done = await carry_out(await journal.doctors(), plan.hash)
    assert done.succeeded, done
    assert damaged.read_bytes() == content
    assert done.remaining.is_empty
    assert (await audit_journal(client, journal.stores, journal.name)).sound


async def test_a_deleted_fragment_comes_back_from_a_spool_that_still_has_it(cluster, client):
    journal = Journal(cluster, client, "spool/r1", 1)
    fragments = await journal.create(refresh_seconds=3600)  # Brokers keep their files until they have listed the store.
    lost = journal.path(fragments[1])
    lost.unlink()

    plan = await journal.plan()
    assert [(step.kind, step.facts["begin"]) for step in plan.steps] == [(StepKind.RESTORE_FRAGMENT, SIZE)]
    assert plan.losses == ()
    done = await carry_out(await journal.doctors(), plan.hash)

    assert done.succeeded, done
    assert lost.read_bytes() == b"B" * SIZE


async def test_content_without_any_copy_is_said_to_be_gone(cluster, client):
    journal = Journal(cluster, client, "gone/r3", 3)
    fragments = await journal.create()
    await journal.dropped(fragments[1])
    journal.path(fragments[1]).unlink()

    at_once = await journal.plan()
    await journal.forgotten(SIZE)
    after_refresh = await journal.plan()

    for plan in (at_once, after_refresh):
        assert plan.steps == ()
        (loss,) = plan.losses
        assert f"content [{SIZE}, {2 * SIZE})" in loss.message
        assert plan.summary == "0 steps; 1 loss for good"


async def test_a_fragment_comes_back_from_another_store(cluster, client):
    journal = Journal(cluster, client, "stores/both", 1)
    fragments = await journal.create()
    info = await journal.info()
    info.spec.fragment.stores.append("file:///second/")
    await client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
    lost = journal.path(fragments[0])
    copy = cluster.file_root / "second" / fragments[0].content_path
    plan = Plan((), (), ())
    async with asyncio.timeout(60):
        while not plan.steps:
            # Brokers that list again meanwhile know the copy instead, and nothing is missing.
            copy.parent.mkdir(parents=True, exist_ok=True)
            if lost.exists():
                lost.rename(copy)
            plan = await journal.plan()
            if not plan.steps:
                copy.rename(lost)
                await asyncio.sleep(1.5)

    done = await carry_out(await journal.doctors(), plan.hash)

    assert lost.exists()
    assert [result.problem for result in done.results] == [""]


async def test_a_selector_that_matches_nothing_is_refused(client, cluster):
    with pytest.raises(InvalidInput, match="nothing was examined"):
        await make_plan([JournalDoctor(client, StoreRegistry(cluster.file_root), "name=no/such/journal")])


async def test_a_journal_of_three_replicas_needs_no_recovery_when_one_disk_is_wiped(cluster, client):
    journal = Journal(cluster, client, "one-wiped/r3", 3)
    await journal.create()
    cluster.kill_broker(0)
    shutil.rmtree(cluster.data_dir / "brokers" / "broker-0")
    await asyncio.to_thread(cluster.start_broker, 0)
    await client.append(journal.name, b"on we go")

    assert (await journal.plan()).is_empty
    assert (await audit_journal(client, journal.stores, journal.name)).sound


async def test_journals_whose_brokers_lost_their_disks_go_on_once_that_is_approved(cluster, client):
    journals = [Journal(cluster, client, f"wiped/r{replication}", replication) for replication in (1, 3)]
    for journal in journals:
        await journal.create()
        assert await client.head(journal.name) == 4 * SIZE
    for number in range(BROKERS):
        cluster.kill_broker(number)
    for number in range(BROKERS):
        shutil.rmtree(cluster.data_dir / "brokers" / f"broker-{number}")
    await asyncio.gather(*(asyncio.to_thread(cluster.start_broker, number) for number in range(BROKERS)))

    for journal in journals:
        with pytest.raises(IndexHasGreaterOffset):
            await client.append(journal.name, b"x")
        plan = await journal.plan()
        (step,) = plan.steps
        assert (step.kind, step.facts) == (StepKind.RESET_HEAD, {"head": 3 * SIZE})
        assert "only if none of them can come back" in step.loses

        done = await carry_out(await journal.doctors(), plan.hash)
        assert done.succeeded, done
        assert (await client.append(journal.name, b"on we go")).begin == 3 * SIZE
        assert (await journal.plan()).is_empty


DAMAGES = [(damage, 1) for damage in ("first", "middle", "last", "all", "flipped", "recreated")]


@pytest.mark.parametrize(("damage", "replication"), [*DAMAGES, ("middle", 3), ("all", 3)])
async def test_every_damage_ends_in_a_green_audit_or_says_what_is_gone(cluster, client, hasty, replication, damage):
    journal = Journal(cluster, client, f"table/{damage}-r{replication}", replication)
    fragments = await journal.create()
    doctor = JournalDoctor(hasty, journal.stores, f"name={journal.name}")
    assert (await doctor.audit()).sound
    for fragment in fragments:
        await journal.dropped(fragment)
    chosen = {"first": fragments[:1], "middle": fragments[1:2], "last": fragments[2:3], "all": fragments}
    expected = [StepKind.ACCEPT_LOSS]
    match damage:
        case "flipped":
            content = journal.path(fragments[1]).read_bytes()
            journal.path(fragments[1]).write_bytes(content[:9] + b"x" + content[10:])
            expected = [StepKind.SET_ASIDE_FRAGMENT, StepKind.ACCEPT_LOSS]
        case "recreated":
            info = await journal.info()
            await hasty.apply([pb.ApplyRequest.Change(delete=journal.name, expect_mod_revision=info.mod_revision)])
            await hasty.apply([pb.ApplyRequest.Change(upsert=info.spec)])
            # What its brokers had not stored is gone with the journal.
            expected = [StepKind.RESET_HEAD, StepKind.ACCEPT_LOSS]
        case _:
            for fragment in chosen[damage]:
                journal.path(fragment).unlink()
            for fragment in chosen[damage]:
                await journal.forgotten(fragment.begin)

    plan = await make_plan([doctor])
    assert [step.kind for step in plan.steps] == expected, plan
    assert plan.losses
    again = await make_plan([doctor])
    assert again.hash == plan.hash, (plan, again)  # Reading it takes a while.
    done = await carry_out([doctor], plan.hash, verify=doctor.audit)

    assert done.report is not None
    assert done.report.errors == []
    assert done.succeeded, (done.results, done.remaining)
    assert (await make_plan([doctor])).is_empty
