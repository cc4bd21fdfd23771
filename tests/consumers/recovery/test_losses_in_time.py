"""The damage table of consumers in virtual time: a plan does not depend on the time when it is made.

Each kind of damage is planned immediately, after brokers have listed their stores again, and an hour later, with cheap
and deep audits in between. Then the test follows the first plan literally: it approves the hash, or does as a loss or a
remark advises. `tests/platform/recovery/test_losses_in_time.py` has the rows of journals.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.duration_pb2 import Duration
from sqlalchemy import update
from typer.testing import CliRunner

from coranto.audit import Kind
from coranto.audit.clocks import CorrectedClock
from coranto.client import ClientConfig, JournalClient
from coranto.errors import CorantoError
from coranto.labels import CONTENT_TYPE, CONTINUE, DATA_LOSS, JSON_LINES, label_set
from coranto.messages import Checkpoint
from coranto.recovery import JournalDoctor, Plan, StepKind, carry_out, make_plan
from coranto.recovery.heads import reset_head
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.object_store import SimStores
from coranto.testing.sim.timeline import Process
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.cli.consumer import app as consumer_commands
from coranto_consumers.outputs.dead_letters import DeadLetters, dead_letter_table
from coranto_consumers.runtime.application import Shard
from coranto_consumers.runtime.columns import Columns, MessageBatch
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.testing import running_shard
from coranto_consumers.stores import SqlShardStore
from coranto_consumers.stores.merge import Replace, plan_merge
from coranto_consumers.stores.sql import CHECKPOINTS
from coranto_consumers.stores.staging import StageWriter, stage_of
from tests.consumers.audit.conftest import EXPECTATIONS, ORDERS, SPEC, Orders, Scene
from tests.consumers.recovery.test_stores import doctor, write_checkpoint
from tests.platform.recovery.in_time import HOUR, assert_succeeded, plans_at_all_times, play
from tests.sampling import sampled

STEPS, SHARD = StepKind, "shard-orders"
TOTAL = 24
"""The number of orders in the tables after all are consumed."""
DAY = 86400.0


class Timed(Scene):
    """A consumer that has committed two transactions, each audited as sound, and has four orders to read."""

    def __init__(self, cluster: Cluster, folder: Path, ahead: float, expect: tuple[str, ...] = EXPECTATIONS) -> None:
        self.cluster = cluster
        self.world = cluster._world
        self.process = Process(self.world.timeline, "audit")
        self.database, self.backup = folder / "store.db", folder / "backup.db"
        clock = CorrectedClock(SimClock(self.world.timeline), -ahead)
        super().__init__(cluster.client(retry_timeout=3), f"sqlite:///{self.database}", clock)
        self.expect = expect

    async def create(self) -> None:
        for name in ("in/one", "in/two", "out/one"):
            await self.cluster.create(self.spec(name))

    async def begin(self) -> None:
        await self.publish(10)
        await self.consume()
        self.back_up()
        self.old = self.checkpoint
        assert (await self.audit()).sound
        await self.publish(10)
        await self.consume()
        assert (await self.audit()).sound
        await self.publish(4)
        await asyncio.sleep(6)

    def spec(self, name: str) -> pb.JournalSpec:
        fragment = pb.JournalSpec.Fragment(
            length=1024, compression_codec=pb.NONE, stores=[STORE_URL], refresh_interval=Duration(seconds=30)
        )
        labels = label_set({CONTENT_TYPE: JSON_LINES})
        return pb.JournalSpec(name=name, replication=1, flags=pb.JournalSpec.O_RDWR, fragment=fragment, labels=labels)

    @property
    def checkpoint(self) -> Checkpoint:
        found = self.store.read(SHARD)
        assert found is not None
        return found.checkpoint

    def back_up(self) -> None:
        self.store.engine.dispose()
        shutil.copyfile(self.database, self.backup)

    def restore(self) -> None:
        self.store.engine.dispose()
        shutil.copyfile(self.backup, self.database)

    def stage(self, fence: int) -> None:
        stage = stage_of(self.store, plan_merge(ORDERS, ["id", "cents"], ["id"], {"cents": Replace()}))
        with StageWriter(self.store.url, stage, SHARD, fence, f"attempt-{fence}") as writer:
            writer.write([{"id": "x", "cents": 1}] * 3)

    async def plan(self) -> Plan:
        return await make_plan([doctor(self)])

    async def audits(self) -> None:
        """Audit as schedules do: cheaply, then deeply."""
        await self.audit(deep=False)
        await self.audit()

    async def change(self, change: pb.ApplyRequest.Change) -> None:
        await self.client.apply([change])
        await asyncio.sleep(30)

    async def delete_source(self) -> None:
        (info,) = (await self.client.list("name=in/one")).journals
        await self.change(pb.ApplyRequest.Change(delete="in/one", expect_mod_revision=info.mod_revision))

    async def create_source(self) -> None:
        await self.change(pb.ApplyRequest.Change(upsert=self.spec("in/one")))

    def empty_store(self) -> None:
        objects = self.world.store.objects
        for path in [path for path, each in objects.items() if each.fragment.journal == "in/one"]:
            del objects[path]


# -------------------------------------------------------------------------------------------------------------- damage


async def set_forward(scene: Timed) -> None:
    source = scene.checkpoint.sources["in/one"]
    moved = replace(source, read_through=await scene.client.head("in/one"))
    write_checkpoint(scene, replace(scene.checkpoint, sources={**scene.checkpoint.sources, "in/one": moved}))


async def set_forward_over_messages(scene: Timed) -> None:
    """Contradict only the tables, not the journals."""
    await scene.consume()
    scene.execute("DELETE FROM orders WHERE rowid > 20")


async def set_beyond_the_head(scene: Timed) -> None:
    source = scene.checkpoint.sources["in/one"]
    moved = replace(source, read_through=1 << 20)
    write_checkpoint(scene, replace(scene.checkpoint, sources={**scene.checkpoint.sources, "in/one": moved}))


async def set_back(scene: Timed) -> None:
    write_checkpoint(scene, scene.old)


async def delete_row(scene: Timed) -> None:
    scene.execute("DELETE FROM gazette_checkpoints")


async def overwrite(scene: Timed) -> None:
    with scene.store.engine.begin() as connection:
        connection.execute(update(CHECKPOINTS).values(checkpoint=b"\xff"))


async def delete_row_and_leave_staged_rows(scene: Timed) -> None:
    scene.stage(1)
    scene.stage(3)
    await delete_row(scene)


async def delete_row_before_an_audit(scene: Timed) -> None:
    await scene.consume()
    await delete_row(scene)


async def overwrite_before_an_audit(scene: Timed) -> None:
    await scene.consume()
    await overwrite(scene)


async def set_forward_before_an_audit(scene: Timed) -> None:
    await scene.consume()
    await scene.publish(4)
    await set_forward(scene)


async def restore_backup(scene: Timed) -> None:
    scene.restore()


async def restore_backup_of_a_running_consumer(scene: Timed) -> None:
    """Keep later acknowledgements of the same writer in the output journal."""
    async with scene.running() as shard:
        await shard.read_through(await scene.heads())
        await shard.read_through(await scene.heads())
        scene.back_up()
        for _ in range(2):
            await scene.publish(10)
            await shard.read_through(await scene.heads())
        await shard.finish()
    assert (await scene.audit()).sound
    scene.restore()


async def restore_backup_and_lose_rows(scene: Timed) -> None:
    scene.restore()
    scene.execute("DELETE FROM orders WHERE cents = 104")


async def delete_rows(scene: Timed) -> None:
    scene.execute("DELETE FROM orders WHERE cents = 104")


async def change_a_row(scene: Timed) -> None:
    scene.execute("UPDATE orders SET cents = 1 WHERE cents = 104 AND rowid < 10")


async def restore_tables_alone(scene: Timed) -> None:
    scene.execute("DELETE FROM orders WHERE rowid > 7")


async def lose_acknowledgements(scene: Timed) -> None:
    builder = scene.producer()
    builder.add("out/one", {"cents": 1})
    await scene.flush(builder)
    write_checkpoint(scene, replace(scene.checkpoint, ack_intents=builder.ack_intents()))


async def leave_staged_rows(scene: Timed) -> None:
    scene.stage(1)


async def lose_unread_content(scene: Timed) -> None:
    """Let retention remove content before the consumer reads it."""
    (info,) = (await scene.client.list("name=in/one")).journals
    info.spec.fragment.retention.FromSeconds(1)
    await scene.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
    for _ in range(6):
        await scene.publish(30)
    await asyncio.sleep(1200)


async def delete_source(scene: Timed) -> None:
    await scene.delete_source()


async def create_source_again(scene: Timed) -> None:
    """Create an empty journal, which ends below the checkpoint."""
    await scene.delete_source()
    scene.empty_store()
    await scene.create_source()


async def create_source_again_and_fill_it(scene: Timed) -> None:
    """Fill the new journal with other content up to the checkpoint and beyond."""
    await create_source_again(scene)
    await scene.publish(40, "in/one")


async def lose_read_content(scene: Timed) -> None:
    """Lose the disks, and continue the journals at the end of their stores."""
    await scene.consume()
    await scene.publish(2, "in/one")
    await scene.consume()
    assert (await scene.audit()).sound
    machine = scene.cluster._machine(0)
    await scene.cluster.kill(0, expire=True)
    disk = machine.disk.for_process(scene.process)
    for path in machine.disk.paths():
        disk.remove(Path(path))
    await scene.cluster.start(0)
    await scene.cluster.ready("in/one", "in/two", "out/one")
    for name in ("in/one", "in/two", "out/one"):
        with contextlib.suppress(CorantoError):  # The journal has no content above its store.
            await reset_head(scene.client, name)


@dataclass(frozen=True)
class Row:
    damage: Callable[[Timed], Awaitable[None]]
    steps: list[StepKind]
    losses: list[Kind]
    orders: int = 0
    """The number of orders in the tables after all are consumed; 0 if the consumer cannot continue."""


RESTORED, TAKEN, ACCEPTED = [STEPS.RESTORE_CHECKPOINT], [STEPS.TAKE_CHECKPOINT, STEPS.ACCEPT_LOSS], [STEPS.ACCEPT_LOSS]
FAILED = [Kind.EXPECTATION_FAILED] * 2
ROWS = [
    Row(set_forward, RESTORED, [], TOTAL),
    Row(set_forward_over_messages, RESTORED, [], TOTAL),
    Row(set_beyond_the_head, RESTORED, [], TOTAL),
    Row(set_back, RESTORED, [], TOTAL),
    Row(delete_row, RESTORED, [], TOTAL),
    Row(overwrite, RESTORED, [], TOTAL),
    Row(delete_row_and_leave_staged_rows, [*RESTORED, *[STEPS.DELETE_STAGED_ROWS] * 2], [], TOTAL),
    Row(delete_row_before_an_audit, [], [Kind.CHECKPOINT_GONE]),
    Row(overwrite_before_an_audit, [], [Kind.CHECKPOINT_UNREADABLE]),
    Row(set_forward_before_an_audit, ACCEPTED, [*FAILED, Kind.CHECKPOINT_DIFFERS], TOTAL + 4 - 2),
    Row(restore_backup, TAKEN, [], TOTAL),
    Row(restore_backup_of_a_running_consumer, TAKEN, [], TOTAL + 20),
    Row(
        restore_backup_and_lose_rows,
        ACCEPTED,
        [*FAILED, Kind.CHECKPOINT_GONE, *[Kind.CHECKPOINT_SET_BACK] * 2],
        TOTAL - 1,
    ),
    Row(delete_rows, ACCEPTED, FAILED, TOTAL - 2),
    Row(change_a_row, ACCEPTED, FAILED[1:], TOTAL),
    Row(restore_tables_alone, ACCEPTED, FAILED, TOTAL - 13),
    Row(lose_acknowledgements, [STEPS.APPEND_ACKNOWLEDGEMENTS], [], TOTAL),
    Row(leave_staged_rows, [STEPS.DELETE_STAGED_ROWS], [], TOTAL),
    Row(lose_unread_content, ACCEPTED, [Kind.UNREAD_CONTENT_GONE], 127),
    Row(delete_source, ACCEPTED, [Kind.JOURNAL_GONE]),
    Row(create_source_again, ACCEPTED, [Kind.JOURNAL_RECREATED]),
    Row(create_source_again_and_fill_it, ACCEPTED, [Kind.JOURNAL_RECREATED]),
]
"""A consumer continues after each damage, unless its checkpoint or its journal is missing."""
rows = pytest.mark.parametrize("row", sampled(ROWS, 6), ids=lambda row: row.damage.__name__)
Story = Callable[[Timed], Coroutine[Any, Any, None]]
Played = Callable[..., None]


@pytest.fixture
def played(tmp_path: Path) -> Played:
    """Run a story with a consumer whose clock is ahead of the brokers' by some seconds."""

    def run(story: Story, ahead: float = 0.0) -> None:
        async def main() -> None:
            async with Cluster(brokers=1) as cluster:
                scene = Timed(cluster, tmp_path, ahead)
                await scene.create()
                await scene.begin()
                await story(scene)

        play(main())

    return run


async def approve(scene: Timed, plan: Plan) -> None:
    assert_succeeded(await carry_out([doctor(scene)], plan.hash, verify=scene.audit))
    await asyncio.sleep(HOUR)
    await scene.audits()
    assert (await scene.plan()).is_empty


async def consumed(scene: Timed) -> int:
    """Consume all messages, and return the number of orders in the tables."""
    await scene.consume()
    report = await scene.audit()
    assert report.sound, report.errors
    with scene.store.engine.connect() as connection:
        return len(connection.execute(ORDERS.select()).fetchall())


@rows
def test_a_plan_is_stable_over_time_and_its_first_hash_can_be_approved(played: Played, row: Row) -> None:
    async def story(scene: Timed) -> None:
        await row.damage(scene)
        expected = row.steps, [str(kind) for kind in row.losses]
        plan = await plans_at_all_times(scene.plan, expected, listed=40, before_each=scene.audits)
        if row.steps:
            await approve(scene, plan)
        if row.orders:
            assert await consumed(scene) == row.orders
            await asyncio.sleep(HOUR)
            assert (await scene.plan()).is_empty

    played(story)


# ------------------------------------------------------------------------------------------------- advice of plans

WAITS = pytest.mark.parametrize("wait", [0.0, HOUR])


def run_printed(message: str, monkeypatch: pytest.MonkeyPatch, scene: Timed) -> None:
    """Run the `coranto consumer` command that a message contains."""
    (words,) = re.findall(r"`coranto consumer ([^`]*)`", message)
    monkeypatch.setenv("CORANTO_STORE_URL", scene.store.url)
    done = CliRunner().invoke(consumer_commands, words.split())
    assert done.exit_code == 0, done.output


@WAITS
@pytest.mark.parametrize("damage", [delete_row_before_an_audit, overwrite_before_an_audit])
def test_restoring_the_whole_database_ends_a_loss_without_proof(
    played: Played, damage: Callable[[Timed], Awaitable[None]], wait: float
) -> None:
    async def story(scene: Timed) -> None:
        await damage(scene)
        await asyncio.sleep(wait)
        await scene.audits()
        plan = await scene.plan()
        assert not any(step.kind is STEPS.ACCEPT_LOSS for step in plan.steps), "the loss cannot be accepted"
        assert any("restore the whole database from a backup" in remark.message for remark in plan.remarks)
        scene.restore()
        plan = await plans_at_all_times(scene.plan, (TAKEN, []), listed=40, before_each=scene.audits)
        await approve(scene, plan)
        assert await consumed(scene) == TOTAL

    played(story)


@WAITS
def test_a_checkpoint_beyond_the_end_of_its_journal_is_not_restored(played: Played, wait: float) -> None:
    async def story(scene: Timed) -> None:
        await lose_read_content(scene)
        await asyncio.sleep(wait)
        await scene.audits()
        plan = await scene.plan()
        assert str(Kind.CHECKPOINT_AHEAD) in [loss.kind for loss in plan.losses]
        assert STEPS.RESTORE_CHECKPOINT not in [step.kind for step in plan.steps]
        assert any("restore the whole database from a backup" in remark.message for remark in plan.remarks)
        scene.restore()
        plan = await plans_at_all_times(scene.plan, (TAKEN, []), listed=40, before_each=scene.audits)
        await approve(scene, plan)
        assert await consumed(scene) == 10 + 5 + 2, "the remaining content acknowledges 17 orders"

    played(story)


def test_a_checkpoint_in_lost_content_is_found_after_the_journal_has_grown_past_it(played: Played) -> None:
    async def story(scene: Timed) -> None:
        await lose_read_content(scene)
        through = scene.checkpoint.sources["in/one"].read_through
        await scene.publish(40, "in/one")
        assert await scene.client.head("in/one") > through
        await scene.audits()
        plan = await scene.plan()
        (ahead,) = [loss for loss in plan.losses if loss.kind == Kind.CHECKPOINT_AHEAD and "in/one" in loss.message]
        assert "its head was reset" in ahead.message
        assert STEPS.RESTORE_CHECKPOINT not in [step.kind for step in plan.steps]

    played(story)


@WAITS
def test_following_the_advice_restores_a_deleted_source(
    played: Played, monkeypatch: pytest.MonkeyPatch, wait: float
) -> None:
    async def story(scene: Timed) -> None:
        cluster, stores = scene.cluster, SimStores(scene.world.store, scene.world.network, "client", scene.process)
        monkeypatch.setattr(
            JournalClient, "of", classmethod(lambda cls, config: cluster.client(retry_timeout=config.retry_timeout))
        )

        def journals() -> JournalDoctor:
            def connect(config: ClientConfig) -> JournalClient:
                return cluster.client(retry_timeout=config.retry_timeout)

            return JournalDoctor(scene.client, stores, "name=in/one", connect=connect)

        assert (await journals().audit()).sound
        await scene.delete_source()
        await asyncio.sleep(wait)
        (loss,) = (await scene.plan()).losses
        assert "create it again with its name and its stores" in loss.message
        assert "`coranto recover plan in/one`" in loss.message
        await scene.create_source()
        await asyncio.sleep(wait)
        plan = await make_plan([journals()])
        assert_succeeded(await carry_out([journals()], plan.hash, verify=journals().audit))
        await scene.audits()
        (loss,) = (await scene.plan()).losses
        assert loss.kind == Kind.JOURNAL_RECREATED
        run_printed(loss.message, monkeypatch, scene)
        report = await scene.audit()
        assert report.sound, report.errors
        assert (await scene.plan()).is_empty
        assert await consumed(scene) == TOTAL

    played(story)


@pytest.mark.parametrize("approved_first", [True, False])
def test_a_consumer_restarted_on_a_recreated_journal_is_sound_after_acceptance(
    played: Played, approved_first: bool
) -> None:
    async def story(scene: Timed) -> None:
        await create_source_again(scene)
        plan = await scene.plan()
        assert f"label {DATA_LOSS}={CONTINUE}" in plan.losses[0].message
        if approved_first:
            await approve(scene, plan)
        spec = type(SPEC).FromString(SPEC.SerializeToString())
        spec.labels.CopyFrom(label_set({DATA_LOSS: CONTINUE}))
        await scene.publish(6, "in/one")
        async with running_shard(scene.app, spec, scene.client, clock=scene.clock) as shard:
            await shard.read_through(await scene.heads())
            await shard.finish()
        if not approved_first:
            plan = await plans_at_all_times(
                scene.plan, (ACCEPTED, [str(Kind.JOURNAL_RECREATED)]), listed=40, before_each=scene.audits
            )
            await approve(scene, plan)
        await scene.publish(6)
        assert await consumed(scene) == 20 + 2 + 6 + 6, "the two unread orders of in/one are lost"

    played(story)


def test_further_retention_is_a_new_loss(played: Played) -> None:
    async def story(scene: Timed) -> None:
        await lose_unread_content(scene)
        plan = await scene.plan()
        (first,) = plan.losses
        await approve(scene, plan)
        for _ in range(6):
            await scene.publish(30)
        await asyncio.sleep(1200)
        (more,) = (await scene.plan()).losses
        assert (first.begin, more.begin) == (scene.checkpoint.offsets["in/one"], first.end)

    played(story)


def test_only_the_approved_loss_is_accepted(played: Played) -> None:
    async def story(scene: Timed) -> None:
        await delete_rows(scene)
        made = doctor(scene)
        plan = await make_plan([made])
        scene.execute("DELETE FROM orders WHERE cents = 105")
        with pytest.raises(CorantoError, match="more was lost since the plan was approved, so plan again"):
            await made.act(plan.steps[-1])
        (again,) = (await scene.plan()).steps
        assert again.kind is STEPS.ACCEPT_LOSS, "the refused step accepted a loss"

    played(story)


def test_a_restored_checkpoint_keeps_the_identity_of_its_consumer(played: Played) -> None:
    async def story(scene: Timed) -> None:
        before = replace(scene.checkpoint, batch='{"number": 7}')
        assert before.identity.outputs, "shards record their outputs"
        write_checkpoint(scene, before)
        assert (await scene.audit()).sound
        await scene.audit(deep=False)
        await delete_row(scene)
        await approve(scene, await scene.plan())
        assert (scene.checkpoint.identity, scene.checkpoint.batch) == (before.identity, before.batch)
        assert {each.journal_id for each in scene.checkpoint.sources.values()} == {
            each.journal_id for each in before.sources.values()
        }

    played(story)


@pytest.mark.parametrize("ahead", [DAY, -DAY])
def test_audits_do_not_depend_on_the_clock_of_the_consumer(played: Played, ahead: float) -> None:
    """By these clocks, stores receive acknowledgements a day before or after they are made."""

    async def story(scene: Timed) -> None:
        await lose_acknowledgements(scene)
        plan = await plans_at_all_times(
            scene.plan, ([STEPS.APPEND_ACKNOWLEDGEMENTS], []), listed=40, before_each=scene.audits
        )
        await approve(scene, plan)
        for _ in range(30):
            await scene.publish(10, "out/one")
        await asyncio.sleep(HOUR)
        report = await scene.audit()
        assert report.sound, report.errors
        assert (await scene.plan()).is_empty

    played(story, ahead)


# ------------------------------------------------------------------------------------------------------- dead letters

LETTERS = dead_letter_table("letters")
WITH_LETTERS = (
    "SELECT (SELECT COUNT(*) FROM orders) + (SELECT COUNT(*) FROM letters WHERE CAST(line AS TEXT) LIKE '{%') "
    "== messages",
    "SELECT SUM(cents) FROM orders == sum(/cents)",
)


class Lettered(Orders):
    """An application with dead letters for orders with non-numeric cents, and for lines that are not messages."""

    def new_store(self, shard: Shard) -> SqlShardStore:
        return SqlShardStore(self.database, ORDERS, LETTERS)

    def new_message(self, journal: pb.JournalSpec) -> Any:
        return Columns(pa.schema([("cents", pa.int64())]), misfits=DeadLetters(table=LETTERS))

    def consume_batch(self, shard: Shard, store: SqlShardStore, batch: MessageBatch, publisher: ShardPublisher) -> None:
        names = [f"{batch.journal}/{offset}" for offset in batch.positions["offset"].to_pylist()]
        store.insert_batch(ORDERS, pa.RecordBatch.from_pydict({"id": names, "cents": batch.rows["cents"]}))


async def delete_letters(scene: Timed) -> None:
    scene.execute("DELETE FROM letters")


LETTERED = [
    Row(delete_letters, ACCEPTED, FAILED[:1], TOTAL + 1),
    Row(set_back, RESTORED, [], TOTAL + 1),
    Row(delete_row, RESTORED, [], TOTAL + 1),
    Row(restore_backup, TAKEN, [], TOTAL + 1),
]


@pytest.mark.parametrize("row", LETTERED, ids=lambda row: row.damage.__name__)
def test_dead_letters_are_not_damage_and_are_not_lost(tmp_path: Path, row: Row) -> None:
    async def story() -> None:
        async with Cluster(brokers=1) as cluster:
            scene = Timed(cluster, tmp_path, 0.0, expect=WITH_LETTERS)
            scene.app = Lettered(scene.store)
            await scene.create()
            await scene.client.append("in/one", b"no message\n")
            for cents in ("many", 5):
                builder = scene.producer()
                builder.add("in/one", {"cents": cents})
                await scene.commit(builder)
            await scene.begin()
            await row.damage(scene)
            expected = row.steps, [str(kind) for kind in row.losses]
            await approve(scene, await plans_at_all_times(scene.plan, expected, listed=40, before_each=scene.audits))
            assert await consumed(scene) == row.orders

    play(story())
