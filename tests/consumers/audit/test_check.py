"""The audit of a consumer reports each injected damage, and nothing for a sound consumer."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from coranto.audit import Kind, Report, Severity
from coranto.client import Suspend
from coranto.client.committed import async_committed_reader
from coranto.errors import JournalSuspended
from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.messages import Checkpoint, JsonLines, ProducerId, ProducerState, Source
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.audit import SqlEvidence
from coranto_consumers.audit.evidence import Evidence
from coranto_consumers.audit.memory import Known
from coranto_consumers.runtime.testing import running_shard
from coranto_consumers.stores.merge import Replace, plan_merge
from coranto_consumers.stores.retired import Retired
from coranto_consumers.stores.sql import CHECKPOINTS
from coranto_consumers.stores.staging import StageWriter, stage_of
from tests.consumers.audit.conftest import ORDERS, SPEC, Scene
from tests.consumers.conftest import DATABASES

both = pytest.mark.parametrize(
    "store_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)], indirect=True
)


def kinds(report: Report) -> set[Kind]:
    return {each.kind for each in report.findings if each.severity is not Severity.INFO}


def checkpoint_of(scene: Scene) -> Checkpoint:
    restored = scene.store.read("shard-orders")
    assert restored is not None
    return restored.checkpoint


def write_checkpoint(scene: Scene, checkpoint: Checkpoint) -> None:
    with scene.store.engine.begin() as connection:
        changed = connection.execute(update(CHECKPOINTS).values(checkpoint=checkpoint.to_bytes()))
        assert changed.rowcount == 1


def moved(checkpoint: Checkpoint, journal: str, offset: int) -> Checkpoint:
    source = checkpoint.sources[journal]
    return Checkpoint({**checkpoint.sources, journal: Source(offset, source.producers)}, checkpoint.ack_intents)


@pytest.mark.parametrize("store_url", DATABASES, indirect=True)
async def test_a_sound_consumer_has_no_findings(scene):
    for _ in range(3):
        await scene.publish(20)
        await scene.consume()
    open_one = scene.producer()
    open_one.add("in/one", {"cents": 5})
    await scene.flush(open_one)  # A transaction that stays open.
    await scene.publish(20)
    await scene.consume()

    report = await scene.audit()

    assert kinds(report) == set()
    assert report.subjects["shard-orders"]["messages"] == 80
    assert {each.unit: each.examined for each in report.coverage}["replayed bytes"] == sum(
        (await scene.heads()).values()
    )


async def test_a_second_audit_continues_from_the_first_proof(scene):
    await scene.publish(20)
    await scene.consume()
    await scene.audit()
    before = sum((await scene.heads()).values())
    await scene.publish(10)
    await scene.consume()

    report = await scene.audit()

    assert kinds(report) == set()
    assert report.subjects["shard-orders"]["messages"] == 30
    examined = {each.unit: each.examined for each in report.coverage}
    assert examined["replayed bytes"] == sum((await scene.heads()).values()) - before


async def test_a_checkpoint_inside_a_transaction_is_sound(scene):
    await scene.publish(20, "in/one")
    await scene.consume()
    reader = async_committed_reader(scene.client, "in/one", JsonLines())
    for _ in range(4):
        await anext(reader)
    partial = reader.source(0)
    await reader.aclose()
    assert any(state.is_pending and state.last_ack for state in partial.producers.values())
    write_checkpoint(scene, Checkpoint({"in/one": partial}, checkpoint_of(scene).ack_intents))
    scene.execute("DELETE FROM orders WHERE cents >= 104")

    report = await scene.audit(remember=False)

    assert kinds(report) == set()
    assert report.subjects["shard-orders"]["messages"] == 4


@pytest.mark.parametrize("remember", [True, False])
async def test_a_checkpoint_that_was_set_back_is_found(scene, remember):
    await scene.publish(10)
    await scene.consume()
    old = checkpoint_of(scene)
    await scene.publish(10)
    await scene.consume()
    if remember:
        assert kinds(await scene.audit()) == set()
    write_checkpoint(scene, old)

    report = await scene.audit(remember=remember)

    expected = {Kind.EXPECTATION_FAILED} | ({Kind.CHECKPOINT_SET_BACK} if remember else set())
    assert kinds(report) == expected
    assert any("rows were added, or the checkpoint was set back" in each.message for each in report.errors)
    again = await scene.audit(remember=remember)
    assert kinds(again) == expected  # Later audits repeat the finding.


async def test_journals_alone_prove_that_a_checkpoint_of_the_same_process_was_set_back(scene):
    """Without a memory and without expectations: the output has a later acknowledgement of the same producer."""
    async with running_shard(scene.app, SPEC, scene.client) as shard:
        await scene.publish(10)
        await shard.read_through(await scene.heads())
        old = checkpoint_of(scene)
        await scene.publish(10)
        await shard.read_through(await scene.heads())
        await shard.finish()
    write_checkpoint(scene, old)

    report = await scene.audit(remember=False, expect=())

    assert kinds(report) == {Kind.CHECKPOINT_SET_BACK}
    assert "out/one has later acknowledgements" in report.errors[0].message


async def test_an_offset_that_was_set_back_contradicts_the_producers(scene):
    for _ in range(2):
        await scene.publish(10)
        await scene.consume()
    whole = checkpoint_of(scene)
    line = (await scene.client_content("in/one")).index(b"\n") + 1
    write_checkpoint(scene, moved(whole, "in/one", line))

    report = await scene.audit(remember=False, expect=())

    assert kinds(report) == {Kind.CHECKPOINT_DIFFERS}


async def test_a_checkpoint_that_was_set_forward_is_found(scene):
    await scene.publish(10)
    await scene.consume()
    await scene.publish(10)
    now = checkpoint_of(scene)
    head = await scene.client.head("in/one")

    write_checkpoint(scene, moved(now, "in/one", head + 1000))
    assert kinds(await scene.audit(remember=False, expect=())) == {Kind.CHECKPOINT_AHEAD}

    write_checkpoint(scene, moved(now, "in/one", head))  # Within the journal: messages are omitted.
    report = await scene.audit(remember=False)
    assert kinds(report) == {Kind.CHECKPOINT_DIFFERS, Kind.EXPECTATION_FAILED}
    assert any("the checkpoint does not know it" in each.message for each in report.errors)

    write_checkpoint(scene, moved(now, "in/one", now.sources["in/one"].read_through + 3))  # Inside a message.
    report = await scene.audit(remember=False, expect=())
    assert kinds(report) == {Kind.CHECKPOINT_DIFFERS}
    assert "no message ends" in report.errors[0].message


async def test_changed_producer_states_are_found(scene):
    await scene.publish(10)
    await scene.consume()
    now = checkpoint_of(scene)
    source = now.sources["in/one"]
    victim = next(iter(source.producers))
    state = source.producers[victim]

    for changed in (
        {**source.producers, victim: ProducerState(state.last_ack + 1, -1, state.seen_through)},
        {**source.producers, victim: ProducerState(state.last_ack, 0, state.seen_through)},
        {producer: each for producer, each in source.producers.items() if producer != victim},
        {**source.producers, ProducerId(b"\x01abcde"): ProducerState(1)},
    ):
        write_checkpoint(
            scene, Checkpoint({**now.sources, "in/one": Source(source.read_through, changed)}, now.ack_intents)
        )
        report = await scene.audit(remember=False, expect=())
        assert kinds(report) == {Kind.CHECKPOINT_DIFFERS}, changed


async def test_a_deleted_checkpoint_is_found(scene):
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    scene.execute("DELETE FROM gazette_checkpoints")

    report = await scene.audit(expect=())
    assert kinds(report) == {Kind.CHECKPOINT_GONE}
    assert "under fence 1" in report.errors[0].message
    assert kinds(await scene.audit(remember=False, expect=())) == {Kind.CHECKPOINT_GONE}

    # The consumer starts before the audit: everything counts twice.
    scene.execute("DELETE FROM orders")
    scene.app.before = lambda order: None
    await scene.consume()
    await scene.consume()
    scene.execute("UPDATE gazette_checkpoints SET fence = 0")
    assert Kind.CHECKPOINT_GONE in kinds(await scene.audit())


async def test_an_unreadable_checkpoint_is_found(scene):
    await scene.publish(10)
    await scene.consume()
    with scene.store.engine.begin() as connection:
        connection.execute(update(CHECKPOINTS).values(checkpoint=b"\xff\xff\xff"))

    assert kinds(await scene.audit(expect=())) == {Kind.CHECKPOINT_UNREADABLE}
    with scene.store.engine.begin() as connection:
        connection.execute(update(CHECKPOINTS).values(checkpoint=Retired("its-successor").to_bytes()))
    assert kinds(await scene.audit(expect=())) == set(), "a retired consumer needs no checkpoint"


async def test_staged_rows_below_the_fence_are_found(scene):
    await scene.publish(10)
    await scene.consume()
    await scene.consume()  # Its fence is 2.
    plan = plan_merge(ORDERS, ["id", "cents"], ["id"], {"cents": Replace()})
    stage = stage_of(scene.store, plan)
    for fence in (1, 2):
        with StageWriter(scene.store.url, stage, "shard-orders", fence, f"attempt-{fence}") as writer:
            writer.write([{"id": "x", "cents": 1}] * 3)

    report = await scene.audit()

    assert kinds(report) == {Kind.ROWS_LEFT_STAGED}
    (finding,) = report.warnings
    assert finding.facts == {"table": stage.name, "fence": 1, "rows": 3}
    with StageWriter(scene.store.url, stage, "shard-orders", 9, "attempt-9") as writer:
        writer.write([{"id": "x", "cents": 1}])
    assert kinds(await scene.audit(remember=False)) == {Kind.ROWS_LEFT_STAGED, Kind.CHECKPOINT_GONE}


async def test_an_acknowledgement_that_was_not_appended_is_found_until_restart(scene):
    await scene.publish(10)
    await scene.consume()
    # The state after a crash between the commit and the acknowledgement.
    builder = scene.producer()
    builder.add("out/one", {"cents": 1})
    await scene.flush(builder)
    now = checkpoint_of(scene)
    write_checkpoint(scene, Checkpoint(now.sources, builder.ack_intents()))

    report = await scene.audit()
    assert kinds(report) == {Kind.ACKNOWLEDGEMENT_MISSING}
    assert "it is not in the journal" in report.errors[0].message

    await scene.consume()
    assert kinds(await scene.audit()) == set()


async def test_an_acknowledgement_without_its_messages_is_found(scene):
    await scene.publish(10)
    await scene.consume()
    builder = scene.producer()
    builder.add("out/one", {"cents": 1})
    builder.take_batches(1 << 20)  # They never reach the journal.
    intents = builder.ack_intents()
    write_checkpoint(scene, Checkpoint(checkpoint_of(scene).sources, intents))
    await scene.client.append("out/one", intents["out/one"])

    report = await scene.audit()

    assert kinds(report) == {Kind.ACKNOWLEDGEMENT_MISSING}
    assert "are not before it" in report.errors[0].message


async def test_the_audit_waits_for_an_acknowledgement_that_is_still_being_appended(scene):
    await scene.publish(10)
    await scene.consume()
    builder = scene.producer()
    builder.add("out/one", {"cents": 1})
    await scene.flush(builder)
    intents = builder.ack_intents()
    write_checkpoint(scene, Checkpoint(checkpoint_of(scene).sources, intents))
    missed = threading.Event()

    class Watched(SqlEvidence):
        """Evidence that signals a second read of the store, which follows a missing acknowledgement."""

        reads = 0

        def read(self, *arguments: Any) -> Evidence:
            self.reads += 1
            if self.reads > 1:
                missed.set()
            return super().read(*arguments)

    auditing = asyncio.create_task(scene.audit(expect=(), timeout_s=60.0, evidence=Watched(scene.store)))
    assert await asyncio.to_thread(missed.wait, 60)
    await scene.client.append("out/one", intents["out/one"])

    assert kinds(await auditing) == set()


async def test_an_acknowledgement_with_another_framing_than_the_sources_is_read(scene):
    await scene.publish(10)
    await scene.consume()

    report = await scene.audit(remember=False, expect=(), deep=False, framing_of=lambda spec: JsonLines("/elsewhere"))

    assert kinds(report) == set()


async def test_a_suspended_source_is_sound(scene):
    with pytest.raises(JournalSuspended):  # The error confirms the suspension. The journal never had content.
        await scene.client.append("in/one", b"", suspend=Suspend.NOW)
    now = Source(0, {})
    await scene.publish(10, "in/two")
    await scene.consume_only("in/two")
    write_checkpoint(scene, Checkpoint({**checkpoint_of(scene).sources, "in/one": now}, {}))

    assert kinds(await scene.audit(remember=False)) == set()


@both
async def test_removed_or_changed_table_rows_are_found(scene):
    await scene.publish(10)
    await scene.consume()
    assert kinds(await scene.audit()) == set()
    scene.execute("UPDATE orders SET cents = cents + 1 WHERE cents = 105")

    report = await scene.audit()
    assert kinds(report) == {Kind.EXPECTATION_FAILED}
    assert "SUM(cents)" in report.errors[0].message

    scene.execute("DELETE FROM orders WHERE cents = 104")
    report = await scene.audit()
    assert [each.kind for each in report.errors] == [Kind.EXPECTATION_FAILED] * 2
    assert "gives 9, and messages of the committed messages is 10: rows were removed" in report.errors[0].message

    accepted = await scene.audit(accept=True)
    assert kinds(accepted) == {Kind.EXPECTATION_FAILED}
    assert kinds(await scene.audit()) == set()
    await scene.publish(10)
    await scene.consume()
    assert kinds(await scene.audit()) == set()


async def test_a_recreated_source_is_found(scene, cluster):
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    await scene.client.apply([pb.ApplyRequest.Change(delete="in/one", expect_mod_revision=-1)])
    assert Kind.JOURNAL_GONE in kinds(await scene.audit(expect=()))
    await scene.audit(expect=(), accept=True)
    assert kinds(await scene.audit(expect=())) == set()


@pytest.mark.parametrize("with_id", [True, False])
async def test_a_source_in_a_restored_etcd_is_the_same_if_its_id_or_content_matches(
    scene: Scene, with_id: bool
) -> None:
    """The create revision changes when etcd is restored. Earlier versions stored no id."""
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    known = Known.from_bytes(scene.memory.kept["orders"])
    shard = known.shards["shard-orders"]
    sources = {
        journal: replace(each, create_revision=1, journal_id=each.journal_id if with_id else "")
        for journal, each in shard.sources.items()
    }
    scene.memory.kept["orders"] = replace(known, shards={"shard-orders": replace(shard, sources=sources)}).to_bytes()
    await scene.publish(10)
    await scene.consume()

    report = await scene.audit()
    assert report.sound
    assert kinds(report) == (set() if with_id else {Kind.JOURNAL_RECREATED})
    assert report.subjects["shard-orders"]["messages"] == 20
    assert kinds(await scene.audit()) == set(), "reported once"


async def test_an_unreadable_stored_proof_is_replaced(scene: Scene) -> None:
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    known = Known.from_bytes(scene.memory.kept["orders"])
    shard = known.shards["shard-orders"]
    broken = {journal: replace(each, proven="a") for journal, each in shard.sources.items()}
    scene.memory.kept["orders"] = replace(known, shards={"shard-orders": replace(shard, sources=broken)}).to_bytes()

    report = await scene.audit()
    assert report.sound
    assert kinds(report) == {Kind.MEMORY_DAMAGED}
    assert kinds(await scene.audit()) == set()


async def test_only_a_truncated_segment_may_leave_the_checkpoint(scene, cluster):
    await scene.publish(10)
    await scene.consume()
    old, new = (f"shop/orders/segment/0000000{n}" for n in range(2))
    now = checkpoint_of(scene)
    write_checkpoint(scene, Checkpoint({**now.sources, old: Source(17), new: Source(0)}, now.ack_intents))
    await cluster.create(new, labels={CONTENT_TYPE: JSON_LINES})
    assert kinds(await scene.audit(expect=(), accept=True)) == {Kind.JOURNAL_GONE}

    write_checkpoint(scene, Checkpoint({**now.sources, new: Source(0)}, now.ack_intents))
    assert kinds(await scene.audit(expect=())) == set()

    write_checkpoint(scene, now)
    report = await scene.audit(expect=())
    assert kinds(report) == {Kind.CHECKPOINT_SET_BACK}
    assert {each.facts["journal"] for each in report.errors} == {old, new}, "the checkpoint has no segment"


async def test_an_expectation_that_cannot_be_evaluated_is_an_error(scene):
    await scene.publish(10)
    await scene.consume()

    for bad in ("SELECT nothing FROM nowhere == messages", "SELECT id FROM orders == messages"):
        report = await scene.audit(remember=False, expect=(bad,))
        assert [each.kind for each in report.errors] == [Kind.NOT_EXAMINED]


@both
async def test_a_query_cannot_change_the_store(scene):
    await scene.publish(10)
    await scene.consume()

    report = await scene.audit(remember=False, expect=("DELETE FROM orders == messages",))

    assert [each.kind for each in report.errors] == [Kind.NOT_EXAMINED]
    assert kinds(await scene.audit(remember=False)) == set()


async def test_a_cheap_audit_reads_no_sources_and_checks_the_store(scene):
    await scene.publish(10)
    await scene.consume()
    await scene.audit()
    head = await scene.client.head("in/one")
    write_checkpoint(scene, moved(checkpoint_of(scene), "in/one", head + 5))

    report = await scene.audit(deep=False, expect=())

    assert kinds(report) == {Kind.CHECKPOINT_AHEAD}
    assert all(each.unit != "replayed bytes" for each in report.coverage)


@both
async def test_an_audit_of_a_busy_consumer_finds_nothing(scene):
    reports: list[Report] = []
    enough = asyncio.Event()
    async with running_shard(scene.app, SPEC, scene.client) as shard:

        async def publish() -> None:
            while not enough.is_set():
                await scene.publish(4)

        publishing = asyncio.create_task(publish())
        while len(reports) < 5:
            report = await scene.audit()
            if "shard-orders" in report.subjects:  # Not before the first commit.
                reports.append(report)
        enough.set()
        await publishing
        await shard.read_through(await scene.heads())
        await shard.finish()
    reports.append(await scene.audit())

    assert set().union(*map(kinds, reports)) == set()
    counts = [report.subjects["shard-orders"]["messages"] for report in reports]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
