"""An append takes one round trip to the replicas. In this virtual time only messages take time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from coranto.testing import Cluster
from coranto.testing.sim.loop import SimLoop, simulated

J = "test/journal"
DELAY = 0.5
"""Seconds of each message, between brokers as well as from a client and back."""


@pytest.mark.parametrize(("replication", "messages"), [(1, 2), (2, 4), (3, 4)])
def test_an_append_takes_one_round_trip_to_the_replicas(replication: int, messages: int) -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=3, lease_seconds=60.0, delay=DELAY) as cluster:
            await cluster.create(J, replication=replication)
            client = cluster.client()
            for _ in range(2):  # The pipeline is built, the route is known, the first fragment is complete.
                await client.append(J, b"first")
            sent = Counter[tuple[str, str]]()
            network = cluster._world.network
            real = network.send

            def send(source: str, target: str, *rest: object, **more: object) -> float:
                sent[source, target] += 1
                return real(source, target, *rest, **more)  # type: ignore[arg-type]

            network.send = send  # type: ignore[method-assign]
            for content in (b"small", b"", b"x" * (1 << 17)):
                begun = loop.time()
                await client.append(J, content)
                assert loop.time() - begun == pytest.approx(messages * DELAY, abs=0.01)
            sent.clear()
            await client.append(J, b"small")
            between = [count for (source, target), count in sent.items() if {source[:6], target[:6]} == {"broker"}]
            # To each replica one message with content and proposal, and one with the readable end, without a wait;
            # and one acknowledgement from each.
            assert sorted(between) == [1] * (replication - 1) + [2] * (replication - 1)

            # Further proposals are sent while earlier acknowledgements are pending.
            begun = loop.time()
            await asyncio.gather(*(client.append(J, b"together") for _ in range(50)))
            assert loop.time() - begun <= (messages + 2) * DELAY + 0.01

    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(main(loop))
        assert not loop.problems
