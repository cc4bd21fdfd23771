"""Audits of fragments that retention may have removed."""

from __future__ import annotations

import asyncio

from google.protobuf.duration_pb2 import Duration

from coranto.audit import Kind
from coranto.wire import protocol_pb2 as pb
from tests.platform.audit.conftest import LENGTH, REPLICATIONS, Damaged, J, Play, kinds, one


@REPLICATIONS
def test_removals_by_retention_are_not_reported(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=3600))
        assert (await journal.audit()).sound
        await asyncio.sleep(3700)
        await journal.fill(5)
        assert journal.objects[0].fragment.begin > 0
        assert not kinds(await journal.audit())
        # A missing fragment within the retention is reported.
        journal.delete(journal.objects[-2].fragment)
        for _ in range(2):
            assert not (await journal.audit()).sound
            await journal.later()

    play(replication, story)


def test_losses_within_the_retention_are_reported(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=3600))
        assert (await journal.audit()).sound
        journal.delete(journal.objects[0].fragment)  # It is seconds old.
        for _ in range(2):
            assert one(await journal.audit(), Kind.CONTENT_LOST)["retention_seconds"] == 3600.0
            await journal.later()
        # The end of its retention does not change that.
        await asyncio.sleep(3700)
        assert Kind.CONTENT_LOST in kinds(await journal.audit())

    play(1, story)


def test_losing_all_old_fragments_is_reported(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=1 << 24))
        assert (await journal.audit()).sound
        await journal.change(retention=Duration(seconds=3600))
        assert (await journal.audit()).sound
        await asyncio.sleep(3590)  # Just before brokers remove any.
        journal.delete(*(each.fragment for each in journal.objects))
        await asyncio.sleep(60)
        found = one(await journal.audit(), Kind.CONTENT_LOST)
        # Retention always keeps the last fragment, which was the sixth one at the last audit.
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


def test_retention_does_not_explain_a_journal_without_stored_content(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        await journal.change(retention=Duration(seconds=3600))
        journal.delete(*(each.fragment for each in journal.objects))
        await journal.later()
        journal.delete(*(each.fragment for each in journal.objects))
        await journal.later()
        assert not (await journal.audit()).sound

    play(1, story)
