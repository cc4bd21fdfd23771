"""A client's connection to one broker over the simulated network."""

from __future__ import annotations

from typing import Any, cast

import grpc
import grpc.aio

from coranto.client.config import ClientConfig
from coranto.client.connection import Connection
from coranto.effects import Clock
from coranto.errors import CorantoError
from coranto.security.call_tokens import CallTokens
from coranto.testing.sim.rpc import Rpc
from coranto.testing.sim.timeline import Process
from coranto.transport.calls import FrameDialer
from coranto.wire import append_stream_pb2_grpc as stream_grpc
from coranto.wire import heads_pb2_grpc as heads_grpc
from coranto.wire import protocol_pb2_grpc as pb_grpc


class SimConnection(Connection):
    """A replacement for `Connection`. With `rpc` and the client's node bound, it is a `JournalClient`'s `connect`."""

    def __init__(
        self,
        rpc: Rpc,
        node: str,
        config: ClientConfig,
        clock: Clock | None = None,
        tokens: CallTokens | None = None,
        *,
        process: Process | None = None,
    ) -> None:
        """Create a connection. `process` owns its calls; by default, the process of the calling code does."""
        super().__init__(config, clock, tokens)
        self._rpc = rpc
        self._sim_stub = rpc.stub(node, config.endpoint, process)
        self._sim_channel: Any = _ChannelState(rpc, config.endpoint)
        self._over = False

    def _dialer(self, config: ClientConfig) -> FrameDialer | None:
        return None

    @property
    def channel(self) -> grpc.aio.Channel:
        self._check()
        return cast("grpc.aio.Channel", self._sim_channel)

    @property
    def stub(self) -> pb_grpc.JournalAsyncStub:
        self._check()
        return self._sim_stub

    @property
    def heads_stub(self) -> heads_grpc.JournalsAsyncStub:
        return cast("heads_grpc.JournalsAsyncStub", self.stub)

    @property
    def streams_stub(self) -> stream_grpc.AppendsAsyncStub:
        return cast("stream_grpc.AppendsAsyncStub", self.stub)

    async def close(self, grace: float | None = None) -> None:
        """Cancel all calls in progress. `grace` is ignored."""
        await self._append_streams.close()
        self._over = True
        self._rpc.cancel_calls(self._sim_stub)

    def _check(self) -> None:
        if self._over:
            raise CorantoError(f"this client of {self.endpoint} was closed; make another")


class _ChannelState:
    """The part of a channel besides calls: its connectivity."""

    def __init__(self, rpc: Rpc, endpoint: str) -> None:
        self._rpc = rpc
        self._endpoint = endpoint

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        found = self._rpc.endpoints.find(self._endpoint)
        return grpc.ChannelConnectivity.READY if found is not None else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def channel_ready(self) -> None:
        await self._rpc.endpoints.wait_for(self._endpoint)
