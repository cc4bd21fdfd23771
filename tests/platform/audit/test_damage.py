"""The damage table: each kind of damage to a journal, what an audit says at once, and after the index was refreshed."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace

import pytest
from google.protobuf.duration_pb2 import Duration

from coranto import labels
from coranto.audit import Kind, Report, Severity, Subject
from coranto.audit.remembered import decode, encode
from coranto.client import Suspend
from coranto.errors import CorantoError
from coranto.fragments.fragment import Fragment, sum_of
from coranto.wire import protocol_pb2 as pb
from tests.platform.audit.conftest import PIECE, Damaged, J, Play

REPLICATIONS = pytest.mark.parametrize("replication", [1, 3])
LENGTH = len(PIECE)


def kinds(report: Report) -> set[Kind]:
    """The kinds of a report's errors and warnings."""
    return {each.kind for each in report.findings if each.severity is not Severity.INFO}


def one(report: Report, kind: Kind) -> dict[str, object]:
    (found,) = [each for each in report.findings if each.kind is kind]
    assert found.subject == Subject.journal(J)
    return dict(found.facts)


@REPLICATIONS
def test_a_sound_journal_is_sound_again_and_again(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        first = await journal.audit()
        assert first.sound
        assert kinds(first) == set()
        assert first.kinds() == {Kind.FIRST_AUDIT}
        assert first.subjects[J]["head"] == journal.head
        for _ in range(2):
            await journal.fill(3)
            for report in (await journal.audit(), await journal.deep()):
                assert not report.findings, report.to_json(indent=1)
        assert report.subjects[J]["persisted_head"] == journal.head - LENGTH

    play(replication, story)


@REPLICATIONS
@pytest.mark.parametrize("which", ["first", "middle", "last", "all"])
@pytest.mark.parametrize("known", [True, False])
def test_deleted_fragments_are_missed_at_once_and_for_good(
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
def test_losses_before_the_first_audit_that_no_index_names_are_not_passed_over(play: Play, replication: int) -> None:
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
def test_a_flipped_byte_in_a_stored_fragment_is_found_by_a_deep_audit_and_remembered(
    play: Play, replication: int
) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.deep()).sound
        stored = journal.objects[2]
        journal.put(stored.fragment, stored.data[:-1] + b"\0")
        assert (await journal.audit()).sound  # A cheap audit reads no content.
        deep = await journal.deep()
        assert Kind.CONTENT_DIFFERS in kinds(deep)
        assert one(deep, Kind.CONTENT_LOST)["spans"] == [[2 * LENGTH, 3 * LENGTH]]
        await journal.later()
        cheap = await journal.audit()
        assert {Kind.CONTENT_DIFFERS, Kind.CONTENT_LOST} <= kinds(cheap)
        assert not (await journal.deep(budget=1)).sound
        journal.put(stored.fragment, stored.data)
        assert not kinds(await journal.deep(budget=1))  # What was bad is read first.
        assert not kinds(await journal.audit())

    play(replication, story)


@REPLICATIONS
def test_a_truncated_fragment_is_found_by_its_length(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        stored = journal.objects[2]
        journal.put(stored.fragment, stored.data[:-1])
        for _ in range(2):
            report = await journal.audit()
            assert {Kind.CONTENT_DIFFERS, Kind.CONTENT_LOST} <= kinds(report)
            await journal.later()

    play(replication, story)


def test_objects_of_wrong_names_are_named(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        sound = journal.objects[0]
        wrong = replace(sound.fragment, sum=sum_of(b"something else"))
        journal.put(wrong, sound.data)
        found = one(await journal.audit(), Kind.CONTENT_REPLACED)
        assert found["span"] == [0, LENGTH]
        assert Kind.CONTENT_DIFFERS in kinds(await journal.deep())
        # Whoever removes the right one of the two leaves a loss.
        journal.delete(sound.fragment)
        for _ in range(2):
            assert not (await journal.audit()).sound
            await journal.later()
        journal.put(sound.fragment, sound.data)
        journal.delete(wrong)
        await journal.later()
        assert not kinds(await journal.deep())
        journal.world.store.notes[f"{J}/backup-of-yesterday"] = journal.world.timeline.time(), b"?"
        report = await journal.audit()
        assert kinds(report) == {Kind.OBJECT_MISNAMED}
        assert report.sound

    play(1, story)


@REPLICATIONS
def test_an_object_beyond_the_head_loses_consistency(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        beyond = Fragment(J, 1 << 30, (1 << 30) + 4, sum_of(b"fake"), journal.objects[0].fragment.codec)
        journal.put(beyond, b"fake")
        assert Kind.OBJECT_UNKNOWN in kinds(await journal.audit())
        await journal.later()
        report = await journal.audit()
        assert Kind.CONSISTENCY_LOST in kinds(report)
        assert not report.sound

    play(replication, story)


@REPLICATIONS
def test_all_brokers_disks_wiped(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        everybody = range(replication)
        for number in everybody:
            await journal.cluster.kill(number, expire=True)
            journal.wipe(number)
        await asyncio.gather(*(journal.cluster.start(number) for number in everybody))
        await journal.later()
        report = await journal.audit()
        assert {Kind.HEAD_FELL, Kind.CONTENT_LOST, Kind.CONSISTENCY_LOST} <= kinds(report)
        assert one(report, Kind.CONTENT_LOST)["spans"] == [[journal.head - LENGTH, journal.head]]
        # The operator resets the head, and the journal goes on. What was lost stays lost, also beyond the old head.
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


@pytest.mark.parametrize("seen_low", [True, False])
def test_offsets_that_are_given_out_twice_are_found(play: Play, seen_low: bool) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        await journal.cluster.kill(0, expire=True)
        journal.wipe(0)
        await journal.cluster.start(0)
        await journal.later()
        if seen_low:
            assert not (await journal.audit()).sound
        await journal.client.append(J, b"", offset=await journal.client.head(J), suspend=Suspend.KEEP)
        for _ in range(4):
            await journal.client.append(J, b"other content" * 100)
        await asyncio.sleep(6)
        report = await journal.deep()
        assert not report.sound
        assert (Kind.CONTENT_LOST if seen_low else Kind.CONTENT_REPLACED) in kinds(report)
        assert not (await journal.audit()).sound

    play(1, story)


def test_one_of_three_disks_wiped_heals(play: Play) -> None:
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
def test_a_broker_that_is_away_is_missed(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        if replication == 1:
            await journal.cluster.kill(0)
            with pytest.raises(CorantoError):
                await journal.audit()
            await journal.cluster.start(0)
        else:
            await journal.cluster.kill(2, expire=True)
            await asyncio.sleep(3)
            report = await journal.audit()
            assert Kind.REPLICAS_MISSING in kinds(report)
            assert not report.sound
            await journal.cluster.start(2)
        await journal.cluster.ready(J)
        await journal.later()
        assert not kinds(await journal.audit())

    play(replication, story)


@REPLICATIONS
def test_a_journal_that_was_deleted_is_missed_and_one_made_again_is_known(play: Play, replication: int) -> None:
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


def test_a_selector_without_journals_fails_unless_declared(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        report = await journal.audit("name:prefix=no/such/")
        assert kinds(report) == {Kind.NOTHING_SELECTED}
        assert not report.sound
        assert (await journal.audit("name:prefix=no/such/", allow_empty=True)).sound

    play(1, story)


@REPLICATIONS
def test_retention_removes_what_is_old_and_nobody_minds(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=3600))
        assert (await journal.audit()).sound
        await asyncio.sleep(3700)
        await journal.fill(5)
        assert journal.objects[0].fragment.begin > 0
        assert not kinds(await journal.audit())
        # What it should have kept is missed.
        journal.delete(journal.objects[-2].fragment)
        for _ in range(2):
            assert not (await journal.audit()).sound
            await journal.later()

    play(replication, story)


def test_retention_does_not_excuse_what_it_would_keep(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=3600))
        assert (await journal.audit()).sound
        journal.delete(journal.objects[0].fragment)  # It is seconds old.
        for _ in range(2):
            assert one(await journal.audit(), Kind.CONTENT_LOST)["retention_seconds"] == 3600.0
            await journal.later()
        # Getting old later does not make it right.
        await asyncio.sleep(3700)
        assert Kind.CONTENT_LOST in kinds(await journal.audit())

    play(1, story)


def test_old_fragments_may_not_all_go(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=1 << 24))
        assert (await journal.audit()).sound
        await journal.change(retention=Duration(seconds=3600))
        assert (await journal.audit()).sound
        await asyncio.sleep(3590)  # Just before brokers remove any.
        journal.delete(*(each.fragment for each in journal.objects))
        await asyncio.sleep(60)
        found = one(await journal.audit(), Kind.CONTENT_LOST)
        # Retention always keeps what reaches furthest. The sixth fragment was that when the last audit looked.
        assert found["spans"] == [[5 * LENGTH, 7 * LENGTH]]

    play(1, story)


def test_retention_shortened_and_lengthened_again_is_reported(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        await journal.change(retention=Duration(seconds=1))
        await asyncio.sleep(30)
        (info,) = (await journal.client.list(f"name={J}")).journals
        info.spec.fragment.ClearField("retention")
        await journal.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
        assert len(journal.objects) < 6
        report = await journal.audit()
        assert one(report, Kind.CONTENT_LOST)["spec_changed"] is True
        (found,) = report.errors
        assert "shortened for a while" in found.message
        await journal.audit(accept="it was meant")
        assert not kinds(await journal.audit())

    play(1, story)


@REPLICATIONS
def test_a_store_that_is_away_for_a_minute(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        journal.world.store.faults.refuse = 1.0
        report = await journal.audit()
        assert {Kind.STORE_UNREACHABLE, Kind.MEMORY_UNREACHABLE} <= kinds(report)
        assert not {Kind.CONTENT_LOST, Kind.CONTENT_MISSING, Kind.FRAGMENT_MISSING} & kinds(report)
        assert not report.sound
        (coverage,) = report.coverage
        assert (coverage.examined, coverage.left_out) == (0, 1)
        await asyncio.sleep(60)
        journal.world.store.faults.refuse = 0.0
        await asyncio.sleep(30)
        assert not kinds(await journal.audit())

    play(replication, story)


def test_content_that_waits_too_long_for_its_store_is_named(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(flush_interval=Duration(seconds=60))
        await journal.fill(1)
        assert (await journal.audit()).sound
        journal.world.store.faults.refuse_fragments = 1.0
        await journal.client.append(J, PIECE)
        await asyncio.sleep(400)
        report = await journal.audit()
        assert {Kind.UNPERSISTED_TOO_OLD, Kind.STORE_UNHEALTHY} <= kinds(report)
        journal.world.store.faults.refuse_fragments = 0.0
        await asyncio.sleep(120)
        assert not kinds(await journal.audit())

    play(1, story)


def test_deep_audits_rotate_over_everything_within_their_budget(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        read: list[int] = []
        for _ in range(3):
            report = await journal.deep(budget=2 * LENGTH)
            (stored,) = [each for each in report.coverage if each.check == "stored content"]
            read.append(stored.examined)
            assert stored.examined + stored.left_out == 6 * LENGTH
            await asyncio.sleep(1)
        assert read == [2 * LENGTH] * 3
        last = journal.objects[5]
        journal.put(last.fragment, bytes(LENGTH))
        found = [Kind.CONTENT_DIFFERS in kinds(await journal.deep(budget=2 * LENGTH)) for _ in range(3)]
        assert found == [False, False, True]

    play(1, story)


def test_lost_records_are_not_passed_over(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        notes = journal.world.store.notes
        for path, (at, content) in list(notes.items()):
            notes[path] = at, content[:-4]
        report = await journal.audit()
        assert Kind.MEMORY_DAMAGED in kinds(report)
        assert not report.sound
        for path in list(notes):
            del notes[path]
        report = await journal.audit()
        assert report.kinds() == {Kind.FIRST_AUDIT}
        journal.delete(journal.objects[0].fragment)
        notes.clear()
        await journal.later()
        assert not (await journal.audit()).sound

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


def test_a_journal_of_which_nothing_is_stored_is_not_excused_by_retention(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=3600))
        journal.delete(*(each.fragment for each in journal.objects))
        await journal.later()
        journal.delete(*(each.fragment for each in journal.objects))
        await journal.later()
        assert not (await journal.audit()).sound

    play(1, story)


def test_records_are_found_when_another_store_is_put_first(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        (info,) = (await journal.client.list(f"name={J}")).journals
        stores = ["file:///other/", *info.spec.fragment.stores]
        del info.spec.fragment.stores[:]
        info.spec.fragment.stores.extend(stores)
        await journal.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
        journal.delete(journal.objects[0].fragment)
        await journal.later()
        assert Kind.CONTENT_LOST in kinds(await journal.audit())

    play(1, story)


@REPLICATIONS
def test_appends_and_retention_under_way_are_no_loss(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=20))
        ended = asyncio.Event()

        async def append() -> None:
            while not ended.is_set():
                await journal.client.append(J, PIECE)
                await asyncio.sleep(0.3)

        appends = [asyncio.create_task(append()) for _ in range(2)]
        try:
            for number in range(12):
                report = await journal.deep(budget=1 << 20) if number % 3 == 0 else await journal.audit()
                assert not report.errors, report.to_json(indent=1)
                await asyncio.sleep(1.7)
        finally:
            ended.set()
            await asyncio.gather(*appends)
        assert journal.objects[0].fragment.begin > 0

    play(replication, story)


def test_a_gap_that_was_accepted_and_then_filled_is_not_accepted_again(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        middle = journal.objects[2]
        journal.delete(middle.fragment)
        assert not (await journal.audit(accept="it was cursed")).sound
        await journal.later()
        assert not kinds(await journal.audit())
        journal.put(middle.fragment, middle.data)  # Somebody has found a copy.
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


def test_a_record_that_is_dated_ahead_is_not_trusted_in_silence(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        assert (await journal.audit()).sound
        notes = journal.world.store.notes
        ((path, (at, content)),) = notes.items()
        (record,) = decode(gzip.decompress(content)).values()
        forged = replace(record, at=record.at + 86_400, fragments=[], head=0, persisted_head=0, first=record.head)
        notes[path] = at, gzip.compress(encode({J: forged}))
        journal.delete(journal.objects[0].fragment)
        await journal.later()
        for _ in range(2):
            report = await journal.audit()
            assert Kind.MEMORY_DAMAGED in kinds(report)
            assert not report.sound

    play(1, story)
