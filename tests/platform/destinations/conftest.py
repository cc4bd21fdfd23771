"""A cluster for pipelines of dlt. `make test-ingest` runs the tests that need dlt."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.client import SyncJournalClient
from coranto.client.loop import LoopThread
from coranto.testing.cluster import STORE_URL, Cluster

WITH_DLT = [
    "shop.py",
    "test_client.py",
    "test_client_kill.py",
    "test_docs_dlt.py",
    "test_factory.py",
    "test_replacing.py",
]
collect_ignore = [] if os.environ.get("CORANTO_TEST_INGEST") else WITH_DLT


class Running:
    """A cluster on its own event loop, for blocking code."""

    def __init__(self, brokers: int) -> None:
        self.loop = LoopThread("cluster")
        self.cluster = Cluster(brokers=brokers, grpc=True)

    def start(self) -> str:
        self.loop.run(self.cluster.__aenter__())

        async def endpoint() -> str:
            return ",".join(each.removeprefix("http://") for each in self.cluster.endpoints)

        return self.loop.run(endpoint())

    def stop(self) -> None:
        self.loop.run(self.cluster.__aexit__(None, None, None))
        self.loop.stop()


@pytest.fixture
def brokers() -> int:
    return 1


@pytest.fixture
def running(brokers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A cluster that dlt finds through the environment. dlt's folders are below `tmp_path`."""
    running = Running(brokers)
    monkeypatch.setenv("CORANTO_ENDPOINT", running.start())
    monkeypatch.setenv("DESTINATION__CORANTO__STORES", json.dumps([STORE_URL]))
    monkeypatch.setenv("RUNTIME__DLTHUB_TELEMETRY", "false")
    monkeypatch.setenv("DLT_DATA_DIR", str(tmp_path / "dlt"))
    monkeypatch.chdir(tmp_path)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def client(running: Running) -> Iterator[SyncJournalClient]:
    with SyncJournalClient(os.environ["CORANTO_ENDPOINT"]) as client:
        yield client
