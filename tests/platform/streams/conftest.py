"""Fixtures for tests of streams' writers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coranto.testing.stream_world import StreamWorld, VirtualClock, stream_world


@pytest.fixture
def virtual_clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def world() -> AsyncIterator[StreamWorld]:
    """One broker, and a stream of one segment."""
    async with stream_world() as world:
        yield world
