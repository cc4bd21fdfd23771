"""Appends concurrent with a suspension of their journal: acknowledged content stays readable."""

from __future__ import annotations

import asyncio
import random

import pytest

from coranto.client import Suspend
from coranto.errors import JournalSuspended
from coranto.testing import Cluster
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import protocol_pb2 as pb

JOURNAL = "test/suspended"
DELAY = 0.05
"""Seconds per message: an append and a suspension take a few of them."""


@pytest.mark.parametrize("streams", [True, False])
def test_a_journal_with_acknowledged_first_content_is_not_fully_suspended(streams: bool) -> None:
    # A fully suspended journal has no content: all brokers give it up, and reads are refused.
    suspended = 0

    async def meet(rng: random.Random) -> None:
        nonlocal suspended
        async with Cluster(brokers=2, delay=DELAY) as cluster:
            spec = pb.JournalSpec(name=JOURNAL, replication=2)
            spec.fragment.length, spec.fragment.compression_codec = 1024, pb.NONE
            spec.fragment.refresh_interval.seconds = 60
            await cluster.create(spec)
            writer = cluster.client(retry_timeout=5, append_streams=streams)
            other = cluster.client(retry_timeout=5, append_streams=False)

            async def append() -> int:
                await asyncio.sleep(rng.uniform(0, 4 * DELAY))
                return (await writer.append(JOURNAL, b"first")).end

            async def suspend() -> bool:
                await asyncio.sleep(rng.uniform(0, 4 * DELAY))
                try:
                    await other.append(JOURNAL, b"", suspend=Suspend.NOW)
                except JournalSuspended:
                    return True
                return False

            end, has_suspended = await asyncio.gather(append(), suspend())
            suspended += has_suspended
            (listed,) = (await other.list()).journals
            assert listed.spec.suspend.level != pb.JournalSpec.Suspend.FULL
            assert await other.read_all(JOURNAL, 0, end) == b"first"

    async def main(loop: SimLoop) -> None:
        for seed in range(20):
            await meet(random.Random(seed))

    with simulated(0) as loop:
        loop.run_until_complete(main(loop))
    assert suspended > 10
