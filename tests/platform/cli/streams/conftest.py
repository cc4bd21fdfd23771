"""`coranto streams …` against brokers in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from coranto.client.loop import LoopThread
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.command_line import CommandLine


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    loop = LoopThread("cluster")
    cluster = Cluster(brokers=1, grpc=True)
    loop.run(cluster.__aenter__())
    try:
        yield loop.run(_endpoint(cluster))
    finally:
        loop.run(cluster.__aexit__(None, None, None))
        loop.stop()


async def _endpoint(cluster: Cluster) -> str:
    return cluster.endpoint.removeprefix("http://")


@pytest.fixture
def run(
    endpoint: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    monkeypatch.setenv("CORANTO_ENDPOINT", endpoint)
    yield CommandLine(capfdbinary.readouterr, "streams")
    structlog.reset_defaults()


def create(run: CommandLine, name: str, *words: str) -> None:
    created = run("create", name, "--store", STORE_URL, *words)
    assert created.code == 0, created.errors
