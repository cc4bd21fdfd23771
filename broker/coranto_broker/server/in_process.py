"""A broker inside another process, on given effects: for simulations and in-process clusters.

`serve` runs the same membership as `coranto_broker.server.process.BrokerProcess`, but creates no effects or ports.
`run` is the entry point (group `coranto.testing`) that `coranto.testing.Cluster` runs brokers with.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast

import grpc.aio
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from coranto.client.append.streams import AppendStreams
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import Coordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import LeaseRecord, MemberSession
from coranto.effects import Clock, Disk, Entropy
from coranto.errors import ClusterError
from coranto.fragments.stores import StoreRegistry
from coranto.member.membership import Membership
from coranto.testing.in_process import BrokerEffects, BrokerPlace, Listen
from coranto.transport.calls import FrameDialer
from coranto.wire import append_stream_pb2_grpc as stream_grpc
from coranto.wire import heads_pb2_grpc as heads_grpc
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto_broker.broker import Broker
from coranto_broker.fragments.cache import FragmentCache
from coranto_broker.recovery.residence import Residence
from coranto_broker.replication.peers import Peers
from coranto_broker.server.service import JournalService, make_server
from coranto_broker.settings import BrokerSettings

_HOST = "127.0.0.1"


class Serving(Protocol):
    """The endpoint of a broker, and its server."""

    def endpoint(self, broker: Broker) -> str:
        """Return the endpoint to announce. Called before the broker is announced."""
        ...

    def listening(self, broker: Broker, session: MemberSession) -> AbstractAsyncContextManager[None]:
        """Serve calls during the block."""
        ...


class StubPeers(Peers):
    """The peers of a broker, over given stubs."""

    def __init__(
        self,
        zone: str,
        stub_of: Callable[[str], pb_grpc.JournalAsyncStub],
        dialer_of: Callable[[str], FrameDialer | None] = lambda endpoint: None,
    ) -> None:
        """`dialer_of` returns the frame dialer for an endpoint, or None if it cannot be reached over frames."""
        super().__init__(zone)
        self._stub_of = stub_of
        self._dialer_of = dialer_of
        self._streams_by_endpoint: dict[str, AppendStreams] = {}

    def stub_at(self, endpoint: str) -> pb_grpc.JournalAsyncStub:
        return self._stub_of(endpoint) if endpoint else super().stub_at(endpoint)

    def _append_streams_at(self, endpoint: str) -> AppendStreams:
        found = self._streams_by_endpoint.get(endpoint)
        if found is None:
            stub = cast("stream_grpc.AppendsAsyncStub", self.stub_at(endpoint))
            found = self._streams_by_endpoint[endpoint] = AppendStreams(lambda: stub, self._dialer(endpoint))
        return found

    def _dialer(self, endpoint: str) -> FrameDialer | None:
        return self._dialer_of(endpoint)

    async def close(self) -> None:
        await asyncio.gather(*(streams.close() for streams in self._streams_by_endpoint.values()))
        await super().close()

    def heads_stub_at(self, endpoint: str) -> heads_grpc.JournalsAsyncStub:
        # A stub in memory has the methods of both services.
        return cast("heads_grpc.JournalsAsyncStub", self.stub_at(endpoint))


async def serve(
    settings: BrokerSettings,
    *,
    clock: Clock,
    disk: Disk,
    coordinator: Coordinator,
    stores: StoreRegistry,
    peers: Peers,
    layout: Layout,
    place: Serving,
    stop: asyncio.Event,
    make: Callable[..., Broker] = Broker,
    entropy: Entropy = os.urandom,
) -> bool:
    """Run a broker until `stop` or until it loses its lease or etcd.

    At `stop` it exits gracefully and returns True; otherwise it returns False. `make` gets the arguments of `Broker`.
    Raises the error that keeps the broker from starting.
    """
    keyspace = KeySpace(coordinator, layout, JournalEntities(), clock=clock)
    member = MemberId(settings.zone, settings.id)
    residence = await Residence.check(coordinator, layout, member, settings.data_dir, disk, entropy)
    broker = make(
        settings,
        clock=clock,
        disk=disk,
        coordinator=coordinator,
        keyspace=keyspace,
        stores=stores,
        peers=peers,
        residence=residence,
    )
    membership = Membership(
        broker.member,
        broker,
        coordinator=coordinator,
        keyspace=keyspace,
        clock=clock,
        exit_seconds=settings.exit_seconds,
        residence=residence,
    )
    record = LeaseRecord.within(settings.data_dir, disk)
    await membership.join(place.endpoint(broker), lease_seconds=settings.lease_seconds, record=record)
    async with place.listening(broker, membership.session):
        code = await membership.serve_until(stop)
    await membership.close()
    await broker.close()
    return code == 0


async def run(place: BrokerPlace, effects: BrokerEffects, listen: Listen, stop: asyncio.Event) -> None:
    """Run a broker of an in-process cluster: a `coranto.testing.in_process.RunBroker`."""
    settings = _Settings(
        zone=place.zone,
        id=place.id,
        data_dir=place.data_dir,
        lease_seconds=place.lease_seconds,
        exit_seconds=place.exit_seconds,
    )

    def make(*args: Any, **given: Any) -> Broker:
        # Fragments of every size stay in memory.
        cache = FragmentCache(
            effects.stores, settings.data_dir, settings.cache_bytes, little_bytes=settings.cache_bytes
        )
        return Broker(*args, fragments=cache, **given)

    await serve(
        settings,
        clock=effects.clock,
        disk=effects.disk,
        coordinator=effects.coordinator,
        stores=effects.stores,
        peers=StubPeers(place.zone, effects.stub),
        layout=place.layout,
        place=_ClusterServing(place, listen),
        stop=stop,
        make=make,
    )


class _Settings(BrokerSettings):
    """Settings from arguments and defaults only. The environment is ignored, as it is meant for other brokers."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class _ClusterServing:
    """Serves a broker in memory and, if its place has a port, also over gRPC for other programs."""

    def __init__(self, place: BrokerPlace, listen: Listen) -> None:
        self._place = place
        self._listen = listen
        self._server: grpc.aio.Server | None = None
        self._endpoint = place.endpoint

    def endpoint(self, broker: Broker) -> str:
        if self._place.port is not None:
            self._server = make_server(broker)
            port = self._server.add_insecure_port(f"{_HOST}:{self._place.port}")
            if port == 0:
                raise ClusterError(
                    f"cannot listen on {_HOST}:{self._place.port}; is the port taken? Free it, or choose another"
                )
            self._endpoint = f"http://{_HOST}:{port}"
        return self._endpoint

    @asynccontextmanager
    async def listening(self, broker: Broker, session: MemberSession) -> AsyncIterator[None]:
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._listen(self._endpoint, JournalService(broker)))
            if self._server is None:
                yield
                return
            await _run_outside_simulation(self._server.start())
            try:
                yield
            finally:
                await _run_outside_simulation(self._server.stop(0))
                # The server's calls run outside the simulated process too, and so do the streams that they opened.
                await _run_outside_simulation(broker.peers.close())


async def _run_outside_simulation(work: Coroutine[Any, Any, None]) -> None:
    """Run work outside the broker's simulated process, whose tasks are cancelled when it is killed."""
    await asyncio.get_running_loop().create_task(work, context=contextvars.Context())
