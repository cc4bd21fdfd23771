"""The damage table: each kind of damage to a journal, and its findings before and after an index refresh."""

from __future__ import annotations

import asyncio

import pytest

from coranto import labels
from coranto.audit import Kind
from coranto.client import Suspend
from coranto.wire import protocol_pb2 as pb
from tests.platform.audit.conftest import LENGTH, PIECE, REPLICATIONS, Damaged, J, Play, kinds, one


@REPLICATIONS
@pytest.mark.parametrize("which", ["first", "middle", "last", "all"])
@pytest.mark.parametrize("known", [True, False])
def test_deleted_fragments_are_reported_immediately_and_permanently(
    play: Play, replication: int, which: str, known: bool
) -> None:
    async def story(journal: Damaged) -> None:
        if known:
            assert (await journal.audit()).sound
        stored = [each.fragment for each in journal.objects]
        doomed = {"first": stored[:1], "middle": stored[2:4], "last": stored[-1:], "all": stored}[which]
        spans = [[doomed[0].begin, doomed[-1].end]]
        journal.delete(*doomed)
        now = await journal.audit()
        assert not now.sound
        lost = Kind.CONTENT_LOST if known else Kind.CONTENT_MISSING
        assert one(now, lost)["spans"] == spans
        assert Kind.FRAGMENT_MISSING in kinds(now)
        for _ in range(3):
            await journal.later()
            after = await journal.audit()
            assert not after.sound
            found = one(after, Kind.CONTENT_LOST)
            assert found["spans"] == spans
            assert found["bytes"] == spans[0][1] - spans[0][0]
        await journal.fill(2)
        assert one(await journal.audit(), Kind.CONTENT_LOST)["spans"] == spans
        for fragment in doomed:
            journal.put(fragment, PIECE)  # From a copy.
        await journal.later()
        assert not kinds(await journal.deep())

    play(replication, story)


@REPLICATIONS
def test_losses_before_the_first_audit_are_reported_although_no_index_has_them(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        journal.delete(*(each.fragment for each in journal.objects[:2]))
        await journal.later()
        report = await journal.audit()
        assert one(report, Kind.BEGINNING_UNEXPLAINED) == {"begin": 2 * LENGTH}
        assert not report.sound
        for _ in range(2):
            await journal.later()
            report = await journal.audit()
            assert one(report, Kind.CONTENT_MISSING)["spans"] == [[0, 2 * LENGTH]]
        await journal.audit(accept="it began there when we took it over")
        assert not kinds(await journal.audit())
        journal.delete(*(each.fragment for each in journal.objects))
        await journal.later()
        assert not (await journal.audit()).sound

    play(replication, story)


@REPLICATIONS
def test_wiping_the_disks_of_all_brokers_is_reported(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        all_brokers = range(replication)
        for number in all_brokers:
            await journal.cluster.kill(number, expire=True)
            journal.wipe(number)
        await asyncio.gather(*(journal.cluster.start(number) for number in all_brokers))
        await journal.later()
        report = await journal.audit()
        assert {Kind.HEAD_FELL, Kind.CONTENT_LOST, Kind.CONSISTENCY_LOST} <= kinds(report)
        assert one(report, Kind.CONTENT_LOST)["spans"] == [[journal.head - LENGTH, journal.head]]
        # The operator resets the head, and appends continue. Lost content stays lost, also beyond the old head.
        head = one(report, Kind.HEAD_FELL)["head"]
        assert isinstance(head, int)
        await journal.client.append(J, b"", offset=head, suspend=Suspend.KEEP)
        await journal.fill(4, content=b"other content" * 100)
        report = await journal.audit()
        assert Kind.HEAD_FELL not in kinds(report)
        assert not report.sound
        accepted = await journal.audit(accept="the machines burnt")
        assert not accepted.sound
        assert not kinds(await journal.audit())
        assert not kinds(await journal.deep())

    play(replication, story)


def test_one_wiped_disk_of_three_recovers(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        await journal.cluster.kill(1)
        journal.wipe(1)
        await journal.cluster.start(1)
        await journal.cluster.ready(J)
        await journal.later()
        assert not kinds(await journal.deep())

    play(3, story)


@REPLICATIONS
def test_deleted_and_recreated_journals_are_reported(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        await journal.cluster.create(journal.spec("shop/refunds"))
        assert (await journal.audit()).sound
        (info,) = (await journal.client.list(f"name={J}")).journals
        await journal.client.apply([pb.ApplyRequest.Change(delete=J, expect_mod_revision=info.mod_revision)])
        assert one(await journal.audit(), Kind.JOURNAL_GONE)["head"] == journal.head
        assert (await journal.audit("name=shop/refunds")).sound
        await journal.cluster.create(journal.spec())
        for _ in range(2):
            await journal.later()
            report = await journal.audit()
            assert {Kind.JOURNAL_RECREATED, Kind.CONTENT_LOST} <= kinds(report)
            assert one(report, Kind.JOURNAL_RECREATED)["create_revision_before"] == info.create_revision
        await journal.client.append(J, b"", offset=await journal.client.head(J), suspend=Suspend.KEEP)
        await journal.fill(3, content=b"other content" * 100)
        assert Kind.JOURNAL_RECREATED in kinds(await journal.audit())
        await journal.audit(accept="a clean beginning")
        assert not kinds(await journal.audit())

    play(replication, story)


def test_a_deleted_journal_can_be_accepted(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.cluster.create(journal.spec("shop/refunds"))
        assert (await journal.audit()).sound
        (info,) = (await journal.client.list(f"name={J}")).journals
        await journal.client.apply([pb.ApplyRequest.Change(delete=J, expect_mod_revision=info.mod_revision)])
        assert not (await journal.audit(accept="not needed any more")).sound
        assert not kinds(await journal.audit())

    play(1, story)


def test_registers_that_change_without_an_append_are_reported(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.client.append(J, PIECE, union_registers=pb.LabelSet(labels=[pb.Label(name="fence", value="7")]))
        for _ in range(2):
            await journal.client.append(J, PIECE)
        await asyncio.sleep(6)
        assert (await journal.audit()).sound
        await journal.cluster.kill(0, expire=True)
        journal.wipe(0)
        await journal.cluster.start(0)
        await journal.later()
        assert Kind.REGISTERS_LOST in kinds(await journal.audit())

    play(1, story)


def test_a_gap_that_was_accepted_and_then_filled_is_not_accepted_again(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        middle = journal.objects[2]
        journal.delete(middle.fragment)
        assert not (await journal.audit(accept="it was cursed")).sound
        await journal.later()
        assert not kinds(await journal.audit())
        journal.put(middle.fragment, middle.data)  # Restored from a copy.
        await journal.later()
        assert not kinds(await journal.audit())
        journal.delete(middle.fragment)
        await journal.later()
        assert kinds(await journal.audit()) == {Kind.CONTENT_LOST}

    play(1, story)


def test_a_recovery_log_may_be_pruned_and_its_head_may_not_fall(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        (info,) = (await journal.client.list(f"name={J}")).journals
        info.spec.labels.CopyFrom(labels.label_set({labels.CONTENT_TYPE: labels.RECOVERY_LOG}))
        await journal.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
        assert not kinds(await journal.audit())
        journal.delete(journal.objects[0].fragment, journal.objects[3].fragment)
        report = await journal.audit()
        assert report.sound
        assert Kind.CONTENT_LOST in kinds(report)
        await journal.later()
        assert not kinds(await journal.audit())
        await journal.cluster.kill(0, expire=True)
        journal.wipe(0)
        await journal.cluster.start(0)
        await journal.later()
        assert not (await journal.audit()).sound

    play(1, story)
