"""Stores in recovery logs, as subjects of the contract of stores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from coranto.client import JournalClient
from coranto.testing.clocks import HurriedClock
from coranto.testing.memory_journals import MemoryJournals
from coranto_consumers.recoverylog import Hints, MemoryAuthority, Player, Recorder, RecoveredFiles, new_author
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.contract import StoreSubject
from coranto_consumers.stores.json_file import JsonFileStore
from coranto_consumers.stores.sqlite_file import SqliteStore

LOG = "recovery/log"


class LogSubject(StoreSubject):
    """A store in a recovery log: opening it takes the log over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journals = MemoryJournals(LOG)
        self.authority = MemoryAuthority()
        self.hints = Hints(LOG)
        self.recorders: list[Recorder] = []

    @property
    def log(self) -> bytearray:
        return self.journals.journals[LOG].content

    async def recover(self) -> RecoveredFiles:
        folder = self.folder / f"owner-{len(self.recorders)}"
        client = cast(JournalClient, self.journals)
        async with Player(client, self.hints, folder, authority=self.authority) as player:
            return await player.hand_off(new_author())

    async def open(self) -> Store:
        recovery = await self.recover()
        recorder = Recorder(
            cast(JournalClient, self.journals), recovery, authority=self.authority, clock=HurriedClock()
        )
        self.recorders.append(await recorder.__aenter__())
        return self.store(recorder)

    def store(self, recorder: Recorder) -> Store:
        raise NotImplementedError


class JsonSubject(LogSubject):
    def store(self, recorder: Recorder) -> JsonFileStore[list[int]]:
        return JsonFileStore(recorder, [])

    async def add(self, store: JsonFileStore[list[int]], number: int) -> None:
        store.state.append(number)

    async def numbers(self, store: JsonFileStore[list[int]]) -> Sequence[int]:
        return list(store.state)


class SqliteSubject(LogSubject):
    copy_bytes = 16 << 20

    def store(self, recorder: Recorder) -> SqliteStore:
        schema = "CREATE TABLE IF NOT EXISTS numbers (number INTEGER, filler BLOB)"
        return SqliteStore(recorder, schema, copy_bytes=self.copy_bytes)

    async def add(self, store: SqliteStore, number: int, filler: bytes = b"") -> None:
        store.connection.execute("INSERT INTO numbers VALUES (?, ?)", (number, filler))

    async def numbers(self, store: SqliteStore) -> Sequence[int]:
        return [row[0] for row in store.connection.execute("SELECT number FROM numbers")]


class CopyingSubject(SqliteSubject):
    """An `SqliteSubject` that copies its database at every commit."""

    copy_bytes = 0
