"""A client of `consumer.Shard` for code that blocks, such as Dagster assets and scripts."""

from __future__ import annotations

from coranto.client import ClientConfig
from coranto.client.loop import Blocking
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.generated.wrappers import ShardClientWrapper


class SyncShardClient(ShardClientWrapper, Blocking):
    """`ShardClient` for code that blocks: `with SyncShardClient(config) as client:`."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._client = ShardClient(config)

    @property
    def _inner(self) -> ShardClient:
        return self._client

    def close(self) -> None:
        """Close the connections. Using the client again reconnects."""
        self._run(self._client.close())
