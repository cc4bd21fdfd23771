"""Brokers and stores that do not do their work at the moment of an audit."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from coranto.audit import Kind
from coranto.errors import CorantoError
from tests.platform.audit.conftest import PIECE, REPLICATIONS, Damaged, J, Play, kinds


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
