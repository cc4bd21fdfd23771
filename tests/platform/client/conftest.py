"""A fake broker, and a client of it that does not wait between attempts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coranto.client import JournalClient
from coranto.testing.clocks import HurriedClock
from coranto.testing.fake_broker import FakeBroker, FakeJournal


@pytest.fixture
def clock() -> HurriedClock:
    return HurriedClock()


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker() as broker:
        yield broker


@pytest.fixture
def journal(broker: FakeBroker) -> FakeJournal:
    return broker.create("test/journal")


@pytest.fixture
async def client(broker: FakeBroker, clock: HurriedClock) -> AsyncIterator[JournalClient]:
    async with JournalClient(broker.endpoint, clock=clock) as client:
        yield client
