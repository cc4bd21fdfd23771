"""The `coranto` command with a fake broker that it finds, and an S3 server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coranto.testing.command_line import CommandLine, RemoteBroker
from tests.servers.s3 import S3Server


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteBroker]:
    """A fake broker, which $CORANTO_ENDPOINT names."""
    remote = RemoteBroker()
    monkeypatch.setenv("CORANTO_ENDPOINT", remote.fake.endpoint)
    monkeypatch.delenv("CORANTO_FILE_ROOT", raising=False)
    yield remote
    remote.stop()


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(capfdbinary.readouterr)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that takes any key and lists in pages of 100, with a bucket for the contract of stores."""
    with S3Server(tmp_path_factory.mktemp("s3"), page_size=100) as server:
        server.create_bucket("contract")
        yield server
