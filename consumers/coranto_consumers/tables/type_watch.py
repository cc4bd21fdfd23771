"""Detection of new versions of the messages' type while a table is written.

A producer registers a version before it writes messages of it. So if a transaction finds no later version after it has
read its messages, they have no field that its table lacks.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from coranto.client import SyncJournalClient
from coranto.types.blocking import SyncTypeRegistry
from coranto_consumers.tables.columns import TableLayout
from coranto_consumers.tables.spec import TableSpec


class TypeChanged(Exception):
    """The type of the messages has a later version. Nothing of the transaction is committed."""


class TypeWatch:
    """Finds later versions of a table's type: none if the file names a version, or no registry."""

    def __init__(self, client: SyncJournalClient, spec: TableSpec) -> None:
        is_watched = bool(spec.registry) and "@" not in spec.type
        self._registry = SyncTypeRegistry(client, spec.registry) if is_watched else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._registry is not None:
            self._registry.close()

    def require_latest(self, layout: TableLayout) -> None:
        """Raise TypeChanged if there is a later version than the layout's. Blocks: do not call it in an event loop."""
        version = layout.version
        if self._registry is None or version is None:
            return
        if self._registry.find(version.name).number != version.number:
            raise TypeChanged
