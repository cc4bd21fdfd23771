"""Audits of whole journals: sound ones, no journals, an unavailable store, and journals in use."""

from __future__ import annotations

import asyncio

from google.protobuf.duration_pb2 import Duration

from coranto.audit import Kind
from tests.platform.audit.conftest import LENGTH, PIECE, REPLICATIONS, Damaged, J, Play, kinds


@REPLICATIONS
def test_repeated_audits_find_a_sound_journal_sound(play: Play, replication: int) -> None:
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


def test_a_selector_without_journals_fails_unless_declared(play: Play) -> None:
    async def story(journal: Damaged) -> None:
        report = await journal.audit("name:prefix=no/such/")
        assert kinds(report) == {Kind.NOTHING_SELECTED}
        assert not report.sound
        assert (await journal.audit("name:prefix=no/such/", allow_empty=True)).sound

    play(1, story)


@REPLICATIONS
def test_a_store_that_is_unavailable_for_a_minute_is_not_reported_as_losses(play: Play, replication: int) -> None:
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


@REPLICATIONS
def test_concurrent_appends_and_retention_are_not_reported_as_losses(play: Play, replication: int) -> None:
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
