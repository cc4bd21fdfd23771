"""A fake broker, and a client of it that does not wait between attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from coranto.client import JournalClient
from coranto.testing.fake_broker import FakeBroker, FakeJournal


class HurriedClock:
    """A clock whose waits are over at once; what was waited for adds up in `slept`."""

    def __init__(self) -> None:
        self.slept = 0.0

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        await asyncio.sleep(0)


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
