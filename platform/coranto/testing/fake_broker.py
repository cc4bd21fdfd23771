"""A broker without a cluster: one process, journals in memory, and faults on request.

It implements the protocol as a real broker does, so a client that works with it handles the protocol correctly.
`FakeBroker.at` injects faults: the next time a call reaches a `CallPoint`, the given `Action` happens there. A *cut*
breaks the TCP connection itself, through a small proxy in front of the gRPC server.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import enum
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from coranto import labels
from coranto.coordination.etcd import MAX_TXN_OPS
from coranto.fragments import codecs
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.journal_ids import fallen_id, is_same
from coranto.names import strip_metadata
from coranto.testing.http_store import HttpStore
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

STORE = "file:///fragments/"
_FULL = pb.JournalSpec.Suspend.FULL
_PROCESS = pb.ProcessSpec.ID(zone="local", suffix="fake-broker")


class CallPoint(enum.Enum):
    """The points of a call that allow an action."""

    LIST = "before a List is answered"
    SNAPSHOT = "before a watched List sends another snapshot"
    APPLY = "before an Apply is applied"
    APPLIED = "after an Apply was applied, before it is answered"
    FRAGMENTS = "before a ListFragments is answered"
    STORE_HEALTH = "before a FragmentStoreHealth is answered"
    APPEND_BEGUN = "after an append's parameters came"
    APPEND_CONTENT = "after a message of content came"
    APPEND_HALF_CLOSED = "after the commit and the half-close came, before anything is applied"
    APPEND_APPLIED = "after an append was applied, before it is answered"
    READ_BEGUN = "before a Read is answered at all"
    READ_METADATA = "before a Read's metadata is sent"
    READ_CONTENT = "before a message of content is sent"
    READ_END = "before a Read's stream is ended"


class Break(enum.Enum):
    """The actions other than an answer with a status."""

    CUT = "break all TCP connections"
    END = "end the stream as if all were well"
    HANG = "never continue"


Action = Break | grpc.StatusCode | int
"""A break, an RPC error that ends the call, or a protocol status as the answer."""


@dataclass(slots=True)
class _Stored:
    fragment: Fragment
    content: bytes
    url: str


@dataclass(slots=True)
class FakeJournal:
    """A journal's spec, its completed fragments in order, and its current spool."""

    spec: pb.JournalSpec
    revision: int
    create_revision: int
    registers: pb.LabelSet = field(default_factory=pb.LabelSet)
    stored: list[_Stored] = field(default_factory=list)
    spool_begin: int = 0
    spool: bytearray = field(default_factory=bytearray)
    elsewhere: bool = False
    """True if another broker serves it. This one proxies calls, or refuses them if it may not proxy."""
    index_end: int = 0
    """The end of the fragment index, if beyond the head because an earlier broker lost content."""
    journal_id: str = ""
    """The id in responses to reads; empty, as from Gazette's brokers, without `has_ids`."""

    @property
    def head(self) -> int:
        return self.spool_begin + len(self.spool)

    def fall(self, offset: int) -> None:
        """Lose the content from an offset on, and continue there with another id, as after `reset-head`."""
        first = self.stored[0].fragment.begin if self.stored else self.spool_begin
        content = self.content[: offset - first]
        self.stored = [item for item in self.stored if item.fragment.end <= offset]
        self.spool_begin = self.stored[-1].fragment.end if self.stored else first
        self.spool = bytearray(content[self.spool_begin - first :])
        self.journal_id = fallen_id(self.journal_id, offset, self.revision)

    @property
    def content(self) -> bytes:
        """All present content, without dropped fragments."""
        return b"".join(item.content for item in self.stored) + bytes(self.spool)

    def roll(self, file_root: Path | None = None, codec: Codec = Codec.NONE) -> Fragment:
        """Complete the spool. With a `file_root` it is persisted there, and readers get its URL."""
        content = bytes(self.spool)
        fragment = Fragment(self.spec.name, self.spool_begin, self.head, sum_of(content), codec)
        url = ""
        if file_root is not None:
            fragment = Fragment(
                fragment.journal, fragment.begin, fragment.end, fragment.sum, codec, STORE, int(time.time())
            )
            path = file_root / "fragments" / fragment.content_path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(codecs.compress(codec, content))
            url = STORE + fragment.content_path
        self.stored.append(_Stored(fragment, content, url))
        self.spool_begin, self.spool = fragment.end, bytearray()
        return fragment

    def roll_to(self, store: HttpStore, codec: Codec = Codec.ZSTANDARD) -> Fragment:
        """Complete the spool, and persist it in a store over HTTP. The broker itself then has none of its content."""
        fragment = replace(self.roll(codec=codec), backing_store="s3://fake/", mod_time=int(time.time()))
        path = f"/{fragment.content_path}"
        store.objects[path] = codecs.compress(codec, self.stored[-1].content), ""
        self.stored[-1] = _Stored(fragment, b"", store.url + path)
        return fragment

    def drop_before(self, offset: int) -> None:
        """Drop completed fragments that end at or before `offset`, as retention does."""
        self.stored = [item for item in self.stored if item.fragment.end > offset]

    def find(self, offset: int) -> tuple[int, _Stored] | None:
        """Return the offset that `offset` resolves to, and the fragment that covers it.

        A read jumps over a gap to persisted content after it.
        """
        index = bisect.bisect_right(self.stored, offset, key=lambda item: item.fragment.end)
        if index < len(self.stored):
            item = self.stored[index]
            if item.fragment.begin <= offset:
                return offset, item
            return (item.fragment.begin, item) if item.fragment.mod_time else None
        if self.spool_begin <= offset < self.head:
            content = bytes(self.spool)
            fragment = Fragment(self.spec.name, self.spool_begin, self.head, sum_of(content), Codec.NONE)
            return offset, _Stored(fragment, content, "")
        return None


class FakeBroker(pb_grpc.JournalServicer):
    """The broker. Use as `async with FakeBroker() as broker:`; clients connect to `broker.endpoint`."""

    def __init__(self) -> None:
        self.journals: dict[str, FakeJournal] = {}
        self.calls: list[str] = []
        """Names of the received calls, in order."""
        self.requests: list[Any] = []
        """The first message of each call, in order."""
        self.chunk_bytes: Callable[[], int] = lambda: 32736
        self.tamper: Callable[[Any], None] = lambda response: None
        """A function that may change responses of Append and Read before they are sent."""
        self.content_sizes: list[int] = []
        """The number of bytes in each message of appended content, in order."""
        self.endpoint = ""
        self.has_ids = False
        """True to give ids to journals that are created from now on. Responses to reads contain them."""
        self.route: pb.Route | None = None
        """The Route that it reports for its journals, instead of a Route with only itself."""
        self._revision = 1
        self._actions: defaultdict[CallPoint, deque[Action | None]] = defaultdict(deque)
        self._reached: Counter[CallPoint] = Counter()
        self._progress = asyncio.Condition()
        self._written = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._proxy = _Proxy()

    # -- For tests -------------------------------------------------------------------------------------------------

    def at(self, point: CallPoint, *actions: Action | None) -> None:
        """Apply these actions, in turn, to the next calls that reach `point`. None lets a call pass."""
        self._actions[point].extend(actions)

    async def reached(self, point: CallPoint, times: int = 1) -> None:
        """Wait until `point` was reached `times` times since the start."""
        async with self._progress:
            await self._progress.wait_for(lambda: self._reached[point] >= times)

    def create(self, name: str, **fields: Any) -> FakeJournal:
        """Add a journal; `fields` belong to its JournalSpec."""
        self._revision += 1
        spec = pb.JournalSpec(name=name, replication=1, **fields)
        self._add(spec)
        self._notify_watchers()
        return self.journals[name]

    def _add(self, spec: pb.JournalSpec) -> None:
        journal_id = f"fake-{self._revision:x}" if self.has_ids else ""
        self.journals[spec.name] = FakeJournal(spec, self._revision, self._revision, journal_id=journal_id)

    async def write(self, name: str, content: bytes) -> None:
        """Commit content, as if a client had appended it."""
        async with self._written:
            self.journals[name].spool += content
            self._written.notify_all()

    def cut(self) -> None:
        """Break all connections. New ones are accepted."""
        self._proxy.cut()

    async def refuse(self) -> None:
        """Break all connections and refuse new ones, until `accept`."""
        await self._proxy.refuse()

    async def accept(self) -> None:
        await self._proxy.listen()

    def advance(self, revisions: int = 1) -> None:
        """Raise the etcd revision in the headers of responses."""
        self._revision += revisions

    def count(self, call: str) -> int:
        return self.calls.count(call)

    async def __aenter__(self) -> FakeBroker:
        self._loop = asyncio.get_running_loop()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_JournalServicer_to_server(self, self._server)
        self._proxy.upstream = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        await self._proxy.listen()
        self.endpoint = f"127.0.0.1:{self._proxy.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._proxy.close()
        if self._server is not None:
            await self._server.stop(None)

    # -- Calls -----------------------------------------------------------------------------------------------------

    async def List(
        self, request: pb.ListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ListResponse]:
        self._on_call("List", request)
        status = await self._reach(CallPoint.LIST, context)
        if status is not None:
            yield pb.ListResponse(status=_status(status), header=self._header())
            return
        if request.HasField("watch_resume"):
            while self._revision <= request.watch_resume.etcd.revision:
                await self._changed.wait()
        while True:
            revision = self._revision
            for response in self._snapshot(request.selector):
                yield response
            if not request.watch:
                return
            yield pb.ListResponse()
            while self._revision == revision:
                await self._changed.wait()
            if await self._reach(CallPoint.SNAPSHOT, context) is not None:
                return

    def _snapshot(self, selector: pb.LabelSelector) -> Iterator[pb.ListResponse]:
        matches = labels.matcher(selector)
        entries = [
            pb.ListResponse.Journal(
                spec=journal.spec,
                mod_revision=journal.revision,
                create_revision=journal.create_revision,
                route=self._header().route,
            )
            for name, journal in sorted(self.journals.items())
            if matches(labels.with_meta(name, journal.spec.labels))
        ]
        yield pb.ListResponse(header=self._header(), journals=entries[:2])
        for begin in range(2, len(entries), 2):
            yield pb.ListResponse(journals=entries[begin : begin + 2])

    def _notify_watchers(self) -> None:
        """Notify watchers that the revision has changed. Callable from any thread."""

        def wake() -> None:
            self._changed.set()
            self._changed = asyncio.Event()

        if self._loop is not None:
            self._loop.call_soon_threadsafe(wake)

    async def Apply(self, request: pb.ApplyRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ApplyResponse:
        self._on_call("Apply", request)
        if len(request.changes) > MAX_TXN_OPS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(request.changes)} changes are too many")
        status = await self._reach(CallPoint.APPLY, context)
        if status is None and not all(map(self._expected, request.changes)):
            status = pb.ETCD_TRANSACTION_FAILED
        if status is None:
            self._revision += 1
            for change in request.changes:
                if change.delete:
                    del self.journals[change.delete]
                elif change.upsert.name in self.journals:
                    journal = self.journals[change.upsert.name]
                    journal.spec, journal.revision = change.upsert, self._revision
                else:
                    self._add(change.upsert)
            self._notify_watchers()
            status = await self._reach(CallPoint.APPLIED, context)
        return pb.ApplyResponse(status=_status(status), header=self._header())

    def _expected(self, change: pb.ApplyRequest.Change) -> bool:
        journal = self.journals.get(change.delete or change.upsert.name)
        return change.expect_mod_revision in (-1, journal.revision if journal else 0)

    async def ListFragments(
        self, request: pb.FragmentsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.FragmentsResponse:
        self._on_call("ListFragments", request)
        status = await self._reach(CallPoint.FRAGMENTS, context)
        journal = self._journal(request.journal)
        if journal is None:
            status = pb.JOURNAL_NOT_FOUND
        elif journal.spec.suspend.level == _FULL:
            status = pb.SUSPENDED
        if status is not None or journal is None:
            return pb.FragmentsResponse(status=_status(status), header=self._header())
        items = list(journal.stored)
        if journal.spool and (found := journal.find(journal.spool_begin)):
            items.append(found[1])
        items = [item for item in items if item.fragment.begin >= request.next_page_token]
        limit = request.page_limit or 1000
        return pb.FragmentsResponse(
            header=self._header(),
            fragments=[
                pb.FragmentsResponse._Fragment(
                    spec=item.fragment.to_wire(), signed_url=item.url if request.HasField("signatureTTL") else ""
                )
                for item in items[:limit]
            ],
            next_page_token=items[limit].fragment.begin if limit < len(items) else 0,
        )

    async def Append(
        self, requests: AsyncIterator[pb.AppendRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AppendResponse:
        first = await anext(requests)
        self._on_call("Append", first)
        status = await self._reach(CallPoint.APPEND_BEGUN, context)
        journal = self._journal(first.journal)
        if status is None:
            status = self._refusal(journal, first)
        if status is not None or journal is None:
            registers = journal.registers if journal is not None else None
            return pb.AppendResponse(status=_status(status), header=self._header(), registers=registers)
        content = bytearray()
        committing = False
        async for message in requests:
            if message.journal or message.offset or message.HasField("header") or (committing and message.content):
                await context.abort(grpc.StatusCode.UNKNOWN, "unexpected message")
            if not message.content:
                committing = True
                continue
            content += message.content
            self.content_sizes.append(len(message.content))
            status = await self._reach(CallPoint.APPEND_CONTENT, context)
            if status is not None:
                return pb.AppendResponse(status=_status(status), header=self._header(), registers=journal.registers)
        if not committing:
            await context.abort(grpc.StatusCode.UNKNOWN, "append stream: unexpected EOF")
        await self._reach(CallPoint.APPEND_HALF_CLOSED, context)
        async with self._written:
            begin = max(journal.head, journal.index_end)
            if begin > journal.head:
                if journal.spool:
                    journal.roll()
                journal.spool_begin = begin
            if journal.spec.suspend.level and first.suspend == pb.AppendRequest.SUSPEND_RESUME:
                journal.spec.suspend.level = pb.JournalSpec.Suspend.NONE
            journal.spool += content
            if content:
                changed = labels.subtract(journal.registers, first.subtract_registers)
                journal.registers = labels.union(first.union_registers, changed)
            self._written.notify_all()
        await self._reach(CallPoint.APPEND_APPLIED, context)
        commit = Fragment(first.journal, begin, begin + len(content), sum_of(bytes(content)), Codec.NONE)
        response = pb.AppendResponse(header=self._header(), commit=commit.to_wire(), registers=journal.registers)
        self.tamper(response)
        return response

    def _refusal(self, journal: FakeJournal | None, request: pb.AppendRequest) -> int | None:
        if journal is None:
            return pb.JOURNAL_NOT_FOUND
        if journal.elsewhere and request.do_not_proxy:
            return pb.NOT_JOURNAL_PRIMARY_BROKER
        if journal.spec.flags == pb.JournalSpec.O_RDONLY:
            return pb.NOT_ALLOWED
        if journal.registers.labels and not labels.matches(request.check_registers, journal.registers):
            return pb.REGISTER_MISMATCH
        if request.offset not in (0, max(journal.head, journal.index_end)):
            return pb.WRONG_APPEND_OFFSET
        if not request.offset and journal.index_end > journal.head:
            return pb.INDEX_HAS_GREATER_OFFSET
        if request.suspend == pb.AppendRequest.SUSPEND_NOW or (
            request.suspend == pb.AppendRequest.SUSPEND_IF_FLUSHED and not journal.spool
        ):
            journal.spec.suspend.level = pb.JournalSpec.Suspend.PARTIAL if journal.stored else _FULL
            return pb.SUSPENDED
        if journal.spec.suspend.level == _FULL and request.suspend != pb.AppendRequest.SUSPEND_RESUME:
            return pb.SUSPENDED
        return None

    async def Read(
        self, request: pb.ReadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ReadResponse]:
        self._on_call("Read", request)
        header: pb.Header | None = self._header()
        status = await self._reach(CallPoint.READ_BEGUN, context)
        journal = self._journal(request.journal)
        if journal is None:
            status = pb.JOURNAL_NOT_FOUND
        elif journal.spec.suspend.level == _FULL:
            status = pb.SUSPENDED
        elif journal.elsewhere and request.do_not_proxy:
            status = pb.NOT_JOURNAL_BROKER
        if status is not None or journal is None:
            yield pb.ReadResponse(status=_status(status), header=header)
            return
        offset = max(journal.head, journal.index_end) if request.offset == -1 else request.offset
        is_of_another = not is_same(request.journal_id, request.offset, journal.journal_id)
        while True:
            found = journal.find(offset) if not is_of_another else None
            if found is None and request.block and not is_of_another:
                async with self._written:
                    while (found := journal.find(offset)) is None:
                        await self._written.wait()
            if await self._reach(CallPoint.READ_METADATA, context) is not None:
                return
            if found is None:
                yield pb.ReadResponse(
                    status=pb.OFFSET_NOT_YET_AVAILABLE,
                    header=header,
                    offset=offset,
                    write_head=max(journal.head, journal.index_end),
                    journal_id=journal.journal_id,
                )
                return
            offset, item = found
            fragment = item.fragment
            metadata = pb.ReadResponse(
                header=header,
                offset=offset,
                write_head=journal.head,
                fragment=fragment.to_wire(),
                fragment_url=item.url,
                journal_id=journal.journal_id,
            )
            self.tamper(metadata)
            yield metadata
            header = None
            end = min(fragment.end, request.end_offset or fragment.end)
            if request.metadata_only or offset >= end or (request.do_not_proxy and fragment.mod_time):
                return
            while offset < end:
                size = max(1, min(self.chunk_bytes(), end - offset))
                begin = offset - fragment.begin
                if await self._reach(CallPoint.READ_CONTENT, context) is not None:
                    return
                chunk = pb.ReadResponse(offset=offset, content=item.content[begin : begin + size])
                self.tamper(chunk)
                yield chunk
                offset += size
            if offset == request.end_offset:
                await self._reach(CallPoint.READ_END, context)
                return

    async def Replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ReplicateResponse]:
        async for _ in requests:
            yield pb.ReplicateResponse(status=pb.NOT_JOURNAL_BROKER, header=self._header())

    async def FragmentStoreHealth(
        self, request: pb.FragmentStoreHealthRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.FragmentStoreHealthResponse:
        self._on_call("FragmentStoreHealth", request)
        status = await self._reach(CallPoint.STORE_HEALTH, context)
        problem = "" if status is None else f"asked for, of {request.fragment_store}"
        return pb.FragmentStoreHealthResponse(status=_status(status), header=self._header(), store_health_error=problem)

    # -- Shared by calls -------------------------------------------------------------------------------------------

    def _on_call(self, call: str, request: Any) -> None:
        self.calls.append(call)
        self.requests.append(request)

    def _journal(self, name: str) -> FakeJournal | None:
        return self.journals.get(strip_metadata(name))

    def _header(self) -> pb.Header:
        own = pb.Route(members=[_PROCESS], primary=0, endpoints=[f"http://{self.endpoint}"])
        return pb.Header(
            process_id=_PROCESS,
            route=own if self.route is None else self.route,
            etcd=pb.Header.Etcd(cluster_id=1, member_id=2, revision=self._revision, raft_term=3),
        )

    async def _reach(self, point: CallPoint, context: grpc.aio.ServicerContext[Any, Any]) -> int | None:
        """Perform the action that is due at this point. Return the status to answer, if any; OK for `Break.END`."""
        async with self._progress:
            self._reached[point] += 1
            self._progress.notify_all()
        actions = self._actions[point]
        action = actions.popleft() if actions else None
        if isinstance(action, grpc.StatusCode):
            await context.abort(action, f"asked for at {point.name}")
        if action is Break.CUT:
            self.cut()
            # The connection is gone, so no answer is possible. Cancellation ends the call.
            await asyncio.Event().wait()
        if action is Break.HANG:
            await asyncio.Event().wait()
        if action is Break.END:
            return pb.OK
        return action if isinstance(action, int) else None


def _status(status: int | None) -> pb.Status.ValueType:
    return pb.Status.ValueType(status or 0)


class _Proxy:
    """Forwards TCP connections to a port of this machine, and breaks them on request."""

    def __init__(self) -> None:
        self.upstream = 0
        self.port = 0
        self._holder: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        if self._holder is None:
            # This socket is bound but never listens, so that no process gets the port while connections are refused.
            self._holder = socket.socket()
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._holder.bind(("127.0.0.1", 0))
            self.port = self._holder.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_port=True)

    async def refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def close(self) -> None:
        await self.refuse()
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        self._writers.add(upstream_writer)
        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(_forward(reader, upstream_writer), _forward(upstream_reader, writer))
        finally:
            for end in (writer, upstream_writer):
                self._writers.discard(end)
                end.transport.abort()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("the other side has closed")
