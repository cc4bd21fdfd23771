"""Fixtures of ingest tests: a cluster of one broker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coranto.client import JournalClient
from coranto.testing import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> JournalClient:
    return cluster.client()
