"""Deep audits: changed content, within a budget, and offsets that were assigned twice."""

from __future__ import annotations

import asyncio

import pytest

from coranto.audit import Kind
from coranto.client import Suspend
from tests.platform.audit.conftest import LENGTH, REPLICATIONS, Damaged, J, Play, kinds, one


@REPLICATIONS
def test_a_deep_audit_finds_and_records_a_flipped_byte_in_a_stored_fragment(play: Play, replication: int) -> None:
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
        assert not kinds(await journal.deep(budget=1))  # Bad fragments are read first.
        assert not kinds(await journal.audit())

    play(replication, story)


@pytest.mark.parametrize("seen_low", [True, False])
def test_offsets_that_were_assigned_twice_are_found(play: Play, seen_low: bool) -> None:
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


def test_deep_audits_rotate_over_all_content_within_their_budget(play: Play) -> None:
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
