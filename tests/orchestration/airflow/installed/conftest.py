"""An Airflow without processes: home, database, and a connection to a cluster in this process."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

# Airflow reads these when it is imported.
_HOME = tempfile.TemporaryDirectory(prefix="airflow-home-")
os.environ |= {
    "AIRFLOW_HOME": _HOME.name,
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
    "AIRFLOW__CORE__DAGS_FOLDER": str(Path(_HOME.name) / "dags"),
    "AIRFLOW__CORE__FERNET_KEY": "",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{_HOME.name}/airflow.db",
    "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    "GRPC_ENABLE_FORK_SUPPORT": "false",
}

import pytest  # noqa: E402

from airflow_coranto.connection import ConnectionFields  # noqa: E402
from coranto.client import SyncJournalClient  # noqa: E402
from coranto.testing import SyncCluster  # noqa: E402
from tests.orchestration.airflow.installed.world import AirflowWorld, airflow_world  # noqa: E402


@pytest.fixture(scope="session")
def broker() -> Iterator[SyncCluster]:
    """A broker in this process."""
    with SyncCluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def client(broker: SyncCluster, monkeypatch: pytest.MonkeyPatch) -> SyncJournalClient:
    """A client of the broker, with the broker as the connection `coranto_default`."""
    connection = {"conn_type": "coranto", "host": broker.endpoint, "extra": {"cluster": "test"}}
    monkeypatch.setenv("AIRFLOW_CONN_CORANTO_DEFAULT", json.dumps(connection))
    return broker.client()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients give up soon when a cluster is unavailable."""
    usual = ConnectionFields.client_config
    monkeypatch.setattr(ConnectionFields, "client_config", lambda fields: replace(usual(fields), retry_timeout=0.1))


@pytest.fixture
def group(broker: SyncCluster, client: SyncJournalClient) -> str:
    """A group of two new journals."""
    name = f"shop-{os.urandom(4).hex()}/orders"
    for part in ("000", "001"):
        broker.create(f"{name}/part-{part}")
    return name


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowWorld]:
    """A real Airflow over a real cluster, as separate processes."""
    with airflow_world(tmp_path_factory.mktemp("cluster"), tmp_path_factory.mktemp("dags")) as world:
        yield world


@pytest.fixture(scope="session")
def database() -> None:
    """Airflow's database, in its home."""
    from airflow.utils.db import initdb

    initdb()
