"""A real Kafka for these tests. `make test-ingest` runs them: they need Kafka's client and download its broker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.platform.ingest.kafka.registry import Registry, running

if TYPE_CHECKING:
    from benchmarks.kafka import KafkaServer

WITH_CLIENT = [
    "test_cluster.py",
    "test_schemas.py",
    "test_source.py",
    "test_source_kill.py",
    "test_source_outages.py",
    "test_source_secured.py",
]
collect_ignore = [] if os.environ.get("CORANTO_TEST_INGEST") else WITH_CLIENT


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """The address of a Kafka broker."""
    from benchmarks.kafka import KafkaServer, fetched

    with KafkaServer(fetched(), partitions=1) as server:
        yield server.address


@pytest.fixture
def server() -> Iterator[KafkaServer]:
    """A Kafka broker for a single test, which may be killed."""
    from benchmarks.kafka import KafkaServer, fetched

    with KafkaServer(fetched(), partitions=1) as server:
        yield server


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running() as registry:
        yield registry
