"""What the consumers' tests share: stores of both databases."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from coranto_consumers.testing import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    new_database: Callable[[], str] = request.getfixturevalue("postgres").new_database
    return new_database()
