"""`JournalClient`: the asynchronous client of all calls to brokers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

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
from coranto.client.dispatch import Connect, Dispatcher
from coranto.client.heads import Heads
from coranto.client.kept_content import KeptContent
from coranto.client.moments import Moment
from coranto.client.notes import Note
from coranto.client.reader import TRANSIENT, Reader, ReadOptions
from coranto.client.responses import check_answer, check_well_formed
from coranto.client.retry import Retry, wait_or_raise
from coranto.client.routes import KnownRoute
from coranto.client.side_by_side import BoundedFetches, JournalRange, ReadOf
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
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import HeadsRequest, NoteRequest

_FRAGMENTS_PER_PAGE = 1000


class ToldHead(NamedTuple):
    """A broker's answer to a question for a journal's write head."""

    head: int
    revision: int
    """The etcd revision that the broker knew."""
    is_primary: bool
    journal_id: str
    """Empty if the broker does not tell it."""


class JournalClient:
    """A client of the brokers at `endpoint` (see `ClientConfig`).

    Use as `async with JournalClient("127.0.0.1:8080") as client:`, on one event loop. Safe for many tasks at once.
    Every call may be cancelled. While brokers cannot serve, calls that are safe to repeat are retried for
    `retry_timeout` seconds. Then they raise the last error.
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
        """A simulation passes one `connection` for all calls, or `connect` to make them, in place of real ones."""
        self.config = ClientConfig(
            endpoint, file_root, retry_timeout, auth, tls, zone, route_cache, disk_cache, append_streams, name
        )
        self._clock: Clock = clock or SystemClock()
        self._dispatcher = Dispatcher(self.config, self._clock, connection, connect=connect, entropy=entropy)
        self._direct = DirectReader(file_root, disk_cache)
        self._applied_revision = 0
        self._applied_cluster = 0
        self._dispatcher.assurance = self

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
        """Close all connections for good; calls under way fail."""
        await self._dispatcher.close()

    @property
    def applied_revision(self) -> int:
        """The etcd revision of the last change of specs that this client has made; 0 without any."""
        return self._applied_revision

    @property
    def applied_cluster(self) -> int:
        """The id of the etcd cluster that counts `applied_revision`; 0 without any change."""
        return self._applied_cluster

    def suggest_routes(self, routes: Mapping[str, KnownRoute]) -> None:
        """Try these routes of journals first, which another client has listed.

        Otherwise the first call about a journal goes to a seed. Outdated routes are corrected as learnt ones are.
        """
        self._dispatcher.suggest(routes)

    # -- Journals and their specs ----------------------------------------------------------------------------------

    async def list(self, selector: str | pb.LabelSelector = "") -> Listing:
        """List the journals that match a selector such as `name:prefix=flights/, content-type` (all, when empty)."""
        parsed = parse_selector(selector) if isinstance(selector, str) else selector
        retry = Retry(self.config.retry_timeout)
        while True:
            try:
                return await self._list(pb.ListRequest(selector=parsed))
            except TRANSIENT as error:
                await self._wait(retry, error)

    async def _list(self, request: pb.ListRequest) -> Listing:
        subject = "list of journals"
        header: pb.Header | None = None
        journals: list[JournalInfo] = []
        way = self._dispatcher.to_seed()
        call = way.stub.List(request, metadata=way.tokens.over(Capability.LIST, request.selector))
        with way.calling(subject, call):
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
        """Yield the journals that match a selector: now, and after each creation, change or deletion of one.

        Changes of only a route are not reported. When brokers come and go, the watch resumes where it was. Until its
        first snapshot it raises the last error when `retry_timeout` ends. Close the iterator (`contextlib.aclosing`)
        when you leave it.
        """
        parsed = parse_selector(selector) if isinstance(selector, str) else selector
        watch = Watch(self._dispatcher, self._clock, parsed, self.config.retry_timeout)
        async with contextlib.aclosing(watch.snapshots()) as snapshots:
            async for listing in snapshots:
                yield listing

    async def apply(self, changes: Sequence[pb.ApplyRequest.Change]) -> pb.Header:
        """Create, update and delete journals, all or none.

        Later calls of this client see the changes at any broker. Raises EtcdTransactionFailed when a journal is not at
        the revision that its change expects, InvalidInput for changes that no broker would accept, Unavailable when too
        much was written to etcd, and ApplyOutcomeUnknown when the answer was lost. After a cancellation the outcome is
        unknown too.
        """
        subject = f"apply of {len(changes)} changes"
        request = pb.ApplyRequest(changes=changes)
        validate(request)
        # Connect first, so that a later failure is not one of connecting.
        way = await self._dispatcher.connected(subject, self.config.retry_timeout)
        try:
            response = await way.stub.Apply(request, metadata=self._apply_metadata(request))
        except grpc.aio.AioRpcError as error:
            failure = way.failure(subject, error)
            # A broker that has no room for changes refuses them before it makes any.
            if isinstance(failure, Unavailable) and error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise ApplyOutcomeUnknown(f"{failure}. List the journals to learn whether it was applied.") from error
            raise failure from error
        header = check_answer(response, subject)
        if header.etcd.cluster_id != self._applied_cluster:  # Its revisions are not those of an etcd before it.
            self._applied_revision, self._applied_cluster = 0, header.etcd.cluster_id
        self._applied_revision = max(self._applied_revision, header.etcd.revision)
        return header

    def _apply_metadata(self, request: pb.ApplyRequest) -> Metadata | None:
        names = (change.upsert.name or change.delete for change in request.changes)
        forks = any(labels.value_of(change.upsert.labels, labels.FORK_OF) for change in request.changes)
        capability = Capability.APPLY | Capability.READ if forks else Capability.APPLY  # A fork tells its source.
        return self._dispatcher.tokens.over(capability, scope_of(names), APPLY_TOKEN_SECONDS)

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
        """Return an append to stream content into and then commit. It is never retried.

        `offset`, unless 0, is the offset at which the append must begin. `check_registers` must match the journal's
        registers. `subtract_registers` and then `union_registers` change them, if there is at least one byte of
        content.
        """
        conditions = AppendConditions(offset, check_registers, union_registers, subtract_registers)
        return Appender(self._dispatcher, self._parameters(journal, conditions, self._applied_revision))

    def _parameters(self, journal: str, conditions: AppendConditions, min_etcd_revision: int) -> pb.AppendRequest:
        """Return the first message of an append. Raises InvalidInput for parameters that no broker would accept."""
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
        """Append content and commit it, wholly or not at all. `suspend` says how to treat a suspended journal.

        The content begins at `offset`, unless that is 0, and with `at_start` at 0. Otherwise nothing is applied, and
        the call raises WrongAppendOffset. Gazette's brokers, and early ones of Coranto, do not know `at_start`.

        After failures that applied nothing, bytes and sequences of bytes are retried for `retry_timeout` seconds. An
        iterable is retried only until its first item was taken. `retry_unknown` also retries after
        AppendOutcomeUnknown. Then content may be committed more than once (see `AppendResult.may_repeat`), which suits
        messages with UUIDs, whose readers discard duplicates. The broker that appends knows the journals' specs as of
        `min_etcd_revision` or later. After a cancellation the outcome is unknown.

        The content is held until the append ends. To begin many appends without awaiting each, use an `AppendService`:
        it has a bound on what they hold, at which its `append` waits.
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
    ) -> PreparedAppend:
        """Return an append whose content is given later, all at once; otherwise like `append`.

        `parameters` is the append's first message on the wire, for callers that make many similar ones. It must be
        well-formed, and belongs to the append from then on. Without `registers` the registers of the result are not
        validated: they may be anything that a broker answered.
        """
        parameters.min_etcd_revision = max(self._applied_revision, parameters.min_etcd_revision)
        return PreparedAppend(
            self._dispatcher,
            self._clock,
            parameters,
            self.config.retry_timeout if retry_timeout is None else retry_timeout,
            retry_unknown=retry_unknown,
            registers=registers,
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
        """Wait until an append is on so many replicas, in so many zones, and return what it survives then.

        With `synced` only replicas that have it on their disks count, and brokers sync it now. Content that a fragment
        store has satisfies everything. Raises NotDurable, which tells what the append survives, when `retry_timeout`
        (seconds) runs out.
        """
        demand = Demand(replicas, zones, synced)
        if appended.durability is not None and appended.durability.meets(demand):
            return appended.durability
        return await self._assured(appended, demand, retry_timeout)

    async def stored(self, appended: AppendResult, *, retry_timeout: float | None = None) -> None:
        """Wait until a fragment store has the whole append.

        Brokers store a fragment once it is long enough, or at the end of its flush interval. Raises NotDurable when
        `retry_timeout` (seconds) runs out.
        """
        await self._assured(appended, None, retry_timeout)

    async def _assured(self, appended: AppendResult, demand: Demand | None, retry_timeout: float | None) -> Durability:
        """Ask until an append meets a demand or, with None, until it is stored."""
        retry = Retry(self.config.retry_timeout if retry_timeout is None else retry_timeout)
        span = f"[{appended.begin}, {appended.end}) of {appended.journal}"
        while True:
            failure: CorantoError
            try:
                found = await self._durability(appended, sync=demand is not None and demand.synced)
                if found.stored or (demand is not None and found.meets(demand)):
                    return found
                failure = NotDurable(f"{span} is {found}; wanted: {demand or 'in a fragment store'}")
            except (*TRANSIENT, AppendOutcomeUnknown) as error:  # The append that asks is empty.
                failure = error
            await self._wait(retry, failure)

    async def _durability(self, appended: AppendResult, *, sync: bool) -> Durability:
        """Return an append's durability now. Does not wake a suspended journal."""
        journal, begin, end = appended.journal, appended.begin, appended.end
        parameters = self._parameters(journal, AppendConditions(suspend=Suspend.NO_RESUME), self._applied_revision)
        parameters.durability.CopyFrom(pb.DurabilityQuestion(since=begin, sync=sync))
        with contextlib.suppress(JournalSuspended):  # Then its brokers have no pipeline to ask.
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
        ends at the write head. With `block` it waits there for more, and survives broker restarts and suspensions of
        any length. Where content is gone (retention), the next chunk's offset is higher than the end of the chunk
        before. With `fail_on_jump` the read raises OffsetJump instead. `begin_mod_time` (Unix seconds) skips persisted
        fragments last modified before it.

        `journal_id` is the id of the journal that `offset` is of (`Chunk.journal_id`), by default the one of a
        `JournalOffset`. If brokers have another journal of this name, the read raises JournalRecreated. It also does if
        the journal is replaced while it is read.

        Unless `direct` is false, persisted fragments are read directly from their store if this process can do so.
        They are verified against their SHA-1 before delivery. Content that comes through brokers is verified at the end
        of each fragment that was read from its beginning, so CorruptFragment is raised after that content.

        Without `block`, raises OffsetNotYetAvailable when `offset` is beyond the write head, and ContentGone at a gap
        that is too young to be jumped over, once brokers have confirmed that no store has the content. Close the
        iterator (`contextlib.aclosing`) when you leave it early.
        """
        validate_journal(journal, allow_metadata=True)
        if offset < -1 or end_offset < 0 or 0 < end_offset < offset:
            raise InvalidInput(
                f"[{offset}, {end_offset}) is not a range of offsets; the begin must be 0 or more, "
                "and not above the end",
                field="offset",
            )
        if offset == -1:
            # Resolved only once: a retry at "the head" would skip content written in between.
            offset = await self.head(journal)
        journal_id = journal_id or id_of(offset) or id_of(end_offset)
        options = ReadOptions(
            journal, offset, end_offset, block, begin_mod_time, direct, fail_on_jump, self._applied_revision, journal_id
        )
        reader = Reader(self._dispatcher, self._direct, self._clock, options, self.config.retry_timeout, self.gap_at)
        async for chunk in reader.read():
            yield chunk

    def reads_side_by_side(self, *, block: bool, fail_on_jump: bool) -> ReadOf:
        """Return a function that reads small ranges like `read`, for many reads at the same time.

        What they fetch of fragment stores at a time is bounded.
        """
        direct = BoundedFetches(self._direct)

        def read(wanted: JournalRange) -> AsyncGenerator[Chunk]:
            validate_journal(wanted.journal, allow_metadata=True)
            if not 0 <= wanted.offset < wanted.end_offset:
                raise InvalidInput(
                    f"[{wanted.offset}, {wanted.end_offset}) is no range of offsets with content; the begin must be 0 "
                    "or more, and below the end",
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

        Raises OffsetNotYetAvailable when `end` is beyond the write head, and OffsetJump or ContentGone when some
        content is gone.
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
        """Return the write head, where the next append begins, with the journal's id (`JournalOffset`)."""
        return (await self.head_and_revision(journal))[0]

    async def head_and_revision(self, journal: str) -> tuple[int, int]:
        """Return the write head, and the etcd revision that the answering broker knew at that time."""
        told = await self.tell_head(journal)
        return JournalOffset(told.head, told.journal_id), told.revision

    async def tell_head(self, journal: str) -> ToldHead:
        """Return the answer to a question for the write head."""
        validate_journal(journal, allow_metadata=True)
        retry = Retry(self.config.retry_timeout)
        request = pb.ReadRequest(
            journal=journal, offset=-1, metadata_only=True, min_etcd_revision=self._applied_revision
        )
        asked = 0
        while True:
            try:
                told = await self._head(request)
            except TRANSIENT as error:
                await self._wait(retry, error)
                continue
            asked += 1
            if told.is_primary or asked > 1:
                return told
            # Without a known route, a replica that is behind may have answered. Its answer told the route: ask again.

    async def heads(self, selector: str | pb.LabelSelector = "") -> Heads:
        """Return brokers' knowledge of all journals that match a selector: heads, stored ends, times, registers.

        This is one call, however many journals there are. The asked broker asks the primaries of the others. Brokers
        that do not have this call (Gazette's) are asked about each journal alone, and then times, registers and
        agreement are not known. The call needs the capabilities to read, and then to list, if any journal has to be
        asked about alone. Journals that the token does not cover are left out.
        """
        parsed = parse_selector(selector) if isinstance(selector, str) else selector
        retry = Retry(self.config.retry_timeout)
        request = HeadsRequest(selector=parsed, min_etcd_revision=self._applied_revision)
        while True:
            try:
                return await heads.complete(self, parsed, await heads.ask(self._dispatcher.to_seed(), request))
            except TRANSIENT as error:
                await self._wait(retry, error)

    async def _head(self, request: pb.ReadRequest) -> ToldHead:
        subject = f"write head of {request.journal}"
        # Ask the primary, so that a client that has appended sees its own append.
        way = self._dispatcher.to_primary(request.journal)
        call = way.stub.Read(request, metadata=way.tokens.about(Capability.READ, request.journal))
        with way.calling(subject, call):
            async for response in call:
                way.answered(response.status, response.header)
                if response.status not in (pb.OK, pb.OFFSET_NOT_YET_AVAILABLE):
                    raise status_error(response.status, subject, response.header)
                check_well_formed(response, subject)
                header = response.header
                members, primary = header.route.members, header.route.primary
                is_primary = 0 <= primary < len(members) and members[primary] == header.process_id
                return ToldHead(response.write_head, header.etcd.revision, is_primary, response.journal_id)
        raise Unavailable(f"{subject}: the broker ended the read without an answer; try again")

    async def moment(self, selector: str | pb.LabelSelector, at: float) -> Moment:
        """Return the positions of the matching journals of JSON lines at a time (Unix seconds).

        The position is the offset of the first message with a later time in its UUID. Raises ContentGone if retention
        has removed the content of that time, and InvalidInput if no journal matches or the time is not over.
        """
        listing = await self.list(selector)
        if not listing.journals:
            raise InvalidInput("no journal matches; `coranto journals list` shows all", field="selector")
        return await moments.moment_at(self, listing.journals, at)

    async def require_content(self, moment: Moment) -> None:
        """Check that journals still have all content of a moment, except for gaps within it, which reads notice.

        Raises ContentGone, which tells all that is gone, JournalRecreated, JournalNotFound, and InvalidInput for a
        journal that ends before its offset.
        """
        await moments.require_content(self, moment)

    async def require_same(self, *vectors: Mapping[str, int]) -> None:
        """Check that offsets with ids (`JournalOffset`) are of the present journals. Without ids it makes no call.

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
        """List the journal's fragments by offset; with `end_mod_time` 0 also those that are not persisted yet.

        Modification times are Unix seconds. `signature_seconds`, unless 0, asks for URLs that are valid for that long.
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
        """Return where content begins again behind an offset without content, if brokers confirm that gap.

        They have then listed the stores after this call. None if the offset has content, or if that is not certain.
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
        retry = Retry(self.config.retry_timeout)
        while True:
            way = self._dispatcher.to_primary(request.journal)
            try:
                call = way.stub.ListFragments(request, metadata=way.tokens.about(Capability.READ, request.journal))
                with way.calling(subject, call):
                    response = await call
                way.answered(response.status, response.header)
                check_answer(response, subject)
                check_well_formed(response, subject)
                return response
            except TRANSIENT as error:
                await self._wait(retry, error)

    # -- Fragment stores -------------------------------------------------------------------------------------------

    async def store_health(self, url: str, *, check_delete: bool = False, check_delete_prefix: str = "") -> None:
        """Let a broker check that it can write, read, list and sign files in the fragment store at `url`.

        With `check_delete` the broker also checks that it can remove files: it writes one below the store's
        `check_delete_prefix`, which ends in `/`, and removes it. Raises StoreUnhealthy, whose `detail` is the failure
        that the broker met.
        """
        subject = f"health of {url}"
        request = pb.FragmentStoreHealthRequest(
            fragment_store=url, check_delete=check_delete, check_delete_prefix=check_delete_prefix
        )
        validate(request)
        retry = Retry(self.config.retry_timeout)
        while True:
            way = self._dispatcher.to_seed()
            try:
                call = way.stub.FragmentStoreHealth(
                    request, metadata=way.tokens.over(Capability.READ | Capability.APPLY, pb.LabelSelector())
                )
                with way.calling(subject, call):
                    response = await call
                if response.status != pb.OK:
                    raise status_error(response.status, subject, response.header, response.store_health_error)
                return
            except TRANSIENT as error:
                await self._wait(retry, error)

    async def note(self, request: NoteRequest) -> Note | None:
        """Read or write a note about files of a fragment store; return it, or None if brokers keep none (Gazette's).

        Raises EtcdTransactionFailed if a note is to be written that has another version than expected. No two writers
        may write the same content: a repeated write takes it for its own.
        """
        retry = Retry(self.config.retry_timeout)
        while True:
            try:
                return await notes.ask(self._dispatcher.to_seed(), request)
            except TRANSIENT as error:
                await self._wait(retry, error)

    async def kept_content(self, fragment: Fragment) -> KeptContent | None:
        """Return a fragment's content if any broker still has it, although no store may; None if none has it.

        The journal may be deleted.
        """
        retry = Retry(self.config.retry_timeout)
        while True:
            try:
                return await kept_content.ask(self._dispatcher.to_seed(), fragment)
            except TRANSIENT as error:
                await self._wait(retry, error)

    async def _wait(self, retry: Retry, error: CorantoError) -> None:
        await wait_or_raise(retry, self._clock, error)
