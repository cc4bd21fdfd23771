"""New versions of the messages' type while a table is written.

A producer registers a version before it writes messages of it. So a transaction that finds no later version than its
own, once its messages are read, has no field that its table lacks.
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
    """Finds later versions of a table's type. None if the file names a version, or without a registry."""

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
        """Raise TypeChanged if there is a later version than the layout's. Not for the event loop of clients."""
        version = layout.version
        if self._registry is None or version is None:
            return
        if self._registry.find(version.name).number != version.number:
            raise TypeChanged
