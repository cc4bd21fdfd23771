"""A fake broker with recovery logs, and shared operations on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.labels import CONTENT_TYPE, RECOVERY_LOG, label_set
from coranto.testing.clocks import HurriedClock
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.recoverylog import Author, Authority, Hints, Player, Recorder, RecoveredFiles, new_author
from coranto_consumers.recoverylog.directory import RecordedDirectory

LOG = "recovery/logs/one"


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker() as broker:
        for name in (LOG, "recovery/logs/two"):
            broker.create(name, labels=label_set([(CONTENT_TYPE, RECOVERY_LOG)]))
        yield broker


@pytest.fixture
async def client(broker: FakeBroker) -> AsyncIterator[JournalClient]:
    async with JournalClient(broker.endpoint, clock=HurriedClock()) as client:
        yield client


class Owners:
    """Owners that take over logs one after the other, each with its own folder. All run until the test ends:
    earlier ones are zombies."""

    def __init__(self, client: JournalClient, folder: Path, stack: AsyncExitStack) -> None:
        self._client = client
        self._folder = folder
        self._stack = stack
        self._count = 0

    def new_folder(self) -> Path:
        self._count += 1
        return self._folder / f"owner-{self._count}"

    async def recover(
        self, hints: Hints | None = None, author: Author | None = None, authority: Authority | None = None
    ) -> RecoveredFiles:
        async with Player(self._client, hints or Hints(LOG), self.new_folder(), authority=authority) as player:
            return await player.hand_off(author or new_author())

    async def peek(self, hints: Hints | None = None) -> RecoveredFiles:
        async with Player(self._client, hints or Hints(LOG), self.new_folder()) as player:
            return await player.finish()

    async def record(
        self, recovery: RecoveredFiles, log: str = "", authority: Authority | None = None
    ) -> RecordedDirectory:
        recorder = Recorder(self._client, recovery, log=log, authority=authority, clock=HurriedClock())
        return RecordedDirectory(await self._stack.enter_async_context(recorder))

    async def take_over(
        self, hints: Hints | None = None, author: Author | None = None, authority: Authority | None = None
    ) -> RecordedDirectory:
        return await self.record(await self.recover(hints, author, authority), authority=authority)


@pytest.fixture
async def owners(client: JournalClient, tmp_path: Path) -> AsyncIterator[Owners]:
    async with AsyncExitStack() as stack:
        yield Owners(client, tmp_path, stack)


@pytest.fixture
def content_of() -> Callable[[Path], dict[str, bytes]]:
    """Read all files below a folder, by relative path."""

    def read(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }

    return read
