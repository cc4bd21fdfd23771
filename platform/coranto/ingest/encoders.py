"""The encoder of an ingest's rows, which checks the rows against the message type, if there is one.

`register` adds the fields of the source's schema to the type, before rows with these fields are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from coranto.client.client import JournalClient
from coranto.errors import InvalidInput, JournalNotFound, MessageTypeNotFound
from coranto.ingest.rows import META, RowEncoder
from coranto.ingest.spec import IngestSpec
from coranto.streams.model.stream import transactions_journal
from coranto.types.catalog import TypeVersion
from coranto.types.definitions import JsonForm, MessageType
from coranto.types.kinds import TypeField
from coranto.types.registry import TypeRegistry

_log = structlog.get_logger(__name__)


class Encoders:
    """The encoder for the current version of the type."""

    def __init__(self, client: JournalClient, spec: IngestSpec) -> None:
        self.encoder = RowEncoder(spec.key)
        self._client = client
        self._spec = spec
        self._registered: Sequence[TypeField] | None = None

    async def load(self) -> None:
        """Load the latest version of the type. Raises the errors of `TypeRegistry.find`.

        A type that the ingest registers may be missing.
        """
        spec = self._spec
        if spec.type:
            try:
                self._take(await TypeRegistry(self._client, spec.registry).find(spec.type))
            except (JournalNotFound, MessageTypeNotFound):
                if not spec.registers:
                    raise

    async def register(self, fields: Sequence[TypeField] | None) -> None:
        """Register fields of the source that the type lacks. Raises InvalidInput if they cannot be added."""
        spec = self._spec
        if not fields or fields == self._registered:
            return  # Without fields, no row was read yet.
        wanted = tuple(each for each in fields if each.name != META)
        try:
            definition = MessageType(spec.type, JsonForm(), wanted, f"Written by the ingest {spec.name}.")
            done = await TypeRegistry(self._client, spec.registry).extend(
                definition, like=transactions_journal(spec.stream)
            )
        except InvalidInput as error:
            raise InvalidInput(f"the schema of {spec.kind} cannot be registered as {spec.type}: {error}") from error
        if done.is_new:
            _log.info("ingest.type_registered", ingest=spec.name, type=str(done.version), registry=spec.registry)
        self._take(done.version)
        self._registered = fields

    def _take(self, version: TypeVersion) -> None:
        self.encoder = RowEncoder(self._spec.key, version.definition.fields, str(version))
