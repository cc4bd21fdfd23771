"""The `coranto` command, and a fake broker that it finds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from coranto.testing.command_line import CommandLine, RemoteBroker


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteBroker]:
    """A fake broker, which $CORANTO_ENDPOINT names."""
    remote = RemoteBroker()
    monkeypatch.setenv("CORANTO_ENDPOINT", remote.fake.endpoint)
    monkeypatch.delenv("CORANTO_FILE_ROOT", raising=False)
    yield remote
    remote.stop()


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Iterator[CommandLine]:
    """Runs the command line in this process."""
    yield CommandLine(capfdbinary.readouterr)
    structlog.reset_defaults()
