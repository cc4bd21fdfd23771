"""A real provider for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.oidc import OidcServer, oidc_server


@pytest.fixture
def oidc() -> Iterator[OidcServer]:
    """A provider on this machine."""
    with oidc_server() as server:
        yield server
