"""Fixtures for tests of tables: a cluster with one broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.testing import SyncCluster
from tests.consumers.conftest import DATABASES
from tests.consumers.stores.iceberg.named_catalog import named_catalog
from tests.consumers.tables.shop import Shop


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def shop(cluster: SyncCluster) -> Shop:
    return Shop(cluster)


@pytest.fixture(params=[*DATABASES, "iceberg"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The store and the name of a table, for each kind of store."""
    if request.param == "iceberg":
        named_catalog(tmp_path, monkeypatch)
        return "iceberg://lake", "shop.items"
    return request.getfixturevalue("new_store")(request.param), "items"
