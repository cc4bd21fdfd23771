"""The memory of audits: where records are kept, so that other processes and later ones find them.

By default they are in a journal's first fragment store, below `.coranto-audit/`: each audit of some journals writes one
file of all records that it knows. Files have names that rise with time, and the latest few are kept. So audits that run
at once do not overwrite each other's records: the latest record of each journal counts. With keys, files are signed.
"""

from __future__ import annotations

import asyncio
import gzip
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from coranto.audit.remembered import JournalRecord, decode, encode, newest
from coranto.audit.sealing import Seal
from coranto.errors import CorruptData, FragmentNotFound
from coranto.fragments.stores import FragmentStore

FOLDER: Final = ".coranto-audit"
KEPT_FILES: Final = 8
"""The number of files that are read and kept. More audits than that may not overlap in time."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """All records, by journal, and what is wrong with files that cannot be read."""

    records: dict[str, JournalRecord] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)
    """The names of files without a signature, that were accepted although there are keys."""


class AuditMemory(Protocol):
    """Keeps the records of journals."""

    async def load(self) -> Remembered:
        """Return all records. Raises StoreError."""
        ...

    async def save(self, records: Mapping[str, JournalRecord], at: float) -> None:
        """Keep these records in place of earlier ones of the same journals. Raises StoreError."""
        ...

    async def forget(self, journals: set[str], at: float) -> None:
        """Remove the records of these journals. Raises StoreError."""
        ...


class StoreMemory:
    """Records in a fragment store, signed if `seal` has keys."""

    def __init__(self, store: FragmentStore, seal: Seal = Seal()) -> None:
        self._store = store
        self._seal = seal

    async def load(self) -> Remembered:
        """Return all records. Raises StoreError, and InvalidInput if files are signed and there are no keys."""
        files, damaged, unsigned = [], [], []
        for name in (await self._names())[-KEPT_FILES:]:
            try:
                content = await self._store.get_note(f"{FOLDER}/{name}")
                files.append(await self._decoded(name, content))
            except FragmentNotFound:
                continue  # Another audit has just replaced it by a later one.
            except CorruptData as error:
                damaged.append(str(error))
                continue
            if self._seal.keys is not None and self._seal.is_open(content):
                unsigned.append(name)
        return Remembered(newest(files), damaged, unsigned)

    async def save(self, records: Mapping[str, JournalRecord], at: float) -> None:
        loaded = await self.load()
        await self._write(newest([loaded.records, records]), at)
        for name in loaded.unsigned:  # The signed file that was just written has their records.
            await self._store.remove_note(f"{FOLDER}/{name}")

    async def forget(self, journals: set[str], at: float) -> None:
        left = {name: record for name, record in (await self.load()).records.items() if name not in journals}
        before = await self._names()
        await self._write(left, at)
        for name in before:
            await self._store.remove_note(f"{FOLDER}/{name}")

    async def _names(self) -> list[str]:
        return sorted([file.path async for file in self._store.files(FOLDER) if file.path.endswith(".json.gz")])

    async def _decoded(self, name: str, content: bytes) -> dict[str, JournalRecord]:
        def read() -> dict[str, JournalRecord]:
            return decode(gzip.decompress(self._seal.open(content, name)))

        try:
            return await asyncio.to_thread(read)
        except (OSError, EOFError, CorruptData) as error:
            raise CorruptData(f"{self._store.url}{FOLDER}/{name} is damaged: {error}") from error

    async def _write(self, records: Mapping[str, JournalRecord], at: float) -> None:
        name = f"{int(at * 1000):015d}-{uuid.uuid4().hex[:8]}.json.gz"
        content = await asyncio.to_thread(lambda: self._seal.close(gzip.compress(encode(records), 6), name))
        await self._store.put_note(f"{FOLDER}/{name}", content)
        for old in (await self._names())[:-KEPT_FILES]:
            await self._store.remove_note(f"{FOLDER}/{old}")
