"""Creating and changing streams from code that blocks, such as scripts, Dagster assets and notebooks.

`SyncStreams` has the methods of `Streams`, which see for what they mean and raise. It works on the event loop that all
blocking clients of the process share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.loop import Blocking, run_blocking
from coranto.client.sync import SyncJournalClient
from coranto.streams.lifecycle import Streams
from coranto.streams.model import Segment, Stream, StreamCut
from coranto.streams.scaling import Change, ScalingPolicy
from coranto.wire import protocol_pb2 as pb


class SyncStreams(Blocking):
    """`Streams` for code that blocks: `with SyncStreams(client) as streams:`."""

    def __init__(self, client: SyncJournalClient) -> None:
        self._client = JournalClient.of(client.config)
        self._streams = Streams(self._client)

    def close(self) -> None:
        run_blocking(self._client.close())

    def describe(self, name: str) -> Stream:
        return run_blocking(self._streams.describe(name))

    def list(self) -> tuple[Stream, ...]:
        return run_blocking(self._streams.list())

    def heads(self, stream: Stream, segments: Iterable[Segment] | None = None) -> dict[int, int]:
        return run_blocking(self._streams.heads(stream, segments))

    def create(
        self,
        name: str,
        segments: int = 1,
        *,
        template: pb.JournalSpec | None = None,
        content_type: str = labels.JSON_LINES,
        policy: ScalingPolicy | None = None,
        max_writers: int | None = None,
    ) -> Stream:
        return run_blocking(
            self._streams.create(
                name,
                segments,
                template=template,
                content_type=content_type,
                policy=policy,
                max_writers=max_writers,
            )
        )

    def delete(self, name: str) -> None:
        run_blocking(self._streams.delete(name))

    def scale(self, name: str, changes: Sequence[Change]) -> Stream:
        return run_blocking(self._streams.scale(name, changes))

    def seal(self, name: str) -> Stream:
        return run_blocking(self._streams.seal(name))

    def resume(self, name: str) -> Stream:
        return run_blocking(self._streams.resume(name))

    def truncate(self, name: str, cut: StreamCut) -> Stream:
        return run_blocking(self._streams.truncate(name, cut))
