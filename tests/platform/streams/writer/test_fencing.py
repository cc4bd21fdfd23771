"""Appends that only change registers do not hide the same writer's appends in flight from readers."""

from __future__ import annotations

import asyncio
from typing import Any

from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.testing import Cluster
from coranto.testing.sim.loop import simulated

STREAM = "a/stream"


async def read_while_fences_are_raised() -> list[int]:
    async with Cluster(brokers=1) as cluster:
        cluster._world.network.delays.usual = (0.001, 0.04)  # So that calls overtake one another.
        client = cluster.client()
        await Streams(client).create(STREAM, template=default_template())
        async with StreamWriter[Any](client, STREAM, in_flight=4, batch_bytes=1) as writer:
            await writer.write_event("key", {"n": 0})
            fences = []
            for n in range(1, 30):
                writer.write_events("key", [{"n": n}])
                if n % 4 == 0:
                    fences.append(asyncio.ensure_future(writer.raise_fence("key", "fence")))
                await asyncio.sleep(0.003)
            await asyncio.gather(*fences)
            await writer.flush()
        async with StreamReader[Any](client, STREAM) as reader:
            return [event.data["n"] async for event in reader]


def test_fences_are_raised_while_transactions_are_in_flight() -> None:
    with simulated(1) as loop:
        assert loop.run_until_complete(read_while_fences_are_raised()) == list(range(30))
