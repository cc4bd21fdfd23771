"""Create and change streams from blocking code, such as scripts, Dagster assets and notebooks."""

from __future__ import annotations

from coranto.client.client import JournalClient
from coranto.client.loop import Blocking, run_blocking
from coranto.client.sync import SyncJournalClient
from coranto.streams.blocking.generated.wrappers import StreamsWrapper
from coranto.streams.control.lifecycle import Streams


class SyncStreams(StreamsWrapper, Blocking):
    """`Streams` for blocking code: `with SyncStreams(client) as streams:`."""

    def __init__(self, client: SyncJournalClient) -> None:
        self._client = JournalClient.of(client.config)
        self._streams = Streams(self._client)

    @property
    def _inner(self) -> Streams:
        return self._streams

    def close(self) -> None:
        run_blocking(self._client.close())
