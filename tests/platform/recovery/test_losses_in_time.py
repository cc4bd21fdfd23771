"""The damage table of journals in virtual time: a plan does not depend on the time it is made.

Each kind of damage is planned immediately, after brokers have listed their stores again, and an hour later. Then the
advice of the first plan is followed literally: its hash is approved, or the file that a loss names is restored.
`tests/consumers/recovery/test_losses_in_time.py` has the rows of consumers, and
`tests/orchestration/verification/test_damage_table.py` the table on real brokers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from coranto.audit import Kind
from coranto.client import ClientConfig, JournalClient
from coranto.errors import ContentGone
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.recovery import JournalDoctor, Loss, Plan, StepKind, carry_out, make_plan
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.wire import protocol_pb2 as pb
from tests.platform.audit.conftest import LENGTH, PIECE, Damaged, J
from tests.platform.recovery.in_time import HOUR, assert_succeeded, plans_at_all_times, play
from tests.sampling import sampled

STEPS = StepKind
Damage = Callable[[Damaged], Awaitable[None]]


def doctor(journal: Damaged) -> JournalDoctor:
    def connect(config: ClientConfig) -> JournalClient:
        return journal.cluster.client(retry_timeout=config.retry_timeout)

    return JournalDoctor(journal.client, journal.stores, "name:prefix=shop/", connect=connect)


async def plan_of(journal: Damaged) -> Plan:
    return await make_plan([doctor(journal)])


async def read_through_broker(journal: Damaged) -> None:
    """Load all stored content into a broker's cache, and wait until its spools have none."""
    await asyncio.sleep(30)
    async for _ in journal.client.read(J, 0, end_offset=journal.objects[-1].fragment.end, direct=False):
        pass


# -------------------------------------------------------------------------------------------------------------- damage


async def delete_cached(journal: Damaged) -> None:
    await read_through_broker(journal)
    journal.delete(journal.objects[1].fragment)


async def delete_first_cached(journal: Damaged) -> None:
    await read_through_broker(journal)
    journal.delete(journal.objects[0].fragment)


async def delete_last_cached(journal: Damaged) -> None:
    await read_through_broker(journal)
    journal.delete(journal.objects[-1].fragment)


async def delete(journal: Damaged) -> None:
    await asyncio.sleep(30)
    journal.delete(journal.objects[1].fragment)


async def delete_all(journal: Damaged) -> None:
    await asyncio.sleep(30)
    journal.delete(*(each.fragment for each in journal.objects))


async def change_byte(journal: Damaged) -> None:
    await asyncio.sleep(30)
    found = journal.objects[1]
    journal.put(found.fragment, b"X" + found.data[1:])


async def change_byte_cached(journal: Damaged) -> None:
    await read_through_broker(journal)
    found = journal.objects[1]
    journal.put(found.fragment, b"X" + found.data[1:])


async def copy_under_other_name(journal: Damaged) -> None:
    found = journal.objects[1]
    journal.put(replace(found.fragment, sum=sum_of(b"something else")), found.data)


async def wipe_all_disks(journal: Damaged) -> None:
    await journal.cluster.kill(0, expire=True)
    journal.wipe(0)
    await journal.cluster.start(0)
    await journal.cluster.ready(J)


async def delete_journal(journal: Damaged) -> None:
    await journal.cluster.create(journal.spec("shop/other"))  # Audits report it while another journal uses its store.
    (info,) = (await journal.client.list(f"name={J}")).journals
    await journal.client.apply([pb.ApplyRequest.Change(delete=J, expect_mod_revision=info.mod_revision)])
    await asyncio.sleep(30)


async def create_again(journal: Damaged) -> None:
    await delete_journal(journal)
    await journal.client.apply([pb.ApplyRequest.Change(upsert=journal.spec())])
    await asyncio.sleep(30)


async def shorten_retention(journal: Damaged) -> None:
    await journal.change(retention=Duration(seconds=1))
    for _ in range(200):
        await asyncio.sleep(5)
        if len(journal.objects) < 3:
            break
    await journal.change(retention=Duration(seconds=365 * 86400))


async def lose_store(journal: Damaged) -> None:
    journal.world.store.faults.refuse = 1.0


async def delete_records(journal: Damaged) -> None:
    notes = journal.world.store.notes
    for path in sorted(notes):
        del notes[path]


async def put_stray(journal: Damaged) -> None:
    far = 1 << 30
    journal.put(Fragment(J, far, far + 4, sum_of(b"fake"), Codec.NONE, STORE_URL), b"fake")
    await journal.later()  # Brokers have not listed it before, and it has no effect.
    await asyncio.sleep(90)  # The primary detects it with its next empty append.


@dataclass(frozen=True)
class Row:
    damage: Damage
    steps: list[StepKind]
    losses: list[str]
    """The kinds of the losses."""
    stored: bool = True
    """True if restoring the files that the losses name repairs everything."""


LOSS = str(Kind.CONTENT_LOST)
ROWS = [
    Row(delete_cached, [STEPS.RESTORE_FRAGMENT], []),
    Row(delete_first_cached, [STEPS.RESTORE_FRAGMENT], []),
    Row(delete_last_cached, [STEPS.RESTORE_FRAGMENT], []),
    Row(delete, [STEPS.ACCEPT_LOSS], [LOSS]),
    Row(delete_all, [STEPS.ACCEPT_LOSS], [LOSS] * 6),
    Row(change_byte, [STEPS.SET_ASIDE_FRAGMENT, STEPS.ACCEPT_LOSS], [LOSS]),
    Row(change_byte_cached, [STEPS.RESTORE_FRAGMENT], []),
    Row(copy_under_other_name, [STEPS.SET_ASIDE_FRAGMENT], []),
    Row(wipe_all_disks, [STEPS.RESET_HEAD, STEPS.ACCEPT_LOSS], [LOSS, str(Kind.HEAD_FELL)], stored=False),
    Row(delete_journal, [STEPS.ACCEPT_LOSS], [str(Kind.JOURNAL_GONE)], stored=False),
    Row(
        create_again,
        [STEPS.RESTORE_FRAGMENT, STEPS.RESET_HEAD, STEPS.ACCEPT_LOSS],
        [str(Kind.JOURNAL_RECREATED)],
        stored=False,
    ),
    Row(lose_store, [], [], stored=False),
    Row(shorten_retention, [STEPS.ACCEPT_LOSS], [LOSS] * 5),
    Row(delete_records, [STEPS.ACCEPT_LOSS], [str(Kind.MEMORY_DAMAGED)], stored=False),
    Row(put_stray, [STEPS.SET_ASIDE_FRAGMENT], []),
]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Damaged], Coroutine[Any, Any, None]]], None]:
    """Run a story about a journal on one broker after a first sound audit."""

    def run(story: Callable[[Damaged], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with Cluster(brokers=1) as cluster:
                journal = Damaged(cluster, 1)
                monkeypatch.setattr(
                    JournalClient,
                    "of",
                    classmethod(lambda cls, config: cluster.client(retry_timeout=config.retry_timeout)),
                )
                await cluster.create(journal.spec())
                await journal.fill()
                assert (await doctor(journal).audit()).sound
                await story(journal)

        play(main())

    return run


rows = pytest.mark.parametrize("row", sampled(ROWS, 4), ids=lambda row: row.damage.__name__)


@rows
def test_a_plan_does_not_change_with_time_and_its_first_hash_can_be_approved(played: Any, row: Row) -> None:
    async def story(journal: Damaged) -> None:
        async def audit() -> None:
            for finding in (await doctor(journal).audit()).errors:
                files = finding.facts.get("files", [])
                assert len(files) == len(set(files)), "the record and the index have the same file"

        await row.damage(journal)
        immediate = await plans_at_all_times(
            lambda: plan_of(journal), (row.steps, row.losses), listed=8, before_each=audit
        )
        for loss in immediate.losses:
            if loss.kind == LOSS:
                assert loss.file.startswith(f"{J}/{loss.begin:016x}-{loss.end:016x}-{loss.sum}")
                assert loss.store == STORE_URL
        if not row.steps:
            return
        done = await carry_out([doctor(journal)], immediate.hash, verify=doctor(journal).audit)
        assert_succeeded(done)
        await asyncio.sleep(HOUR)
        assert (await plan_of(journal)).is_empty

    played(story)


@pytest.mark.parametrize(
    "row", sampled((row for row in ROWS if row.losses and row.stored), 4), ids=lambda row: row.damage.__name__
)
@pytest.mark.parametrize("wait", [0.0, HOUR])
def test_restoring_the_files_named_by_losses_repairs_everything(played: Any, row: Row, wait: float) -> None:
    async def story(journal: Damaged) -> None:
        await row.damage(journal)
        await asyncio.sleep(wait)
        plan = await plan_of(journal)
        for loss in plan.losses:
            journal.put(named(loss), PIECE)
        await journal.later()
        assert (await plan_of(journal)).is_empty
        assert (await doctor(journal).audit()).sound

    played(story)


def named(loss: Loss) -> Fragment:
    return Fragment(J, loss.begin, loss.end, bytes.fromhex(loss.sum), Codec.NONE, loss.store)


@pytest.mark.parametrize("wait", [0.0, HOUR])
def test_a_deleted_journal_is_restored_by_the_advice(played: Any, wait: float) -> None:
    async def story(journal: Damaged) -> None:
        await delete_journal(journal)
        await asyncio.sleep(wait)
        (loss,) = (await plan_of(journal)).losses
        assert loss.kept_at == "local/broker-0"
        assert "create it again with its name and stores, and plan again" in loss.message
        await journal.client.apply([pb.ApplyRequest.Change(upsert=journal.spec())])
        await asyncio.sleep(30 + wait)
        plan = await plan_of(journal)
        done = await carry_out([doctor(journal)], plan.hash, verify=doctor(journal).audit)
        assert done.succeeded, done
        assert (await journal.client.append(J, b"continues")).begin == journal.head
        content = b"".join([chunk.content async for chunk in journal.client.read(J, 0, end_offset=journal.head)])
        assert content == PIECE * (journal.head // LENGTH)

    played(story)


@pytest.mark.parametrize("wait", [0.0, HOUR])
def test_a_read_across_a_gap_ends_promptly(played: Any, wait: float) -> None:
    async def story(journal: Damaged) -> None:
        await delete(journal)
        await journal.later()
        await asyncio.sleep(wait)
        begun = journal.clock.now()
        with pytest.raises(ContentGone) as gone:
            await journal.client.read_all(J, 0, 3 * LENGTH)
        assert gone.value.gone == {J: (LENGTH, 2 * LENGTH)}
        assert journal.clock.now() - begun < 5

    played(story)
