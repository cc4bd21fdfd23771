"""A real etcd for the tests of this folder, and a separate prefix for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from coranto.cluster import EtcdServer
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import Coordinator
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout
from coranto.wire import protocol_pb2 as pb

_numbers = itertools.count()

JournalKeySpace = KeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route]


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False) as server:
        yield server


@pytest.fixture
async def coordinator(etcd: EtcdServer) -> AsyncIterator[EtcdCoordinator]:
    async with EtcdCoordinator(etcd.endpoint) as connected:
        yield connected


@pytest.fixture
def layout() -> Layout:
    # No test's prefix is a prefix of another one or of its neighbour: "/test/2" followed by "0" would be "/test/20".
    return Layout(f"/test/{next(_numbers)}/own")


@pytest.fixture
async def keyspace_of(layout: Layout) -> AsyncIterator[Callable[[Coordinator], JournalKeySpace]]:
    """Makes a mirror of the test's prefix. The test starts it; the fixture closes it."""
    async with AsyncExitStack() as stack:

        def make(coordinator: Coordinator) -> JournalKeySpace:
            keyspace = KeySpace(coordinator, layout, JournalEntities())
            stack.push_async_callback(keyspace.close)
            return keyspace

        yield make
