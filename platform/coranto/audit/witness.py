"""The witness of audits: a list of the files of audit records, which brokers keep.

A writer of a fragment store can delete the newest records or restore older ones, and nothing in the store reveals that.
So brokers keep a note in etcd (`coranto.client.notes`): the name and the SHA-256 of each file. A file is announced
before it is written and confirmed afterwards, so an audit that dies in between causes no contradiction. A note contains
its version, which etcd counts, so that restoring an earlier signed note is detected too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, Protocol

import pydantic

from coranto.audit.sealing import Seal
from coranto.client import JournalClient
from coranto.errors import CorantoError, CorruptData, EtcdTransactionFailed, PermissionDenied
from coranto.wire.heads_pb2 import NoteRequest

FORMAT: Final = 1
_ATTEMPTS: Final = 32
"""The maximum number of attempts of a change. An attempt fails only if another audit has succeeded."""


def sum_of(content: bytes) -> str:
    """Return the witness's sum of content: its SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class WitnessedFile:
    """A file of records. `written` is False while its audit writes it, and if that audit died."""

    name: str
    sum: str
    written: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    """The list of the files in a place. `number` counts its changes; 0 if there is no list yet.

    `folder` has the files. `damage` is the reason why the note cannot be trusted; empty if it can.
    """

    folder: str = ""
    files: tuple[WitnessedFile, ...] = ()
    number: int = 0
    damage: str = ""
    format: int = FORMAT

    @property
    def names(self) -> set[str]:
        return {each.name for each in self.files}

    def announced(self, folder: str, file: WitnessedFile) -> Statement:
        """Return the statement with a file that is about to be written."""
        return Statement(folder, (*self.files, file), self.number)

    def confirmed(self, file: WitnessedFile, without: Collection[str]) -> Statement:
        """Return the statement with a file that was written, and without files that are no longer needed."""
        others = (each for each in self.files if each.name not in without and each != file)
        return replace(self, files=(*others, replace(file, written=True)))


class Witness(Protocol):
    """Storage of a statement."""

    async def read(self) -> Statement | None:
        """Return the statement; None if the witness cannot be used. Raises CorantoError without an answer."""
        ...

    async def write(self, statement: Statement) -> bool:
        """Replace a statement of the same number by this one. Return False if its number has changed."""
        ...


class BrokerWitness:
    """A witness in the cluster of `client`, for the files of a fragment store. `name` names the kind of files."""

    def __init__(self, client: JournalClient, store: str, name: str) -> None:
        self._client = client
        self._store = store
        self._name = name
        self._seal = Seal.of(client.config.auth)

    async def read(self) -> Statement | None:
        try:
            note = await self._client.note(NoteRequest(fragment_store=self._store, name=self._name))
        except PermissionDenied:
            return None  # The token does not cover this store's journals.
        if note is None or not note.version:
            return Statement() if note is not None else None
        try:
            found = _STATEMENT.validate_json(self._seal.unseal(note.content, self._title))
        except CorruptData as error:
            return Statement(number=note.version, damage=str(error))
        except pydantic.ValidationError:
            return Statement(number=note.version, damage="it cannot be read")
        if found.format > FORMAT:
            raise CorruptData(f"{self._title} has format {found.format}; this version reads up to {FORMAT}")
        if found.number != note.version:
            return Statement(number=note.version, damage=f"it was put back to an earlier one, number {found.number}")
        return found

    async def write(self, statement: Statement) -> bool:
        content = _STATEMENT.dump_json(replace(statement, number=statement.number + 1, damage=""))
        request = NoteRequest(
            fragment_store=self._store,
            name=self._name,
            write=True,
            content=self._seal.seal(content, self._title),
            expect_version=statement.number,
        )
        try:
            await self._client.note(request)
        except EtcdTransactionFailed:
            return False
        return True

    @property
    def _title(self) -> str:
        return f"the brokers' note of {self._name} in {self._store}"


_STATEMENT: Final = pydantic.TypeAdapter(Statement)


async def update_statement(witness: Witness, how: Callable[[Statement], Statement]) -> Statement:
    """Change a statement, retrying after concurrent changes, and return it. Raises CorantoError if that fails."""
    for _ in range(_ATTEMPTS):
        before = await witness.read()
        if before is None:
            break
        after = how(before)
        if await witness.write(after):
            return replace(after, number=before.number + 1, damage="")
    raise CorantoError("brokers could not note that records were written; audit again")
