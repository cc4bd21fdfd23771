"""Register and find message types from blocking code, such as scripts, Spark and Dagster."""

from __future__ import annotations

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.loop import Blocking, run_blocking
from coranto.types.generated.wrappers import TypeRegistryWrapper
from coranto.types.registry import TypeRegistry


class SyncTypeRegistry(TypeRegistryWrapper, Blocking):
    """`TypeRegistry` for blocking code: `with SyncTypeRegistry(client, "types/registry") as registry:`."""

    def __init__(self, client: SyncJournalClient, journal: str) -> None:
        self.journal = journal
        self._client = JournalClient.of(client.config)
        self._registry = TypeRegistry(self._client, journal)

    @property
    def _inner(self) -> TypeRegistry:
        return self._registry

    def close(self) -> None:
        run_blocking(self._client.close())
