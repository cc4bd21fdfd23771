"""The world of brokers, with a stream, its writers and its operator."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict

from coranto.client import JournalClient
from coranto.streams.control.lifecycle import Streams
from coranto.streams.model.registers import Fence
from coranto.streams.model.stream import Stream, decode, segments_selector
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.connection import SimConnection
from coranto.testing.sim.loop import SimLoop
from coranto.testing.sim.timeline import Process
from coranto.wire import protocol_pb2 as pb
from tests.simulation.broker.world import World

from .history import History
from .options import Options

STREAM = "sim/stream"


class StreamWorld(World):
    """The brokers and the stream of one run."""

    def __init__(self, loop: SimLoop, options: Options) -> None:
        super().__init__(loop, options.broker)
        self.stream_options = options
        self.units = History()
        self.fences: defaultdict[str, list[Fence]] = defaultdict(list)
        """The fences raised for each key, in order."""
        self.raising: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held while a fence is raised for a key."""
        self.broken: list[str] = []
        """Promises that were broken during the run: the anomaly's name and its details."""

    def journal_client(
        self, node: str, process: Process | None = None, clock: SimClock | None = None, *, retry_timeout: float = 30.0
    ) -> JournalClient:
        """Return a client that may call every broker, and learns the locations of journals."""
        endpoints = [machine.endpoint for machine in self.machines]
        self.rng.shuffle(endpoints)
        return JournalClient(
            ",".join(endpoints),
            clock=clock or self.client_clock,
            retry_timeout=retry_timeout,
            append_streams=self.stream_options.append_streams,
            connect=functools.partial(SimConnection, self.rpc, node, process=process),
            entropy=self.rng.randbytes,
        )

    def streams(self, client: JournalClient) -> Streams:
        return Streams(client, clock=self.client_clock, entropy=self.rng.randbytes)

    def template(self) -> pb.JournalSpec:
        spec = self.new_spec(STREAM)
        spec.name = ""
        return spec

    async def look(self, client: JournalClient) -> Stream:
        """Return the stream as brokers describe it."""
        return decode(await client.list(segments_selector(STREAM)))
