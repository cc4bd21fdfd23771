"""Tools for tests of streams: an in-process cluster with a stream, a manual clock, and connections that break.

`Wire.cut` drops a chosen message of the next append with content and breaks its connection. So a test can cut
exactly before, within or after the content, before the commit, or between the commit and its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coranto.client import JournalClient
from coranto.coordination.etcd import Delete
from coranto.labels import ANY, LINES, with_value
from coranto.messages.framing import Envelope, iter_messages
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.model.events import BytesEvents, JsonEvents
from coranto.streams.model.stream import segment_journal
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.sim.timeline import Process
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswers, AppendBatch, StreamedAppend

STREAM = "shop/orders"


def lose_records(cluster: Cluster, journal: str, *, specs: bool = False) -> None:
    """Make etcd lose the records of brokers about a journal, including the in-sync record and the registers.

    With `specs` it loses all its keys. The brokers lose their copies of in-sync records, too, because they would refuse
    to serve with them.
    """
    etcd = cluster._world.etcd
    lost = [kv.key for kv in etcd.kvs.values() if specs or (journal in kv.key and "/items/" not in kv.key)]
    assert etcd.txn([], [Delete(key) for key in lost], ()).succeeded
    for machine in cluster._world.machines:
        disk = machine.disk.for_process(Process(cluster._world.timeline, "records"))
        for path in map(Path, machine.disk.paths()):
            if "records" in path.parts:
                disk.remove(path)


class VirtualClock:
    """A clock that moves only by `advance`, which also ends waits that are due."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waits: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return 1_700_000_000.0 + self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        wait = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waits, (self.seconds + seconds, len(self._waits), wait))
        await wait

    async def advance(self, seconds: float) -> None:
        """Advance the time and run tasks whose waits are over."""
        self.seconds += seconds
        while self._waits and self._waits[0][0] <= self.seconds:
            _, _, wait = heapq.heappop(self._waits)
            if not wait.done():
                wait.set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)


class CutPoint(enum.Enum):
    """A message of an append with content where the connection can be cut.

    On a stream of small appends, a client sends the whole append as one message. It has no second message of content,
    and no separate status: the connection is then cut after the answer.
    """

    PARAMETERS = "the parameters"
    CONTENT = "content"
    REST = "the second message of content, where there is one"
    COMMIT = "the empty message that commits"
    HALF_CLOSE = "the end of the client's messages"
    ANSWER = "the answer, once it is applied"
    STATUS = "the status after the answer"


_SENT: Final = frozenset({CutPoint.PARAMETERS, CutPoint.CONTENT, CutPoint.COMMIT, CutPoint.HALF_CLOSE})
"""The points that are one message on a stream of appends."""


@dataclass(slots=True)
class HeardAppend:
    """The observed messages of an append."""

    journal: str = ""
    has_content: bool = False
    pieces: int = 0
    """The number of messages with content."""
    committing: bool = False
    messages: int = 0


@dataclass
class Wire:
    """The traffic between a cluster's clients and its brokers: observed, and cut on request."""

    cuts: list[tuple[CutPoint, Callable[[], None] | None]] = field(default_factory=list)
    """The points of the next cuts of appends with content, in order, each with an optional action."""
    appends: list[HeardAppend] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    """Appends with content that reached the broker with no earlier append unanswered: the number of round trips."""
    _unanswered: set[Any] = field(default_factory=set)
    _live: dict[Any, HeardAppend] = field(default_factory=dict)

    def cut(self, *points: CutPoint, then: Callable[[], None] | None = None) -> None:
        """Drop these messages of the next appends with content, in order, and break their connections."""
        self.cuts += [(point, then) for point in points]

    @property
    def contents(self) -> list[HeardAppend]:
        """The appends with content."""
        return [append for append in self.appends if append.has_content]

    def hear(self, call: Any, to_server: bool, message: tuple[Any, ...]) -> bool:
        if not str(call.node).startswith("client"):
            return True
        name = call.method.name
        self.messages[name] += 1
        if name == "AppendStream":
            return self._hear_stream(call, to_server, message)
        if name != "Append":
            return True
        point = self._point(call, to_server, message)
        return point is None or not self._is_cut({point})

    def _is_cut(self, points: Set[CutPoint]) -> bool:
        """Return True if the next cut is at one of these points."""
        if not self.cuts or self.cuts[0][0] not in points:
            return False
        _, then = self.cuts.pop(0)
        if then is not None:
            then()
        return True

    def _hear_stream(self, call: Any, to_server: bool, message: tuple[Any, ...]) -> bool:
        if message[0] != "message":
            return True
        if to_server:
            found = [self._of_stream(call, each) for each in AppendBatch.FromString(message[1]).appends]
            return not (any(append.has_content for append in found) and self._is_cut(_SENT))
        answered = {(call, answer.id) for answer in AppendAnswers.FromString(message[1]).answers}
        if not answered & self._unanswered:
            return True
        self._unanswered -= answered
        if self._is_cut({CutPoint.STATUS}):
            asyncio.get_running_loop().call_soon(call.lose)
            return True
        return not self._is_cut({CutPoint.ANSWER})

    def _of_stream(self, call: Any, append: StreamedAppend) -> HeardAppend:
        heard = HeardAppend(append.request.journal, append.request.HasField("union_registers"), 1, True, 1)
        self.appends.append(heard)
        if heard.has_content:
            self.rounds += not self._unanswered
            self._unanswered.add((call, append.id))
        return heard

    def _point(self, call: Any, to_server: bool, message: tuple[Any, ...]) -> CutPoint | None:
        append = self._live.get(call)
        if append is None:
            append = self._live[call] = HeardAppend()
            self.appends.append(append)
        append.messages += 1
        if not to_server:
            if not append.has_content:
                return None
            self._unanswered.discard(call)
            return CutPoint.ANSWER if message[0] == "message" else CutPoint.STATUS
        if message[0] == "end":
            return CutPoint.HALF_CLOSE if append.has_content else None
        if message[0] != "message":
            return None
        request = pb.AppendRequest.FromString(message[1])
        if request.journal:
            append.journal = request.journal
            append.has_content = request.HasField("union_registers")
            if append.has_content:
                self.rounds += not self._unanswered
                self._unanswered.add(call)
            return CutPoint.PARAMETERS if append.has_content else None
        if request.content:
            append.pieces += 1
            return {1: CutPoint.CONTENT, 2: CutPoint.REST}.get(append.pieces)
        append.committing = True
        return CutPoint.COMMIT if append.has_content else None


@dataclass
class StreamWorld:
    """A cluster with a stream, and access to its content."""

    cluster: Cluster
    client: JournalClient
    streams: Streams
    wire: Wire
    stream: str = STREAM

    @functools.cached_property
    def calling_client(self) -> JournalClient:
        """A client that makes a separate call for each append, even for small ones."""
        return self.cluster.client(append_streams=False)

    async def content(self, segment: int = 0) -> bytes:
        """Return all bytes of a segment."""
        journal = segment_journal(self.stream, segment)
        return await self.client.read_all(journal, 0, await self.client.head(journal))

    async def messages(self, segment: int = 0, events: JsonEvents | BytesEvents | None = None) -> list[Envelope[Any]]:
        """Return all messages of a segment, committed or not."""
        framing: Any = events or JsonEvents()
        return list(iter_messages(framing, segment_journal(self.stream, segment), [await self.content(segment)], 0))


@contextlib.asynccontextmanager
async def stream_world(
    brokers: int = 1,
    *,
    delay: float = 0.0,
    segments: int = 1,
    replication: int = 1,
    zones: Sequence[str] = ("local",),
    grpc: bool = False,
    log_level: str = "warning",
    heard: bool = True,
    append_streams: bool = True,
    **create: Any,
) -> AsyncIterator[StreamWorld]:
    """Yield a cluster of `brokers` brokers with a stream. `create` are more options of the stream.

    With `heard`, the traffic is observed and recorded. Without `append_streams`, each append is a separate call.
    """
    async with Cluster(brokers, delay=delay, zones=zones, grpc=grpc, log_level=log_level) as cluster:
        client = cluster.client(append_streams=append_streams)
        streams = Streams(client)
        template = default_template(stores=[STORE_URL], replication=replication)
        template.labels.CopyFrom(with_value(template.labels, LINES, ANY))  # Tests write events of any format.
        stream = await streams.create(STREAM, segments, template=template, **create)
        await cluster.ready(*(segment.journal for segment in stream.active()))
        wire = Wire()
        if heard:
            cluster._world.rpc.on_delivery = wire.hear
        yield StreamWorld(cluster, client, streams, wire)
