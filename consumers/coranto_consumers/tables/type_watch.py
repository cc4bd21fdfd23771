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


class TypeChanged(Exception):
    """The type of the messages has a later version. Nothing of the transaction is committed."""


class TypeWatch:
    """Finds later versions of a layout's type. None of a version that the file names, or without a registry."""

    def __init__(self, client: SyncJournalClient, layout: TableLayout) -> None:
        is_watched = layout.version is not None and "@" not in layout.spec.type
        self._version = layout.version if is_watched else None
        self._registry = SyncTypeRegistry(client, layout.spec.registry) if is_watched else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._registry is not None:
            self._registry.close()

    def require_latest(self) -> None:
        """Raise TypeChanged if there is a later version. Not for use on the event loop of clients."""
        if self._registry is None or self._version is None:
            return
        if self._registry.find(self._version.name).number != self._version.number:
            raise TypeChanged
