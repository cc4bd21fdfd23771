"""Good copies that recovery finds: in stores, and in the caches and spools of real brokers.

The damage table on real brokers is in `tests/orchestration/verification/test_damage_table.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coranto.audit import audit_journal
from coranto.client import JournalClient, JournalInfo
from coranto.cluster import EmbeddedCluster
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.recovery import (
    ContentDoctor,
    Doctor,
    HeadDoctor,
    JournalDoctor,
    NotApproved,
    Plan,
    Recovery,
    StepKind,
    StepResult,
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

    async def stored_again(self, fragment: Fragment) -> None:
        async with asyncio.timeout(60):
            while True:
                if self.path(fragment).exists():
                    return
                await asyncio.sleep(0.05)

    async def known_only_locally(self, fragment: Fragment) -> None:
        """Wait until its brokers have the content, and know of no file in a store."""
        async with asyncio.timeout(60):
            while True:
                listed = [info.fragment for info in await self.client.fragments(self.name)]
                if [each.backing_store for each in listed if each.begin == fragment.begin] == [""]:
                    return
                await asyncio.sleep(0.05)

    async def dropped(self, fragment: Fragment) -> None:
        """Wait until no broker has a local file of the fragment."""
        folder = f"*-{hashlib.sha256(self.name.encode()).hexdigest()[:16]}"
        async with asyncio.timeout(60):
            while True:
                if not [*self.cluster.data_dir.glob(f"brokers/*/spools/{folder}/**/{fragment.begin:016x}.content")]:
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

    def doctor(self) -> JournalDoctor:
        return JournalDoctor(self.client, self.stores, f"name={self.name}")

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


async def test_content_that_a_store_loses_again_and_again_comes_back_from_its_brokers_spool(cluster, client):
    journal = Journal(cluster, client, "again/r1", 1)
    fragments = await journal.create(refresh_seconds=3600)
    lost = journal.path(fragments[1])

    # The broker stores it once more, and not a third time.
    lost.unlink()
    await journal.stored_again(fragments[1])
    lost.unlink()
    await journal.known_only_locally(fragments[1])

    plan = await journal.plan()
    assert [(step.kind, step.facts["begin"]) for step in plan.steps] == [(StepKind.RESTORE_FRAGMENT, SIZE)]
    assert "is missing from file:///, back from broker local/broker-" in plan.steps[0].action
    done = await carry_out(await journal.doctors(), plan.hash)
    assert done.succeeded, done
    assert lost.read_bytes() == b"B" * SIZE


async def flipped(journal: Journal, *numbers: int) -> JournalDoctor:
    """Damage stored fragments for good, once an audit has seen them, and return a doctor of the journal."""
    fragments = await journal.create(fragments=4)
    doctor = journal.doctor()
    assert (await doctor.audit()).sound
    for number in numbers:
        await journal.dropped(fragments[number])
        journal.path(fragments[number]).write_bytes(b"X" * SIZE)
    return doctor


async def test_a_recovery_that_was_killed_is_approved_anew_and_ends_the_same(cluster, client):
    journal = Journal(cluster, client, "night/killed", 1)
    doctor = await flipped(journal, 1, 2)
    plan = await make_plan([doctor])
    kinds = [StepKind.SET_ASIDE_FRAGMENT, StepKind.SET_ASIDE_FRAGMENT, StepKind.ACCEPT_LOSS]
    assert [step.kind for step in plan.steps] == kinds

    def kill(result: StepResult) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await carry_out([doctor], plan.hash, on_result=kill)
    with pytest.raises(NotApproved) as refused:
        await carry_out([journal.doctor()], plan.hash)
    left = refused.value.plan
    assert [step.kind for step in left.steps] == kinds[1:]
    done = await carry_out([journal.doctor()], left.hash, verify=doctor.audit)

    assert done.succeeded, done
    with pytest.raises(NotApproved, match="there is nothing to recover"):
        await carry_out([doctor], left.hash)


async def test_two_recoveries_at_once_end_as_one_does(cluster, client):
    journal = Journal(cluster, client, "night/twice", 1)
    doctor = await flipped(journal, 1)
    plan = await make_plan([doctor])

    ends = await asyncio.gather(
        *(carry_out([journal.doctor()], plan.hash, verify=doctor.audit) for _ in range(2)), return_exceptions=True
    )

    assert all(isinstance(end, NotApproved) or (isinstance(end, Recovery) and end.succeeded) for end in ends), ends
    assert any(isinstance(end, Recovery) for end in ends)
    assert (await doctor.audit()).sound
    assert (await make_plan([doctor])).is_empty


async def test_a_loss_after_the_approval_is_not_accepted(cluster, client):
    journal = Journal(cluster, client, "night/more", 1)
    doctor = await flipped(journal, 1)
    (last,) = [each for each in await journal.stored(4) if each.begin == 2 * SIZE]
    await journal.dropped(last)
    plan = await make_plan([doctor])

    def lose_more(result: StepResult) -> None:
        journal.path(last).unlink(missing_ok=True)

    done = await carry_out([doctor], plan.hash, verify=doctor.audit, on_result=lose_more)

    assert "more was lost since the plan was approved" in done.results[-1].problem
    assert not done.succeeded
    assert any(f"[{SIZE}, {3 * SIZE})" in loss.message for loss in done.remaining.losses)


async def test_a_file_that_somebody_has_made_good_meanwhile_is_not_set_aside(cluster, client):
    journal = Journal(cluster, client, "night/copy", 1)
    doctor = await flipped(journal, 1)
    plan = await make_plan([doctor])
    (damaged,) = (cluster.file_root / journal.name).glob(f"{SIZE:016x}-*")
    damaged.write_bytes(b"B" * SIZE)  # From a backup.

    assert await doctor.act(plan.steps[0]) == "left it alone: it is good now"
    assert (await make_plan([doctor])).is_empty
    assert (await doctor.audit()).sound
