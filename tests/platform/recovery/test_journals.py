"""Intact copies that recovery finds: in stores, and in the caches and spools of real brokers.

The damage table on real brokers is in `tests/orchestration/verification/test_damage_table.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from coranto.audit import audit_journal
from coranto.client import JournalClient, JournalInfo
from coranto.cluster import EmbeddedCluster
from coranto.errors import ContentGone, InvalidInput, OffsetNotYetAvailable
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

BROKERS = 3
SIZE = 3000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with EmbeddedCluster(folder, BROKERS, lease_seconds=60, supervise=False, etcd_fsync=False) as running:
        yield running


@pytest.fixture
async def client(cluster: EmbeddedCluster) -> AsyncIterator[JournalClient]:
    # Doctors read damaged content until the retry timeout has run out, so only appends have a long one.
    async with JournalClient(",".join(cluster.info.endpoints), file_root=cluster.file_root, retry_timeout=1) as made:
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
        for number in range(fragments + 1):  # The last one is not stored.
            await self.client.append(self.name, bytes([65 + number]) * SIZE, retry_timeout=60)
        return await self.stored(fragments)

    async def stored(self, count: int) -> list[Fragment]:
        """Wait until the index has exactly `count` stored fragments, and return them."""
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
        """Wait until its brokers have the content, and list no stored file."""
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


async def test_a_damaged_fragment_is_restored_from_a_brokers_copy(cluster, client):
    journal = Journal(cluster, client, "flipped/r3", 3)
    fragments = await journal.create()
    # Every broker of the journal has served the fragment without a local file, so each one has it in its cache.
    await journal.dropped(fragments[1])
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


async def test_a_deleted_fragment_is_restored_from_a_spool(cluster, client):
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


async def test_a_fragment_is_restored_from_another_store(cluster, client):
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
            # If brokers list the stores before the plan, they find the copy, and nothing is missing.
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


async def test_content_lost_repeatedly_by_a_store_is_restored_from_the_spool(cluster, client):
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
    """Damage stored fragments permanently, after an audit has seen them, and return a doctor of the journal."""
    fragments = await journal.create(fragments=4)
    doctor = journal.doctor()
    assert (await doctor.audit()).sound
    for number in numbers:
        await journal.dropped(fragments[number])
        journal.path(fragments[number]).write_bytes(b"X" * SIZE)
    return doctor


@pytest.mark.exhaustive
async def test_a_killed_recovery_needs_a_new_approval_and_has_the_same_result(cluster, client):
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


@pytest.mark.exhaustive
async def test_concurrent_recoveries_have_the_result_of_one(cluster, client):
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


@pytest.mark.exhaustive
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
    assert [(loss.begin, loss.end) for loss in done.remaining.losses] == [(SIZE, 2 * SIZE), (2 * SIZE, 3 * SIZE)]


async def test_a_file_restored_after_the_plan_is_not_set_aside(cluster, client):
    journal = Journal(cluster, client, "night/copy", 1)
    doctor = await flipped(journal, 1)
    plan = await make_plan([doctor])
    (damaged,) = (cluster.file_root / journal.name).glob(f"{SIZE:016x}-*")
    damaged.write_bytes(b"B" * SIZE)  # From a backup.

    assert await doctor.act(plan.steps[0]) == "left it alone: it is good now"
    assert (await make_plan([doctor])).is_empty
    assert (await doctor.audit()).sound


async def removed_from_indexes(journal: Journal, fragment: Fragment) -> None:
    """Wait until every broker has listed the store without the fragment."""
    for endpoint in (await journal.info()).route.endpoints:
        async with JournalClient(endpoint, route_cache=0) as broker:

            async def known(broker: JournalClient = broker) -> list[int]:
                return [each.fragment.begin for each in await broker.fragments(journal.name)]

            await eventually(known, lambda begins: fragment.begin not in begins)


Found = TypeVar("Found")


async def eventually(find: Callable[[], Awaitable[Found]], holds: Callable[[Found], bool]) -> Found:
    """Return the result of `find` as soon as it satisfies `holds`."""
    async with asyncio.timeout(60):
        while True:
            if holds(found := await find()):
                return found
            await asyncio.sleep(0.1)


async def test_a_fragment_missing_from_all_indexes_is_restored_from_a_cache(cluster, client):
    """The audit has its record, and its broker has it in its cache by its SHA-1."""
    journal = Journal(cluster, client, "forgotten/r1", 1)
    fragments = await journal.create()
    assert (await journal.doctor().audit()).sound
    await journal.dropped(fragments[1])
    content = [chunk async for chunk in client.read(journal.name, SIZE, end_offset=2 * SIZE, direct=False)]
    assert b"".join(chunk.content for chunk in content) == b"B" * SIZE
    lost = journal.path(fragments[1])
    lost.unlink()

    immediate = await make_plan([journal.doctor()])
    assert [(step.kind, step.facts["begin"]) for step in immediate.steps] == [(StepKind.RESTORE_FRAGMENT, SIZE)]
    await removed_from_indexes(journal, fragments[1])
    later = await make_plan([journal.doctor()])
    assert (later.steps, later.losses) == (immediate.steps, ())
    assert later.hash == immediate.hash, "the damage is the same"
    done = await carry_out([journal.doctor()], immediate.hash, verify=journal.doctor().audit)
    assert done.succeeded, done
    assert lost.read_bytes() == b"B" * SIZE


@pytest.mark.exhaustive
async def test_a_loss_is_approved_by_the_first_plan_and_names_the_file(cluster, client):
    journal = Journal(cluster, client, "approved/r1", 1)
    fragments = await journal.create()
    await journal.dropped(fragments[1])
    lost = journal.path(fragments[1])
    lost.unlink()

    plan = await make_plan([journal.doctor()])  # No audit has seen this journal before.
    (loss,) = plan.losses
    assert (loss.kind, loss.begin, loss.end) == ("content_lost", SIZE, 2 * SIZE)
    assert (loss.store, loss.file, loss.sum) == ("file:///", fragments[1].content_path, fragments[1].sum.hex())
    assert (await make_plan([journal.doctor()])).hash == plan.hash
    await removed_from_indexes(journal, fragments[1])
    assert (await make_plan([journal.doctor()])).hash == plan.hash
    for read in (client.read_all(journal.name, 0, 4 * SIZE), client.read_all(journal.name, SIZE + 1, 2 * SIZE)):
        with pytest.raises(ContentGone) as gone:
            await read
        assert gone.value.left == {journal.name: 2 * SIZE}
    done = await carry_out([journal.doctor()], plan.hash, verify=journal.doctor().audit)
    assert done.succeeded, done

    # The plan's advice still holds: the file brings the content back.
    (cluster.file_root / loss.file).write_bytes(b"B" * SIZE)

    async def offsets() -> list[int]:
        try:
            return [chunk.offset async for chunk in client.read(journal.name, 0)]
        except OffsetNotYetAvailable:  # Brokers have neither the end of the gap nor the file for a moment.
            return []

    await eventually(offsets, lambda found: found[:3] == [0, SIZE, 2 * SIZE])


async def test_a_deleted_journal_is_restored_by_the_advice_of_its_plan(cluster, client):
    journal = Journal(cluster, client, "accident/r1", 1)
    await journal.create()
    assert (await journal.doctor().audit()).sound
    info = await journal.info()
    await client.apply([pb.ApplyRequest.Change(delete=journal.name, expect_mod_revision=info.mod_revision)])

    async def notes() -> list[Path]:
        return [*cluster.data_dir.glob("brokers/*/deleted/accident_r1-*/*/deleted.json")]

    await eventually(notes, bool)
    plan = await make_plan([journal.doctor()])
    (loss,) = plan.losses
    assert loss.kind == "journal_gone"
    assert f"keeps [{3 * SIZE}, {4 * SIZE})" in loss.message
    assert "create it again with its name and stores, and plan again" in loss.message
    assert loss.kept_at.startswith("local/broker-")
    assert (await make_plan([journal.doctor()])).hash == plan.hash

    await client.apply([pb.ApplyRequest.Change(upsert=info.spec)])
    first = [StepKind.RESTORE_FRAGMENT, StepKind.RESET_HEAD]
    plan = await eventually(
        lambda: make_plan([journal.doctor()]), lambda found: [step.kind for step in found.steps][:2] == first
    )
    assert plan.steps[1].facts["head"] == 4 * SIZE
    assert [each.kind for each in plan.losses] == ["journal_recreated"]
    done = await carry_out([journal.doctor()], plan.hash, verify=journal.doctor().audit)

    assert done.succeeded, done
    content = b"".join([chunk.content async for chunk in client.read(journal.name, 0)])
    assert content == b"".join(bytes([65 + number]) * SIZE for number in range(4))
    assert (await client.append(journal.name, b"continues")).begin == 4 * SIZE
