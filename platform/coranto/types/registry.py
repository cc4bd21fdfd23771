"""`TypeRegistry`: the message types that are registered in a journal (`catalog.py` defines its records)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple

import structlog

from coranto import labels
from coranto.client import JournalClient, JournalInfo
from coranto.client.record_journals import HELD, RecordConditions, next_record, records_spec
from coranto.effects import Clock, SystemClock
from coranto.errors import (
    AppendOutcomeUnknown,
    CorruptData,
    EtcdTransactionFailed,
    InvalidInput,
    JournalNotFound,
    MessageTypeNotFound,
    OffsetJump,
    RegisterMismatch,
    WrongAppendOffset,
)
from coranto.labels import label_selector
from coranto.names import validate_journal
from coranto.types.catalog import Catalog, TypeVersion
from coranto.types.compatibility import Compatibility, FieldProblem
from coranto.types.definitions import MessageType
from coranto.types.merging import merged_fields
from coranto.types.references import parse_reference
from coranto.wire import protocol_pb2 as pb

_TAIL_BYTES: Final = 256
_MISSING: Final = (
    "there is no such registry yet, or your token does not cover it; the first registration creates one with the "
    "settings of another journal: `coranto types register --like JOURNAL`, or `like` of `register`"
)
_log = structlog.get_logger(__name__)


class Registration(NamedTuple):
    """The version of a definition, and True if this call has registered it."""

    version: TypeVersion
    is_new: bool


class TypeRegistry:
    """The registry of message types in a journal. Safe for concurrent tasks.

    Each method first reads the records that were added since the last call. The next call repeats a cancelled read.
    After a cancelled `register`, the version may or may not be registered; call `register` again to find out.

    Methods raise CorruptData if the registry is damaged, or has records of a later version of Coranto, and the client's
    errors, such as JournalNotFound for a missing registry.
    """

    def __init__(self, client: JournalClient, journal: str, *, clock: Clock | None = None) -> None:
        self.journal = validate_journal(journal)
        self._client = client
        self._clock: Clock = clock or SystemClock()
        self._catalog = Catalog(journal)
        self._known_revision = 0
        self._tail = b""
        self._reading = asyncio.Lock()
        self._warned = 0

    async def register(
        self,
        definition: MessageType,
        *,
        compatibility: Compatibility | None = None,
        like: str = "",
        accept_loss: bool = False,
    ) -> Registration:
        """Register a definition as the next version of its type, unless a version since the last NONE has it already.

        `compatibility` is the promise of the version to earlier versions; by default the last promise that was not
        NONE, and BACKWARD for the first version. With `like`, a registry that does not exist is created, with the
        settings of that journal. Raises IncompatibleType, with each field that breaks the promise, and
        AppendOutcomeUnknown if no response arrived within the client's retry timeout: then register it again. Raises
        CorruptData if the brokers have lost the evidence that no record is missing; `accept_loss` continues
        nevertheless.
        """
        return await self._register(lambda: definition, compatibility, like, accept_loss)

    async def extend(self, definition: MessageType, *, like: str = "") -> Registration:
        """Register fields that the latest version of a type lacks, and return the version that has them.

        The next version holds the messages of the latest version and of `definition` (`merged_fields`). If the latest
        version already holds both, nothing is registered. `like` is the same as in `register`. Raises InvalidInput if
        no type holds both types of a field, and the errors of `register`.
        """

        def extended() -> MessageType:
            try:
                latest = self._catalog.find(parse_reference(definition.name)).definition
            except MessageTypeNotFound:
                return definition
            if latest.form != definition.form:
                raise InvalidInput(
                    f"type {latest.name} is registered for messages of framing {latest.form.name}, and these are of "
                    f"{definition.form.name}: give them a type of another name"
                )
            return replace(latest, fields=merged_fields(latest.fields, definition.fields))

        return await self._register(extended, None, like, False)

    async def _register(
        self, define: Callable[[], MessageType], compatibility: Compatibility | None, like: str, accept_loss: bool
    ) -> Registration:
        """Register the definition that `define` returns for the current content of the registry."""
        await self._require(like)
        await self._require_held(accept_loss)
        mine: TypeVersion | None = None
        is_unknown = False
        while True:
            await self._refresh()
            definition = define()
            wanted = self._catalog.next_version(definition, compatibility, self._clock.now())
            if wanted is None:
                found = self._catalog.version_of(definition)
                assert found is not None
                return Registration(found, found == mine)
            mine = mine if is_unknown and mine is not None and mine.number == wanted.number else wanted
            try:
                await self._append(mine.to_line(), accept_loss)
            except (WrongAppendOffset, RegisterMismatch):
                await self._require_held(accept_loss)
            except AppendOutcomeUnknown:
                if is_unknown:
                    raise
                is_unknown = True

    async def problems(
        self, definition: MessageType, *, compatibility: Compatibility | None = None
    ) -> tuple[FieldProblem, ...]:
        """Return the problems that would make `register` reject a definition; empty if there are none. Cancellable."""
        await self._refresh()
        if self._catalog.version_of(definition) is not None:
            return ()
        return self._catalog.problems(definition, compatibility or self._catalog.promise_of(definition.name))

    async def find(self, reference: str) -> TypeVersion:
        """Return the latest version of a type (`shop.Order`), or a specific version (`shop.Order@3`). Cancellable.

        Raises MessageTypeNotFound if there is none.
        """
        wanted = parse_reference(reference)
        await self._refresh()
        return self._catalog.find(wanted)

    async def find_for(self, journals: Iterable[JournalInfo], reference: str = "") -> TypeVersion:
        """Return the type of a reference, or by default the type that the labels of all journals name.

        Raises the errors of `Catalog.find_for`. Cancellable.
        """
        await self._refresh()
        return self._catalog.find_for({info.name: info.spec.labels for info in journals}, reference)

    async def catalog(self) -> Catalog:
        """Return the current content of the registry. Later calls of this registry update it. Cancellable."""
        await self._refresh()
        return self._catalog

    # -- The journal -----------------------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        async with self._reading:
            await self._read_on()

    async def _read_on(self) -> None:
        catalog = self._catalog
        catalog.feed(b"")  # Its end may be known already.
        try:
            head = await self._client.head(self.journal)
            if head < catalog.offset:
                raise self._another(f"ends at {head}")
            if head:
                await self._read_to(head)
        except JournalNotFound as error:
            raise JournalNotFound(self.journal, detail=_MISSING) from error
        except OffsetJump as error:
            raise CorruptData(
                f"registry {self.journal} has lost records: {error} Recover them (`coranto audit`), or begin a new "
                "registry; a registry has no retention"
            ) from error
        if not catalog.is_whole:
            raise CorruptData(f"registry {self.journal} ends at {head} within a record; run `coranto audit` on it")
        if catalog.stray_count > self._warned:
            self._warned = catalog.stray_count
            last = catalog.strays[-1]
            _log.warning(
                "types.stray_lines",
                registry=self.journal,
                lines=catalog.stray_count,
                offset=last.offset,
                problem=last.problem,
            )

    async def _read_to(self, head: int) -> None:
        """Feed the catalog up to an offset. Reads the last known content again, to verify that it is unchanged."""
        known = self._tail
        begin = self._catalog.offset - len(known)
        chunks = self._client.read(self.journal, begin, end_offset=head, fail_on_jump=True)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                same, content = chunk.content[: len(known)], chunk.content[len(known) :]
                if not known.startswith(same):
                    raise self._another("has other records there")
                known = known[len(same) :]
                self._tail = (self._tail + content)[-_TAIL_BYTES:]
                self._catalog.feed(content)

    def _another(self, finding: str) -> CorruptData:
        return CorruptData(
            f"registry {self.journal} was read up to offset {self._catalog.offset}, and {finding} now: it was deleted "
            "and created again, or has lost records. Run `coranto audit` on it, and start over with its records"
        )

    async def _append(self, line: bytes, accept_loss: bool) -> None:
        conditions = next_record(self._catalog.offset)
        if accept_loss and self._catalog.offset:
            conditions = RecordConditions(self._catalog.offset, pb.LabelSelector(), HELD)
        await self._client.append(self.journal, line, min_etcd_revision=self._known_revision, **conditions._asdict())

    async def _require_held(self, accept_loss: bool) -> None:
        """Raise CorruptData if the brokers have content of the registry, but not its registers."""
        at = await self._client.append(self.journal, b"", min_etcd_revision=self._known_revision)
        if at.end and not labels.value_of(at.registers, labels.HELD) and not accept_loss:
            raise CorruptData(
                f"journal {self.journal} has content but not the registers of a registry: it is not one, or all its "
                "brokers were lost, and its last records perhaps with them. Run `coranto audit` on it and recover what "
                "is lost; or accept that versions may be gone (--accept-loss)"
            )

    async def _require(self, like: str) -> None:
        """Ensure that the registry exists; create it like `like`. Raises InvalidInput for an unsuitable journal."""
        found = await self._listed(self.journal)
        if found is None:
            if not like:
                raise JournalNotFound(self.journal, detail=_MISSING)
            await self._create(like)
            return
        if found.spec.fragment.retention.ToNanoseconds():
            raise InvalidInput(
                f"journal {self.journal} has a retention, and a registry needs all its records: remove it there",
                field="registry",
            )
        kind = labels.value_of(found.spec.labels, labels.CONTENT_TYPE, labels.JSON_LINES)
        if kind != labels.JSON_LINES:
            raise InvalidInput(
                f"journal {self.journal} has {labels.CONTENT_TYPE} {kind}, and a registry has lines of JSON: name "
                "another",
                field="registry",
            )

    async def _create(self, like: str) -> None:
        template = await self._listed(like)
        if template is None:
            raise JournalNotFound(like)
        spec = records_spec(self.journal, template.spec, labels.MESSAGE_TYPES)
        try:
            await self._client.apply([pb.ApplyRequest.Change(upsert=spec)])
        except EtcdTransactionFailed as error:  # Another process was faster. Use brokers that know its revision.
            self._known_revision = error.header.etcd.revision if error.header is not None else 0

    async def _listed(self, journal: str) -> JournalInfo | None:
        listing = await self._client.list(label_selector(include=[(labels.NAME, journal)]))
        return next(iter(listing.journals), None)
