"""`JournalClient`: the asynchronous client of all calls to brokers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from coranto import labels
from coranto.client import heads, kept_content, moments, notes
from coranto.client.append.appender import Appender
from coranto.client.append.prepared import PreparedAppend
from coranto.client.config import DEFAULT_RETRY_TIMEOUT, DEFAULT_ROUTE_CACHE, ClientConfig, require_client
from coranto.client.connection import Connection
from coranto.client.direct import DirectReader
from coranto.client.disk_cache import DiskCache
from coranto.client.dispatch import ChosenConnection, Connect, Dispatcher
from coranto.client.heads import Heads
from coranto.client.kept_content import KeptContent
from coranto.client.moments import Moment
from coranto.client.notes import Note
from coranto.client.range_prefetch import BoundedFetches, JournalRange, ReadOf
from coranto.client.reader import TRANSIENT, Reader, ReadOptions
from coranto.client.responses import check_answer, check_well_formed
from coranto.client.retry import Retry, wait_or_raise
from coranto.client.routes import KnownRoute
from coranto.client.values import (
    AppendConditions,
    AppendResult,
    Chunk,
    FragmentInfo,
    JournalInfo,
    Listing,
    Suspend,
)
from coranto.client.watch import Watch
from coranto.effects import Clock, Entropy, SystemClock
from coranto.errors import (
    AppendOutcomeUnknown,
    ApplyOutcomeUnknown,
    CorantoError,
    CorruptData,
    InvalidInput,
    JournalSuspended,
    NotDurable,
    OffsetNotYetAvailable,
    Unavailable,
    status_error,
)
from coranto.fragments.cover_set import CoverSet
from coranto.fragments.fragment import Fragment
from coranto.labels import parse_selector
from coranto.names import validate_journal
from coranto.offsets import JournalOffset, id_of
from coranto.security.call_tokens import Metadata
from coranto.security.tls import ClientTls
from coranto.security.tokens import APPLY_TOKEN_SECONDS, Auth, Capability, scope_of
from coranto.specs.durability import Demand, Durability
from coranto.specs.validation import validate
from coranto.tracing import TraceSpan
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import HeadsRequest, NoteRequest

_FRAGMENTS_PER_PAGE = 1000
T = TypeVar("T")


class ReportedHead(NamedTuple):
    """A journal's write head as a broker reports it."""

    head: int
    revision: int
    """The etcd revision of the broker's key space."""
    is_primary: bool
    journal_id: str
    """Empty from brokers that do not send it."""


class JournalClient:
    """A client of the brokers at `endpoint` (see `ClientConfig`).

    Use as `async with JournalClient("127.0.0.1:8080") as client:`, on one event loop, by any number of tasks. Every
    call may be cancelled. While brokers are unavailable, calls that are safe to repeat are retried for `retry_timeout`
    seconds. Then they raise the last error.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        file_root: Path | None = None,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        auth: Auth | None = None,
        tls: ClientTls | None = None,
        zone: str = "",
        route_cache: int = DEFAULT_ROUTE_CACHE,
        disk_cache: DiskCache | None = None,
        append_streams: bool = True,
        name: str = "",
        clock: Clock | None = None,
        connection: Connection | None = None,
        connect: Connect = Connection,
        entropy: Entropy = os.urandom,
    ) -> None:
        """Simulations pass one `connection` for all calls, or `connect` to make connections."""
        self.config = ClientConfig(
            endpoint, file_root, retry_timeout, auth, tls, zone, route_cache, disk_cache, append_streams, name
        )
        self._clock: Clock = clock or SystemClock()
        self._dispatcher = Dispatcher(self.config, self._clock, connection, connect=connect, entropy=entropy)
        self._direct = DirectReader(file_root, disk_cache)
        self._applied_revision = 0
        self._applied_cluster = 0
        self._dispatcher.durability_client = self

    @classmethod
    def of(cls, config: ClientConfig) -> JournalClient:
        require_client(config)
        return cls(
            config.endpoint,
            file_root=config.file_root,
            retry_timeout=config.retry_timeout,
            auth=config.auth,
            tls=config.tls,
            zone=config.zone,
            route_cache=config.route_cache,
            disk_cache=config.disk_cache,
            append_streams=config.append_streams,
            name=config.name,
        )

    async def __aenter__(self) -> JournalClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. In-flight calls fail."""
        await self._dispatcher.close()

    @property
    def applied_revision(self) -> int:
        """The etcd revision of this client's last change of specs; 0 without a change."""
        return self._applied_revision

    @property
    def applied_cluster(self) -> int:
        """The id of the etcd cluster of `applied_revision`; 0 without a change."""
        return self._applied_cluster

    def suggest_routes(self, routes: Mapping[str, KnownRoute]) -> None:
        """Use these routes, from another client's listing, for journals without a known route.

        Otherwise the first call about a journal goes to a seed. Answers correct outdated routes.
        """
        self._dispatcher.suggest(routes)

    # -- Journals and their specs ----------------------------------------------------------------------------------

    async def list(self, selector: str | pb.LabelSelector = "") -> Listing:
        """List the journals that match a selector such as `name:prefix=flights/, content-type` (all, when empty)."""
        parsed = parse_selector(selector) if isinstance(selector, str) else selector
        return await self._retried(lambda: self._list(pb.ListRequest(selector=parsed)))

    async def _list(self, request: pb.ListRequest) -> Listing:
        subject = "list of journals"
        header: pb.Header | None = None
        journals: list[JournalInfo] = []
        chosen = self._dispatcher.to_seed()
        call = chosen.stub.List(request, metadata=await chosen.for_selector(Capability.LIST, request.selector))
        with chosen.calling(subject, call):
            async for response in call:
                if header is None:
                    header = check_answer(response, subject)
                elif not response.journals:
                    raise CorruptData(f"{subject}: the broker violated the protocol: a later message has no journals")
                journals.extend(map(JournalInfo.of, response.journals))
        if header is None:
            raise CorruptData(f"{subject}: the broker violated the protocol: it answered nothing")
        return Listing(header, tuple(journals))

    async def watch(self, selector: str | pb.LabelSelector = "") -> AsyncGenerator[Listing]:
        """Yield a listing of the journals that match a selector, and another after each creation, change or deletion.

        A change of only a route yields no listing. The watch survives broker restarts, but raises the last error if the
        first listing does not arrive within `retry_timeout`. Close the iterator (`contextlib.aclosing`) when you leave
        it.
        """
        parsed = parse_selector(selector) if isinstance(selector, str) else selector
        watch = Watch(self._dispatcher, self._clock, parsed, self.config.retry_timeout)
        async with contextlib.aclosing(watch.snapshots()) as snapshots:
            async for listing in snapshots:
                yield listing

    async def apply(self, changes: Sequence[pb.ApplyRequest.Change]) -> pb.Header:
        """Create, update and delete journals in one transaction.

        Later calls of this client see the changes at any broker. Raises EtcdTransactionFailed if a journal is not at
        the revision that its change expects, InvalidInput for invalid changes, Unavailable if a broker or etcd is
        overloaded, and ApplyOutcomeUnknown if the answer was lost. After a cancellation the outcome is unknown.
        """
        subject = f"apply of {len(changes)} changes"
        request = pb.ApplyRequest(changes=changes)
        validate(request)
        # Connect first, because only a failure after that leaves the outcome unknown.
        chosen = await self._dispatcher.connected(subject, self.config.retry_timeout)
        try:
            response = await chosen.stub.Apply(request, metadata=await self._apply_metadata(chosen, request))
        except grpc.aio.AioRpcError as error:
            failure = chosen.failure(subject, error)
            # RESOURCE_EXHAUSTED: the broker refused before any change.
            if isinstance(failure, Unavailable) and error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise ApplyOutcomeUnknown(f"{failure}. List the journals to learn whether it was applied.") from error
            raise failure from error
        header = check_answer(response, subject)
        if header.etcd.cluster_id != self._applied_cluster:  # Another etcd has other revisions.
            self._applied_revision, self._applied_cluster = 0, header.etcd.cluster_id
        self._applied_revision = max(self._applied_revision, header.etcd.revision)
        return header

    async def _apply_metadata(self, chosen: ChosenConnection, request: pb.ApplyRequest) -> Metadata | None:
        names = (change.upsert.name or change.delete for change in request.changes)
        forks = any(labels.value_of(change.upsert.labels, labels.FORK_OF) for change in request.changes)
        capability = Capability.APPLY | Capability.READ if forks else Capability.APPLY  # A fork reveals its source.
        return await chosen.for_selector(capability, scope_of(names), APPLY_TOKEN_SECONDS)

    # -- Appending -------------------------------------------------------------------------------------------------

    def appender(
        self,
        journal: str,
        *,
        offset: int = 0,
        check_registers: pb.LabelSelector | None = None,
        union_registers: pb.LabelSet | None = None,
        subtract_registers: pb.LabelSet | None = None,
    ) -> Appender:
        """Return an appender, which streams content. Its append is never retried.

        The append must begin at `offset`, unless that is 0. `check_registers` must match the journal's registers.
        `subtract_registers` and then `union_registers` change them, if there is at least one byte of content.
        """
        conditions = AppendConditions(offset, check_registers, union_registers, subtract_registers)
        return Appender(self._dispatcher, self._parameters(journal, conditions, self._applied_revision))

    def _parameters(self, journal: str, conditions: AppendConditions, min_etcd_revision: int) -> pb.AppendRequest:
        """Return the first message of an append. Raises InvalidInput for invalid parameters."""
        parameters = pb.AppendRequest(
            journal=journal,
            offset=conditions.offset,
            check_registers=conditions.check_registers,
            union_registers=conditions.union_registers,
            subtract_registers=conditions.subtract_registers,
            suspend=pb.AppendRequest.Suspend.ValueType(conditions.suspend),
            min_etcd_revision=min_etcd_revision,
            at_start=conditions.at_start,
        )
        validate_journal(journal, allow_metadata=True)
        validate(parameters)
        return parameters

    async def append(
        self,
        journal: str,
        content: bytes | Sequence[bytes] | AsyncIterable[bytes],
        *,
        offset: int = 0,
        check_registers: pb.LabelSelector | None = None,
        union_registers: pb.LabelSet | None = None,
        subtract_registers: pb.LabelSet | None = None,
        suspend: Suspend = Suspend.RESUME,
        retry_unknown: bool = False,
        retry_timeout: float | None = None,
        min_etcd_revision: int = 0,
        at_start: bool = False,
    ) -> AppendResult:
        """Append content atomically. `suspend` is the effect on the journal's suspension.

        The content must begin at `offset`, unless that is 0, and with `at_start` at 0. Otherwise nothing is applied,
        and the call raises WrongAppendOffset. Gazette's brokers, and early versions of Coranto's, ignore `at_start`.

        After failures that applied nothing, the append is retried for `retry_timeout` seconds; an append of an iterable
        only until its first item was taken. `retry_unknown` also retries after AppendOutcomeUnknown. Then content may
        be committed more than once (see `AppendResult.may_repeat`), which suits messages with UUIDs, whose readers
        discard duplicates. The primary uses the journals' specs as of etcd revision `min_etcd_revision` or later. After
        a cancellation the outcome is unknown.

        The content stays in memory until the append ends. To begin many appends without awaiting each, use an
        `AppendService`, which bounds their memory.
        """
        conditions = AppendConditions(offset, check_registers, union_registers, subtract_registers, suspend, at_start)
        parameters = self._parameters(journal, conditions, max(self._applied_revision, min_etcd_revision))
        if isinstance(content, Sequence):  # Bytes are a sequence too.
            return await self.prepare(parameters, retry_timeout=retry_timeout, retry_unknown=retry_unknown).commit(
                content
            )
        retry = Retry(self.config.retry_timeout if retry_timeout is None else retry_timeout)
        taken = False
        while True:
            try:
                async with Appender(self._dispatcher, parameters, may_proxy=False) as append:
                    await append.write(b"")
                    async for piece in content:
                        taken = True
                        await append.write(piece)
                    return await append.commit()
            except AppendOutcomeUnknown as error:
                if taken or not retry_unknown:
                    raise
                await self._wait(retry, error)
            except TRANSIENT as error:
                if taken:
                    raise
                await self._wait(retry, error)

    def prepare(
        self,
        parameters: pb.AppendRequest,
        *,
        retry_timeout: float | None = None,
        retry_unknown: bool = False,
        registers: bool = True,
        within: TraceSpan | None = None,
    ) -> PreparedAppend:
        """Return an append whose complete content is given later; otherwise like `append`.

        `parameters` is the append's first message on the wire, for callers that make many similar ones. It must be
        well-formed, and belongs to the append from then on. Without `registers` the registers of the result are not
        validated. The append's span is a child of `within`, by default of the current span.
        """
        parameters.min_etcd_revision = max(self._applied_revision, parameters.min_etcd_revision)
        return PreparedAppend(
            self._dispatcher,
            self._clock,
            parameters,
            self.config.retry_timeout if retry_timeout is None else retry_timeout,
            retry_unknown=retry_unknown,
            registers=registers,
            within=within,
        )

    async def durable(
        self,
        appended: AppendResult,
        *,
        replicas: int = 0,
        zones: int = 0,
        synced: bool = False,
        retry_timeout: float | None = None,
    ) -> Durability:
        """Wait until an append is on this number of replicas and zones, and return its durability.

        With `synced`, only replicas that have synced the content to disk count, and brokers sync it now. Content in a
        fragment store meets every demand. Raises NotDurable, with the durability so far, after `retry_timeout` seconds.
        """
        demand = Demand(replicas, zones, synced)
        if appended.durability is not None and appended.durability.meets(demand):
            return appended.durability
        return await self._assured(appended, demand, retry_timeout)

    async def stored(self, appended: AppendResult, *, retry_timeout: float | None = None) -> None:
        """Wait until a fragment store has the whole append.

        Brokers store a fragment when it is long enough, or at the end of its flush interval. Raises NotDurable after
        `retry_timeout` seconds.
        """
        await self._assured(appended, None, retry_timeout)

    async def _assured(self, appended: AppendResult, demand: Demand | None, retry_timeout: float | None) -> Durability:
        """Poll until an append meets a demand or, with None, until it is stored."""
        retry = Retry(self.config.retry_timeout if retry_timeout is None else retry_timeout)
        span = f"[{appended.begin}, {appended.end}) of {appended.journal}"
        while True:
            failure: CorantoError
            try:
                found = await self._durability(appended, sync=demand is not None and demand.synced)
                if found.stored or (demand is not None and found.meets(demand)):
                    return found
                failure = NotDurable(f"{span} is {found}; wanted: {demand or 'in a fragment store'}")
            except (*TRANSIENT, AppendOutcomeUnknown) as error:  # The append that polls is empty.
                failure = error
            await self._wait(retry, failure)

    async def _durability(self, appended: AppendResult, *, sync: bool) -> Durability:
        """Return an append's current durability. Does not wake a suspended journal."""
        journal, begin, end = appended.journal, appended.begin, appended.end
        parameters = self._parameters(journal, AppendConditions(suspend=Suspend.NO_RESUME), self._applied_revision)
        parameters.durability.CopyFrom(pb.DurabilityQuestion(since=begin, sync=sync))
        with contextlib.suppress(JournalSuspended):
            answer = await self.prepare(parameters, retry_timeout=0.0, registers=False).commit(b"")
            if answer.end < end:
                raise CorruptData(f"{journal} ends at {answer.end}, before an acknowledged append that ends at {end}")
            if answer.durability is not None:
                return answer.durability._replace(stored=answer.stored_end >= end)
        fragments = [each.fragment for each in await self.fragments(journal) if each.persisted]
        return Durability(0, 0, stored=CoverSet(fragments).covers(begin, end))

    # -- Reading ---------------------------------------------------------------------------------------------------

    async def read(
        self,
        journal: str,
        offset: int = 0,
        *,
        end_offset: int = 0,
        block: bool = False,
        begin_mod_time: int = 0,
        direct: bool = True,
        fail_on_jump: bool = False,
        journal_id: str = "",
    ) -> AsyncGenerator[Chunk]:
        """Yield the committed content of journal offsets [offset, end_offset), in order and without repetition.

        `offset` -1 is the write head at the time of the call. `end_offset` 0 means no bound. Without `block` the read
        ends at the write head. With `block` it waits there for more content, and survives broker restarts and
        suspensions of any length. Where retention has removed content, the next chunk's offset is higher than the end
        of the previous chunk. With `fail_on_jump` the read raises OffsetJump instead. `begin_mod_time` (Unix seconds)
        skips persisted fragments that were last modified before it.

        `journal_id` is the id of the journal that `offset` belongs to (`Chunk.journal_id`), by default the id of a
        `JournalOffset`. The read raises JournalRecreated if brokers have another journal of this name, or if the
        journal is recreated during the read.

        Unless `direct` is false, persisted fragments are read directly from their store if this process can do so, and
        are verified against their SHA-1 before delivery. Content from brokers is verified at the end of each fragment
        that was read from its beginning, so CorruptFragment is raised after that content was yielded.

        Without `block`, raises OffsetNotYetAvailable if `offset` is beyond the write head, and ContentGone at a gap
        that is too recent to be skipped, after brokers have confirmed that no store has the content. Close the iterator
        (`contextlib.aclosing`) when you leave it early.
        """
        validate_journal(journal, allow_metadata=True)
        if offset < -1 or end_offset < 0 or 0 < end_offset < offset:
            raise InvalidInput(
                f"[{offset}, {end_offset}) is not a range of offsets; the begin must be 0 or more, "
                "and not above the end",
                field="offset",
            )
        if offset == -1:
            # Resolved once, because a retry at -1 would skip content.
            offset = await self.head(journal)
        journal_id = journal_id or id_of(offset) or id_of(end_offset)
        options = ReadOptions(
            journal, offset, end_offset, block, begin_mod_time, direct, fail_on_jump, self._applied_revision, journal_id
        )
        reader = Reader(self._dispatcher, self._direct, self._clock, options, self.config.retry_timeout, self.gap_at)
        async for chunk in reader.read():
            yield chunk

    def prefetch_reads(self, *, block: bool, fail_on_jump: bool) -> ReadOf:
        """Return a function that reads a small range like `read`, for many concurrent reads.

        The reads share a limit on the bytes that they fetch from fragment stores at a time.
        """
        direct = BoundedFetches(self._direct)

        def read(wanted: JournalRange) -> AsyncGenerator[Chunk]:
            validate_journal(wanted.journal, allow_metadata=True)
            if not 0 <= wanted.offset < wanted.end_offset:
                raise InvalidInput(
                    f"[{wanted.offset}, {wanted.end_offset}) is not a range of offsets; the begin must be 0 or more, "
                    "and below the end",
                    field="offset",
                )
            options = ReadOptions(
                wanted.journal,
                wanted.offset,
                wanted.end_offset,
                block,
                fail_on_jump=fail_on_jump,
                min_etcd_revision=self._applied_revision,
                journal_id=wanted.journal_id,
            )
            return Reader(self._dispatcher, direct, self._clock, options, self.config.retry_timeout, self.gap_at).read()

        return read

    async def read_all(self, journal: str, begin: int, end: int) -> bytes:
        """Return exactly the bytes [begin, end).

        Raises OffsetNotYetAvailable if `end` is beyond the write head, and OffsetJump or ContentGone for lost content.
        """
        if begin < 0 or end < begin:
            raise InvalidInput(
                f"[{begin}, {end}) is not a range of offsets; the begin must be 0 or more, and not above the end",
                field="begin",
            )
        content = bytearray()
        if begin < end:
            async for chunk in self.read(journal, begin, end_offset=end, fail_on_jump=True):
                content += chunk.content
        if len(content) != end - begin:
            raise OffsetNotYetAvailable(f"read of {journal}: [{begin}, {end}) ends at {begin + len(content)}")
        return bytes(content)

    async def head(self, journal: str) -> int:
        """Return the write head, with the journal's id (`JournalOffset`). The next append begins there."""
        return (await self.head_and_revision(journal))[0]

    async def head_and_revision(self, journal: str) -> tuple[int, int]:
        """Return the write head, and the etcd revision of the answering broker."""
        found = await self.reported_head(journal)
        return JournalOffset(found.head, found.journal_id), found.revision

    async def reported_head(self, journal: str) -> ReportedHead:
        """Return the write head that a broker reports, preferably the primary."""
        validate_journal(journal, allow_metadata=True)
        retry = Retry(self.config.retry_timeout)
        request = pb.ReadRequest(
            journal=journal, offset=-1, metadata_only=True, min_etcd_revision=self._applied_revision
        )
        asked = 0
        while True:
            try:
                found = await self._head(request)
            except TRANSIENT as error:
                await self._wait(retry, error)
                continue
            asked += 1
            if found.is_primary or asked > 1:
                return found
            # Without a known route, a lagging replica may have answered. Its answer has the route for another attempt.

    async def heads(self, selector: str | pb.LabelSelector = "") -> Heads:
        """Return the state of all journals that match a selector: heads, stored ends, times, registers.

        This is one call for any number of journals. The answering broker asks the primaries of the other journals.
        Gazette's brokers do not support this call; their journals are read one by one, and then times, registers and
        agreement of replicas are unknown. The call needs the capability to read, and for single reads also to list.
        Omits journals that the token does not cover.
        """
        parsed = parse_selector(selector) if isinstance(selector, str) else selector
        request = HeadsRequest(selector=parsed, min_etcd_revision=self._applied_revision)

        async def attempt() -> Heads:
            return await heads.complete(self, parsed, await heads.ask(self._dispatcher.to_seed(), request))

        return await self._retried(attempt)

    async def heads_of_broker(self, selector: str | pb.LabelSelector = "") -> Heads | None:
        """Return the heads of the matching journals whose primary is the broker that answers.

        Returns None if the broker does not support this call. With a client for a single endpoint, a failure shows that
        this broker does not answer. Needs the capability to read.
        """
        parsed = parse_selector(selector) if isinstance(selector, str) else selector
        request = HeadsRequest(selector=parsed, do_not_proxy=True, min_etcd_revision=self._applied_revision)

        async def attempt() -> Heads | None:
            return await heads.ask(self._dispatcher.to_seed(), request)

        return await self._retried(attempt)

    async def _head(self, request: pb.ReadRequest) -> ReportedHead:
        subject = f"write head of {request.journal}"
        # Ask the primary, so that clients see their own appends.
        chosen = self._dispatcher.to_primary(request.journal)
        call = chosen.stub.Read(request, metadata=await chosen.for_journal(Capability.READ, request.journal))
        with chosen.calling(subject, call):
            async for response in call:
                chosen.answered(response.status, response.header)
                if response.status not in (pb.OK, pb.OFFSET_NOT_YET_AVAILABLE):
                    raise status_error(response.status, subject, response.header)
                check_well_formed(response, subject)
                header = response.header
                members, primary = header.route.members, header.route.primary
                is_primary = 0 <= primary < len(members) and members[primary] == header.process_id
                return ReportedHead(response.write_head, header.etcd.revision, is_primary, response.journal_id)
        raise Unavailable(f"{subject}: the broker ended the read without an answer; try again")

    async def moment(self, selector: str | pb.LabelSelector, at: float) -> Moment:
        """Return the positions of the matching journals of JSON lines at a time (Unix seconds).

        The position is the offset of the first message with a later time in its UUID. Raises ContentGone if retention
        has removed the content of that time, and InvalidInput if no journal matches or the time is in the future.
        """
        listing = await self.list(selector)
        if not listing.journals:
            raise InvalidInput("no journal matches; `coranto journals list` shows all", field="selector")
        return await moments.moment_at(self, listing.journals, at)

    async def require_content(self, moment: Moment) -> None:
        """Check that journals still have the content of a moment. Only reads detect gaps within the content.

        Raises ContentGone, which lists all missing content, JournalRecreated, JournalNotFound, and InvalidInput for a
        journal that ends before its offset.
        """
        await moments.require_content(self, moment)

    async def require_same(self, *vectors: Mapping[str, int]) -> None:
        """Check that offsets with ids (`JournalOffset`) belong to the current journals. Makes no call without ids.

        Raises JournalRecreated.
        """
        await moments.require_same(self, *vectors)

    async def fragments(
        self,
        journal: str,
        *,
        begin_mod_time: int = 0,
        end_mod_time: int = 0,
        signature_seconds: int = 0,
    ) -> Sequence[FragmentInfo]:
        """List the journal's fragments by offset; with `end_mod_time` 0 also fragments that are not persisted yet.

        Modification times are Unix seconds. `signature_seconds`, unless 0, requests URLs that are valid for that time.
        """
        found: list[FragmentInfo] = []
        request = pb.FragmentsRequest(
            journal=journal,
            begin_mod_time=begin_mod_time,
            end_mod_time=end_mod_time,
            page_limit=_FRAGMENTS_PER_PAGE,
            signatureTTL=Duration(seconds=signature_seconds) if signature_seconds else None,
        )
        validate(request)
        while True:
            response = await self._fragments_page(request)
            found.extend(FragmentInfo(Fragment.from_wire(entry.spec), entry.signed_url) for entry in response.fragments)
            if not response.next_page_token:
                return found
            if response.next_page_token <= request.next_page_token:
                raise CorruptData(f"fragments of {journal}: the broker's page token does not advance")
            request.next_page_token = response.next_page_token

    async def gap_at(self, journal: str, offset: int) -> int | None:
        """Return the end of a gap in the content at an offset, if brokers confirm the gap; otherwise None.

        Brokers confirm a gap by listing the stores after this call.
        """
        request = pb.FragmentsRequest(journal=journal, page_limit=_FRAGMENTS_PER_PAGE)
        confirmed = False
        while True:
            response = await self._fragments_page(request)
            for each in response.fragments:
                if each.spec.begin <= offset < each.spec.end:
                    return None
                if each.spec.begin > offset:
                    return each.spec.begin if confirmed or response.gap_confirmed else None
            if response.next_page_token <= request.next_page_token:
                return None
            confirmed = response.gap_confirmed  # The gap may be at the end of this page.
            request.next_page_token = response.next_page_token

    async def _fragments_page(self, request: pb.FragmentsRequest) -> pb.FragmentsResponse:
        subject = f"fragments of {request.journal}"

        async def attempt() -> pb.FragmentsResponse:
            chosen = self._dispatcher.to_primary(request.journal)
            metadata = await chosen.for_journal(Capability.READ, request.journal)
            call = chosen.stub.ListFragments(request, metadata=metadata)
            with chosen.calling(subject, call):
                response = await call
            chosen.answered(response.status, response.header)
            check_answer(response, subject)
            check_well_formed(response, subject)
            return response

        return await self._retried(attempt)

    # -- Fragment stores -------------------------------------------------------------------------------------------

    async def store_health(self, url: str, *, check_delete: bool = False, check_delete_prefix: str = "") -> None:
        """Have a broker check that it can write, read, list and sign files in the fragment store at `url`.

        With `check_delete` the broker also writes a file below the store's `check_delete_prefix`, which ends in `/`,
        and removes it. Raises StoreUnhealthy, whose `detail` is the broker's failure.
        """
        subject = f"health of {url}"
        request = pb.FragmentStoreHealthRequest(
            fragment_store=url, check_delete=check_delete, check_delete_prefix=check_delete_prefix
        )
        validate(request)

        async def attempt() -> None:
            chosen = self._dispatcher.to_seed()
            metadata = await chosen.for_selector(Capability.READ | Capability.APPLY, pb.LabelSelector())
            call = chosen.stub.FragmentStoreHealth(request, metadata=metadata)
            with chosen.calling(subject, call):
                response = await call
            if response.status != pb.OK:
                raise status_error(response.status, subject, response.header, response.store_health_error)

        await self._retried(attempt)

    async def note(self, request: NoteRequest) -> Note | None:
        """Read or write a note about files of a fragment store, and return it; None if the broker has no notes.

        Raises EtcdTransactionFailed if a write expects another version than the note has. Concurrent writers must write
        different content, because a retried write recognizes its first attempt by the content.
        """
        return await self._retried(lambda: notes.ask(self._dispatcher.to_seed(), request))

    async def kept_content(self, fragment: Fragment) -> KeptContent | None:
        """Return a fragment's content if any broker has it, even without a store; otherwise None.

        The journal may be deleted.
        """
        return await self._retried(lambda: kept_content.ask(self._dispatcher.to_seed(), fragment))

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first attempt without a transient error, within the retry timeout."""
        retry = Retry(self.config.retry_timeout)
        while True:
            try:
                return await attempt()
            except TRANSIENT as error:
                await self._wait(retry, error)

    async def _wait(self, retry: Retry, error: CorantoError) -> None:
        await wait_or_raise(retry, self._clock, error)
