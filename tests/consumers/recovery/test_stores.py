"""Recovery of a consumer's store: proven state is restored, and the rest is reported as lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sqlalchemy import text, update

from coranto.audit import Kind
from coranto.errors import CorantoError, InvalidInput
from coranto.messages import Checkpoint, Source
from coranto.recovery import Plan, Recovery, StepKind, StepResult, carry_out, make_plan
from coranto_consumers.audit import ConsumerCheck, SqlEvidence, parse_expectation
from coranto_consumers.recovery import RepairableDatabase, StoreDoctor
from coranto_consumers.stores.merge import Replace, plan_merge
from coranto_consumers.stores.retired import Retired
from coranto_consumers.stores.sql import CHECKPOINTS
from coranto_consumers.stores.staging import StageWriter, stage_of
from tests.consumers.audit.conftest import ORDERS, Scene


def doctor(scene: Scene, *, remember: bool = True) -> StoreDoctor:
    def check(accept: bool) -> ConsumerCheck:
        return ConsumerCheck(
            "orders",
            scene.client,
            SqlEvidence(scene.store),
            ["shard-orders"],
            expectations=[parse_expectation(each) for each in scene.expect],
            memory=scene.memory if remember else None,
            accept=accept,
            timeout_s=0.2,
        )

    return StoreDoctor(scene.client, RepairableDatabase(scene.store), check)


async def recover(scene: Scene) -> Recovery:
    made = doctor(scene)
    plan = await make_plan([made])
    return await carry_out([made], plan.hash, verify=scene.audit)


def kinds(plan: Plan) -> list[StepKind]:
    return [step.kind for step in plan.steps]


def write_checkpoint(scene: Scene, checkpoint: Checkpoint) -> None:
    with scene.store.engine.begin() as connection:
        connection.execute(update(CHECKPOINTS).values(checkpoint=checkpoint.to_bytes()))


async def test_a_sound_store_has_an_empty_plan(scene):
    await scene.publish(10)
    await scene.consume()

    assert (await make_plan([doctor(scene)])).is_empty


@pytest.mark.parametrize(
    ("damage", "store_url"),
    [
        *((damage, "sqlite") for damage in ("deleted", "set back", "set forward", "unreadable")),
        pytest.param("deleted", "postgresql", marks=pytest.mark.integration),
    ],
    indirect=["store_url"],
)
async def test_a_proven_checkpoint_is_restored(scene, damage):
    await scene.publish(10)
    await scene.consume()
    old = scene.store.read("shard-orders").checkpoint
    await scene.publish(10)
    await scene.consume()
    assert (await scene.audit()).sound
    await scene.publish(4)  # Not consumed yet.
    now = scene.store.read("shard-orders")
    match damage:
        case "deleted":
            scene.execute("DELETE FROM gazette_checkpoints")
        case "set back":
            write_checkpoint(scene, old)
        case "set forward":
            head = await scene.client.head("in/one")
            source = now.checkpoint.sources["in/one"]
            write_checkpoint(scene, Checkpoint({**now.checkpoint.sources, "in/one": Source(head, source.producers)}))
        case "unreadable":
            with scene.store.engine.begin() as connection:
                connection.execute(update(CHECKPOINTS).values(checkpoint=b"\xff"))

    plan = await make_plan([doctor(scene)])
    assert kinds(plan) == [StepKind.RESTORE_CHECKPOINT], plan
    assert plan.losses == ()
    assert (await make_plan([doctor(scene)])).hash == plan.hash
    if damage == "unreadable":
        with scene.store.engine.begin() as connection:  # Dropped after the plan was made.
            connection.execute(update(CHECKPOINTS).values(checkpoint=Retired().to_bytes()))
        with pytest.raises(InvalidInput, match="is dropped"):
            await doctor(scene).act(plan.steps[0])
        with scene.store.engine.begin() as connection:
            connection.execute(update(CHECKPOINTS).values(checkpoint=b"\xff"))
    done = await recover(scene)

    assert done.succeeded, done
    restored = scene.store.read("shard-orders")
    assert restored.checkpoint.sources == now.checkpoint.sources
    assert restored.fence > now.fence
    await scene.consume()
    report = await scene.audit()
    assert report.sound
    assert report.subjects["shard-orders"]["messages"] == 24


async def test_a_checkpoint_that_does_not_match_the_tables_is_not_restored(scene):
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    await scene.publish(10)
    await scene.consume()  # Not audited.
    scene.execute("DELETE FROM gazette_checkpoints")

    plan = await make_plan([doctor(scene)])

    assert kinds(plan) == []
    assert any("has no checkpoint of it" in loss.message for loss in plan.losses)
    assert any("restore the whole database from a backup" in remark.message for remark in plan.remarks)


async def test_a_checkpoint_set_forward_over_whole_messages_is_restored(scene):
    """The checkpoint contradicts only the tables, not the journals."""
    await scene.publish(10)
    await scene.consume()
    assert (await scene.audit()).sound
    proven = scene.store.read("shard-orders")
    await scene.publish(10)
    await scene.consume()
    scene.execute("DELETE FROM orders WHERE rowid > 10")  # Simulate that only the checkpoint moved.

    assert {each.kind for each in (await scene.audit()).errors} == {Kind.EXPECTATION_FAILED}
    plan = await make_plan([doctor(scene)])
    assert kinds(plan) == [StepKind.RESTORE_CHECKPOINT]
    assert plan.losses == ()
    assert (await recover(scene)).succeeded
    assert scene.store.read("shard-orders").checkpoint.sources == proven.checkpoint.sources
    await scene.consume()
    report = await scene.audit()
    assert report.sound
    assert report.subjects["shard-orders"]["messages"] == 20


async def test_a_database_restored_as_a_whole_is_accepted(scene, tmp_path):
    database = Path(str(scene.store.engine.url.database))
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    old = scene.store.read("shard-orders")
    shutil.copyfile(database, tmp_path / "backup")
    await scene.publish(10)
    await scene.consume()
    await scene.consume()
    assert (await scene.audit()).sound
    fence = scene.store.read("shard-orders").fence
    scene.store.engine.dispose()
    shutil.copyfile(tmp_path / "backup", database)

    plan = await make_plan([doctor(scene)])
    assert kinds(plan) == [StepKind.TAKE_CHECKPOINT, StepKind.ACCEPT_LOSS]
    assert plan.losses == ()
    assert not any("backup" in remark.message for remark in plan.remarks)
    assert plan.hash == (await make_plan([doctor(scene)])).hash
    done = await recover(scene)

    assert done.succeeded, done
    taken = scene.store.read("shard-orders")
    assert taken.checkpoint.sources == old.checkpoint.sources
    assert taken.fence > fence, "a process that ran before the restore could commit"
    await scene.consume()
    report = await scene.audit()
    assert report.sound
    assert report.subjects["shard-orders"]["messages"] == 20


async def test_a_checkpoint_that_advanced_since_the_plan_is_not_accepted(scene, tmp_path):
    database = Path(str(scene.store.engine.url.database))
    await scene.publish(10)
    await scene.consume()
    shutil.copyfile(database, tmp_path / "backup")
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    scene.store.engine.dispose()
    shutil.copyfile(tmp_path / "backup", database)
    made = doctor(scene)
    plan = await make_plan([made])
    await scene.consume()

    with pytest.raises(CorantoError, match="so plan again"):
        await made.act(plan.steps[0])


async def test_only_staged_rows_below_the_fence_are_deleted(scene):
    await scene.publish(10)
    await scene.consume()
    await scene.consume()
    stage = stage_of(scene.store, plan_merge(ORDERS, ["id", "cents"], ["id"], {"cents": Replace()}))
    for fence in (1, 2):
        with StageWriter(scene.store.url, stage, "shard-orders", fence, f"attempt-{fence}") as writer:
            writer.write([{"id": "x", "cents": 1}] * 3)

    done = await recover(scene)

    assert kinds(done.plan) == [StepKind.DELETE_STAGED_ROWS]
    assert [result.done for result in done.results] == ["deleted 3 rows"]
    assert done.succeeded
    with scene.store.engine.connect() as connection:
        assert connection.execute(text(f"SELECT MIN(coranto_fence), COUNT(*) FROM {stage.name}")).one() == (2, 3)


async def test_missing_acknowledgements_are_appended(scene):
    await scene.publish(10)
    await scene.consume()
    builder = scene.producer()
    builder.add("out/one", {"cents": 1})
    await scene.flush(builder)
    write_checkpoint(scene, Checkpoint(scene.store.read("shard-orders").checkpoint.sources, builder.ack_intents()))

    done = await recover(scene)

    assert kinds(done.plan) == [StepKind.APPEND_ACKNOWLEDGEMENTS]
    assert done.succeeded, done
    assert scene.store.read("shard-orders").fence == 2


async def test_missing_rows_are_a_loss_that_can_be_accepted(scene):
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    scene.execute("DELETE FROM orders WHERE cents = 104")

    plan = await make_plan([doctor(scene)])
    assert kinds(plan) == [StepKind.ACCEPT_LOSS]
    assert len(plan.losses) == 2
    assert (await make_plan([doctor(scene)])).hash == plan.hash
    assert kinds(await make_plan([doctor(scene, remember=False)])) == []

    done = await recover(scene)
    assert done.succeeded, done
    assert (await make_plan([doctor(scene)])).is_empty


async def test_an_interrupted_recovery_can_be_planned_and_run_again(scene):
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    fence = scene.store.read("shard-orders").fence
    scene.execute("DELETE FROM gazette_checkpoints")
    made = doctor(scene)
    plan = await make_plan([made])

    def interrupt(result: StepResult) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await carry_out([made], plan.hash, on_result=interrupt)

    assert (await make_plan([doctor(scene)])).is_empty
    (step,) = plan.steps
    await made.act(step)  # Simulate that the answer was lost.
    assert scene.store.read("shard-orders").fence > fence
    assert (await scene.audit()).sound
