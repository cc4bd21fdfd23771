from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coranto.client.loop import run_blocking
from coranto.cluster import EmbeddedCluster
from coranto.testing.fake_broker import FakeBroker

if TYPE_CHECKING:
    from dagster_coranto import JournalResource


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A broker without a cluster, on the event loop shared by blocking clients."""
    made = FakeBroker()
    run_blocking(made.__aenter__())
    yield made
    run_blocking(made.__aexit__(None, None, None))


@pytest.fixture
def journals(broker: FakeBroker, tmp_path: Path) -> JournalResource:
    """The resource for `broker`, with fragment stores below the test's folder."""
    from dagster_coranto import JournalResource  # Tests of other orchestrators run without Dagster.

    return JournalResource(endpoint=broker.endpoint, file_root=str(tmp_path))


@pytest.fixture(scope="module")
def cluster_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a real cluster, named in this process's environment, with a home for Dagster."""
    from dagster_coranto.instance.home import dagster_environment

    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in dagster_environment(folder, {}).items():
            environment.setenv(name, value)
        for name in ("CORANTO_ENDPOINT", "CORANTO_STORE_URL"):
            environment.delenv(name, raising=False)
        with EmbeddedCluster(folder, lease_seconds=60, etcd_fsync=False):
            yield folder
