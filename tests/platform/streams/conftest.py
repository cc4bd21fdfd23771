"""Fixtures of stream tests: a cluster without a stream, and one with a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coranto.client import JournalClient
from coranto.streams.control.lifecycle import Streams
from coranto.testing import Cluster
from tests.platform.streams.stream_world import StreamWorld, VirtualClock, stream_world


@pytest.fixture
def virtual_clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def world() -> AsyncIterator[StreamWorld]:
    """One broker and a stream of one segment."""
    async with stream_world() as world:
        yield world


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """One broker."""
    async with Cluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> JournalClient:
    return cluster.client()


@pytest.fixture
def streams(client: JournalClient) -> Streams:
    return Streams(client)
