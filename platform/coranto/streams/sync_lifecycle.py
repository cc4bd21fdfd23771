"""Creating and changing streams from code that blocks, such as scripts, Dagster assets and notebooks.

`SyncStreams` has the methods of `Streams`, which see for what they mean and raise. It works on the event loop that all
blocking clients of the process share.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.loop import shared_loop
from coranto.client.sync import SyncJournalClient
from coranto.streams.lifecycle import Streams
from coranto.streams.model import Segment, Stream, StreamCut
from coranto.streams.scaling import Change, ScalingPolicy
from coranto.wire import protocol_pb2 as pb

T = TypeVar("T")


class SyncStreams:
    """`Streams` for code that blocks: `with SyncStreams(client) as streams:`."""

    def __init__(self, client: SyncJournalClient) -> None:
        self._client = JournalClient.of(client.config)
        self._streams = Streams(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        _run(self._client.close())

    def describe(self, name: str) -> Stream:
        return _run(self._streams.describe(name))

    def list(self) -> tuple[Stream, ...]:
        return _run(self._streams.list())

    def heads(self, stream: Stream, segments: Iterable[Segment] | None = None) -> dict[int, int]:
        return _run(self._streams.heads(stream, segments))

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
        return _run(
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
        _run(self._streams.delete(name))

    def scale(self, name: str, changes: Sequence[Change]) -> Stream:
        return _run(self._streams.scale(name, changes))

    def seal(self, name: str) -> Stream:
        return _run(self._streams.seal(name))

    def resume(self, name: str) -> Stream:
        return _run(self._streams.resume(name))

    def truncate(self, name: str, cut: StreamCut) -> Stream:
        return _run(self._streams.truncate(name, cut))


def _run(work: Coroutine[Any, Any, T]) -> T:
    return shared_loop().run(work)
