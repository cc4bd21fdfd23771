"""Brokers and stores that fail during an audit."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from coranto.audit import Kind
from coranto.errors import CorantoError, InsufficientBrokers
from coranto.specs.durability import ACK_UNMET, ACK_ZONES
from tests.platform.audit.conftest import PIECE, REPLICATIONS, Damaged, J, Play, kinds


@REPLICATIONS
def test_a_broker_that_is_down_is_reported(play: Play, replication: int) -> None:
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


@pytest.mark.parametrize(("unmet", "sound"), [("refuse", False), ("accept", True)])
def test_acknowledgements_below_the_demand_are_reported(play: Play, unmet: str, sound: bool) -> None:
    async def story(journal: Damaged) -> None:
        await journal.label({ACK_ZONES: "2", ACK_UNMET: unmet})  # All brokers are in one zone.
        if unmet == "accept":
            await journal.client.append(J, PIECE)
        else:
            with pytest.raises(InsufficientBrokers, match="Start brokers in other zones"):
                await journal.client.append(J, PIECE, retry_timeout=0)
        report = await journal.audit()
        assert (kinds(report), report.sound) == ({Kind.DEMAND_UNMET}, sound)
        (finding,) = (each for each in report.findings if each.kind is Kind.DEMAND_UNMET)
        assert finding.facts["acknowledged"] == int(sound)
        await journal.label({})
        await journal.client.append(J, PIECE)
        assert kinds(await journal.audit()) == ({Kind.DEMAND_UNMET} if sound else set())

    play(3, story)


def test_content_that_waits_too_long_for_its_store_is_reported(play: Play) -> None:
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
