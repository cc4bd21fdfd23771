"""The memory of audits: storage of their records for later audits and other processes.

By default records are in a journal's first fragment store, below `.coranto-audit/`. Each audit writes one new file with
all records that it knows. Its name sorts after earlier ones, and the last few files are kept. So concurrent audits do
not overwrite each other's records: the latest record of each journal counts. With keys, files are
signed. If there is a witness, only files that it knows are trusted (`coranto.audit.witness`).
"""

from __future__ import annotations

import asyncio
import gzip
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from coranto.audit.remembered import JournalRecord, Records, decode, encode, newest
from coranto.audit.sealing import Seal
from coranto.audit.witness import Statement, Witness, WitnessedFile, sum_of, update_statement
from coranto.errors import CorruptData, FragmentNotFound
from coranto.fragments.stores import FragmentStore

FOLDER: Final = ".coranto-audit"
KEPT_FILES: Final = 8
"""The number of files that are read and kept. Without a witness, at most that many audits may overlap in time."""
_KEPT_ANNOUNCED: Final = 32
"""The number of announced, unconfirmed files that are kept. Older ones belong to audits that died."""
_MAX_READS: Final = 5


@dataclass(frozen=True, slots=True)
class Remembered:
    """All records, by journal, and the faults of unreadable files.

    `broken` lists contradictions between the files and the witness, which prevent writing. `statement` is None if
    there is no witness.
    """

    records: dict[str, JournalRecord] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)
    """The names of unsigned files that were accepted although there are keys."""
    broken: list[str] = field(default_factory=list)
    statement: Statement | None = None
    names: frozenset[str] = frozenset()
    """The files with these records, and the files that contradict the witness."""


class AuditMemory(Protocol):
    """Storage of the records of journals."""

    async def load(self) -> Remembered:
        """Return all records. Raises CorantoError."""
        ...

    async def save(
        self, records: Mapping[str, JournalRecord], at: float, *, forget: Iterable[str] = (), accept: bool = False
    ) -> None:
        """Replace the records of these journals, and drop the records of the journals in `forget`.

        With `accept`, the existing files are valid even if they contradict the witness. Raises CorantoError.
        """
        ...


class StoreMemory:
    """Records in a fragment store, signed if `seal` has keys, and known to a witness if there is one."""

    def __init__(self, store: FragmentStore, seal: Seal = Seal(), witness: Witness | None = None) -> None:
        self._store = store
        self._seal = seal
        self._witness = witness

    # -- Reading -------------------------------------------------------------------------------------------------------

    async def load(self) -> Remembered:
        """Return all records. Raises StoreError, the client's errors, and InvalidInput if files are signed and there
        are no keys."""
        for attempt in range(_MAX_READS):
            # List the files before reading the statement, so that each listed file was announced.
            names = await self._names()
            statement = await self._statement()
            if statement is None:
                return await self._unwitnessed(names)
            found = await self._witnessed(names, statement)
            # Audits delete files after removing them from the statement.
            if not found.broken or attempt == _MAX_READS - 1 or await self._statement() == statement:
                break
        return found

    async def _statement(self) -> Statement | None:
        return await self._witness.read() if self._witness is not None else None

    async def _names(self) -> list[str]:
        """Return the names of all files below the folder, oldest first."""
        names = [file.path async for file in self._store.files(FOLDER) if file.path.endswith(".json.gz")]
        return sorted(names, key=_age)

    async def _unwitnessed(self, names: Sequence[str]) -> Remembered:
        files, damaged, unsigned = [], [], []
        for name in names[-KEPT_FILES:]:
            content = await self._content(name)
            if content is None:
                continue  # Another audit has just replaced it by a later one.
            try:
                files.append((await self._decoded(name, content)).journals)
            except CorruptData as error:
                damaged.append(str(error))
                continue
            if self._is_unsigned(content):
                unsigned.append(name)
        plain = frozenset(name for name in names if "/" not in name)
        return Remembered(newest(files), damaged, unsigned, names=plain)

    async def _witnessed(self, names: Sequence[str], statement: Statement) -> Remembered:
        """Return the records of the files that the witness knows."""
        own = {name for name in names if name.startswith(f"{statement.folder}/")}
        if not any(file.written for file in statement.files):
            # Files from before there was a witness, or of a cluster that had these journals before.
            found = await self._unwitnessed(names)
            broken = [f"brokers' note of them cannot be believed: {statement.damage}"] if statement.damage else []
            return replace(found, broken=broken, statement=statement, names=found.names | own)
        files: list[Records] = []
        damaged: list[str] = []
        unsigned: list[str] = []
        unwritten: set[str] = set()
        troubles: dict[str, str] = {}
        for file in statement.files:
            content = await self._content(file.name)
            if content is None:
                if file.written:
                    troubles[file.name] = "is gone"
                else:
                    unwritten.add(file.name)
            elif sum_of(content) != file.sum:
                troubles[file.name] = "was changed"
            else:
                try:
                    files.append(await self._decoded(file.name, content))
                except CorruptData as error:
                    damaged.append(str(error))
                if self._is_unsigned(content):
                    unsigned.append(file.name)
        troubles.update((name, "is not known to brokers") for name in sorted(own - statement.names))
        contained = {name for each in files for name in each.merged}  # A later file has their records.
        broken = [f"{FOLDER}/{name} {what}" for name, what in troubles.items() if name not in contained]
        records = newest(each.journals for each in files)
        there = frozenset((own | statement.names) - unwritten)
        return Remembered(records, damaged, unsigned, broken, statement, there)

    async def _content(self, name: str) -> bytes | None:
        try:
            return await self._store.get_note(f"{FOLDER}/{name}")
        except FragmentNotFound:
            return None

    def _is_unsigned(self, content: bytes) -> bool:
        return self._seal.keys is not None and self._seal.is_unsealed(content)

    async def _decoded(self, name: str, content: bytes) -> Records:
        def read() -> Records:
            return decode(gzip.decompress(self._seal.unseal(content, name)))

        try:
            return await asyncio.to_thread(read)
        except (OSError, EOFError, CorruptData) as error:
            raise CorruptData(f"{self._store.url}{FOLDER}/{name} is damaged: {error}") from error

    # -- Writing -------------------------------------------------------------------------------------------------------

    async def save(
        self, records: Mapping[str, JournalRecord], at: float, *, forget: Iterable[str] = (), accept: bool = False
    ) -> None:
        for _ in range(_MAX_READS):
            if await self._try_save(records, at, set(forget), accept):
                return
        raise CorruptData(f"other audits write to {self._store.url}{FOLDER} all the time; audit again")

    async def _try_save(self, records: Mapping[str, JournalRecord], at: float, forget: set[str], accept: bool) -> bool:
        """Save the records. Return False if another audit has just chosen another folder."""
        loaded = await self.load()
        if loaded.broken and not accept:
            raise CorruptData(f"the records in {self._store.url}{FOLDER} changed: {'; '.join(loaded.broken)}")
        left = {name: record for name, record in loaded.records.items() if name not in forget}
        text = encode(newest([left, records]), sorted(loaded.names))
        # Remaining files would restore forgotten records.
        stay = [] if forget or accept else sorted(loaded.names.difference(loaded.unsigned), key=_age)[1 - KEPT_FILES :]
        doomed = loaded.names.difference(stay)
        last = max(map(_number_of, loaded.names), default=0)
        if loaded.statement is None:
            name = _new_name("", at, last)
            await self._put(name, await self._sealed(name, text))
        else:
            folder = loaded.statement.folder or uuid.uuid4().hex[:8]
            if not await self._put_witnessed(_new_name(f"{folder}/", at, last), text, doomed):
                return False
        for old in sorted(doomed):
            await self._store.remove_note(f"{FOLDER}/{old}")
        return True

    async def _put_witnessed(self, name: str, text: bytes, doomed: frozenset[str]) -> bool:
        """Announce, write and confirm a file. Return False, without writing, if the witness uses another folder."""
        assert self._witness is not None
        content = await self._sealed(name, text)
        file = WitnessedFile(name, sum_of(content))
        folder = name.partition("/")[0]
        known = await update_statement(
            self._witness, lambda now: now.announced(folder, file) if now.folder in ("", folder) else now
        )
        if known.folder != folder:
            return False
        await self._put(name, content)

        def confirm(now: Statement) -> Statement:
            announced = [each.name for each in now.files if not each.written]
            return now.confirmed(file, doomed.union(announced[:-_KEPT_ANNOUNCED]))

        await update_statement(self._witness, confirm)
        return True

    async def _sealed(self, name: str, text: bytes) -> bytes:
        return await asyncio.to_thread(lambda: self._seal.seal(gzip.compress(text, 6), name))

    async def _put(self, name: str, content: bytes) -> None:
        await self._store.put_note(f"{FOLDER}/{name}", content)


async def last_saved(store: FragmentStore) -> float | None:
    """Return the time of the last audit that kept records in a store, by its file names; None without files.

    Unlike `StoreMemory.load`, it reads no file and needs no keys. Raises StoreError.
    """
    numbers = [_number_of(file.path) async for file in store.files(FOLDER) if file.path.endswith(".json.gz")]
    return max(numbers) / 1000 if numbers else None


def _new_name(folder: str, at: float, last: int) -> str:
    """Return the name of a file written at `at`, above the name of number `last` even if clocks differ."""
    return f"{folder}{max(int(at * 1000), last + 1):015d}-{uuid.uuid4().hex[:8]}.json.gz"


def _age(name: str) -> tuple[int, str]:
    """Return the sort key of a file, oldest first."""
    return _number_of(name), name.rpartition("/")[2]


def _number_of(name: str) -> int:
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
