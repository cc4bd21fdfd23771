"""A PostgreSQL server with logical replication, for these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.platform.ingest.postgres.database import SETTINGS, Database
from tests.servers.sql import PostgresServer


@pytest.fixture(scope="session")
def logical() -> Iterator[PostgresServer]:
    """A server with `wal_level=logical`."""
    with PostgresServer(*SETTINGS) as server:
        yield server


@pytest.fixture
def database(logical: PostgresServer) -> Iterator[Database]:
    """An empty database. Its slots are dropped afterwards."""
    with Database(logical) as database:
        yield database
