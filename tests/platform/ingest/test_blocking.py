"""Ingests from blocking code: reports, stops and interruptions in the caller's thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coranto.client import ClientConfig, JournalClient
from coranto.client.loop import run_blocking
from coranto.errors import PoisonRow
from coranto.ingest.blocking import run_ingest
from coranto.ingest.files.options import FileOptions
from coranto.ingest.runs import IngestReport
from coranto.testing import SyncCluster
from tests.platform.ingest.lists import events, spec

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def given(folder: Path) -> Any:
    options = FileOptions(f"file://{folder}/", "*.jsonl", poll_seconds=0.05)
    return spec(kind="files", options=options, stream=f"shop/{folder.name}", batch_seconds=0.05)


def put(folder: Path, name: str, *rows: object) -> None:
    (folder / f"{name}.part").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / f"{name}.part").rename(folder / f"{name}.jsonl")


def numbers(cluster: SyncCluster, folder: Path) -> list[int]:
    endpoint = cluster.endpoint

    async def read() -> list[int]:
        async with JournalClient.of(ClientConfig(endpoint)) as client:
            return sorted(each["n"] for each in await events(client, f"shop/{folder.name}"))

    return run_blocking(read())


def test_a_run_ends_when_everything_is_read(cluster: SyncCluster, folder: Path) -> None:
    put(folder, "a", {"n": 1}, {"n": 2})
    assert run_ingest(ClientConfig(cluster.endpoint), given(folder)).rows == 2
    assert numbers(cluster, folder) == [1, 2]
    put(folder, "b", "poison")
    with pytest.raises(PoisonRow, match=r"b\.jsonl, offset 0"):
        run_ingest(ClientConfig(cluster.endpoint), given(folder))


def test_a_service_ends_when_stop_returns_true(cluster: SyncCluster, folder: Path) -> None:
    put(folder, "a", {"n": 1})
    seen: list[int] = []

    def show(report: IngestReport) -> None:
        seen.append(report.rows)
        if report.rows == 1:
            put(folder, "b", {"n": 2})

    done = run_ingest(
        ClientConfig(cluster.endpoint),
        given(folder),
        follow=True,
        on_progress=show,
        stop=lambda: bool(seen) and seen[-1] == 2,
    )
    assert done.rows == 2
    assert numbers(cluster, folder) == [1, 2]


def test_an_interruption_stops_after_the_current_batch(cluster: SyncCluster, folder: Path) -> None:
    put(folder, "a", {"n": 1})

    def interrupt(report: IngestReport) -> None:
        if report.rows:
            put(folder, "b", {"n": 2})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ingest(ClientConfig(cluster.endpoint), given(folder), follow=True, on_progress=interrupt)
    first = numbers(cluster, folder)
    assert first in ([1], [1, 2])
    assert run_ingest(ClientConfig(cluster.endpoint), given(folder)).rows == 2 - len(first)
    assert numbers(cluster, folder) == [1, 2]
