"""A cluster with one broker, and files of ingests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from coranto.client import JournalClient
from coranto.client.loop import run_blocking
from coranto.streams.reader.stream_reader import StreamReader
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from dagster_coranto import JournalResource

_numbers = itertools.count()


class Place:
    """A folder of JSON files, the file of an ingest of them, and its stream."""

    def __init__(self, folder: Path, cluster: SyncCluster) -> None:
        self.cluster = cluster
        self.journals = JournalResource(endpoint=cluster.endpoint)
        number = next(_numbers)
        self.stream = f"shop/orders-{number}"
        self.name = f"orders-{number}"
        self.rows = folder / "in"
        self.rows.mkdir()
        self.file = folder / "orders.yaml"
        self.file.write_text(
            json.dumps(
                {
                    "name": self.name,
                    "stream": self.stream,
                    "source": {"files": {"url": f"file://{self.rows}/", "pattern": "*.jsonl", "look": "0.1"}},
                    "create": {"segments": "2", "stores": [STORE_URL]},
                    "batch": {"seconds": "0.1"},
                }
            )
        )

    @property
    def key(self) -> dg.AssetKey:
        return dg.AssetKey(self.stream.split("/"))

    def put(self, name: str, *rows: object) -> None:
        (self.rows / f"{name}.part").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (self.rows / f"{name}.part").rename(self.rows / f"{name}.jsonl")

    def events(self) -> list[int]:
        """Return the numbers in the events, sorted."""
        return run_blocking(self._events())

    async def _events(self) -> list[int]:
        async with (
            JournalClient.of(self.journals.client_config()) as client,
            StreamReader[Any](client, self.stream) as reader,
        ):
            return sorted([event.data["n"] async for event in reader])


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def place(cluster: SyncCluster, tmp_path: Path) -> Place:
    return Place(tmp_path, cluster)
