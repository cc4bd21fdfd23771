"""Peers: channels to other brokers, and the streams that replicate to them."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from coranto.client.append.streams import AppendStreams
from coranto.client.channels import Channels
from coranto.client.config import frame_dialer, parse_endpoint, require_private
from coranto.effects import Bytes
from coranto.errors import InvalidInput, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.security.call_tokens import CallTokens, Metadata
from coranto.security.certificates import ChannelCertificates
from coranto.security.tls import ClientTls
from coranto.security.tokens import Capability
from coranto.transport.calls import FrameCall, FrameDialer, GrpcCall, MessageCall
from coranto.wire import append_stream_pb2_grpc as stream_grpc
from coranto.wire import heads_pb2_grpc as heads_grpc
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto.wire.frames_pb2 import FramePort
from coranto_broker.replication.pipeline import Ask, Extension, ReplicationFailed
from coranto_broker.replication.ready_calls import ReadyCalls
from coranto_broker.rpc.rolled_back import RolledBack

MAX_MESSAGE_BYTES = 16 << 20
HIGH_WATER_BYTES = 8 << 20
"""The unsent content of one peer above which appends wait."""
STALL_SECONDS = 10.0
"""The maximum wait for a peer that neither responds nor accepts data.

A paused or disconnected peer does neither, although its connection stays open. An append that waited longer would hold
the spool, and so block the journal, long after another broker has replaced the peer.
"""
FIRST_STALL_SECONDS = 30.0
"""The maximum wait for a peer's first response, since it may have to recover a spool or wait for the Route."""

JOINED_BYTES = 1 << 16
"""The maximum content that is joined with its proposal in one message. For larger content, the copy is too slow."""
BUSY_PROPOSALS = 8
"""The number of proposals within a second that makes replication switch to frames."""

READABLE_SECONDS = 0.002
"""The maximum time that a `readable` offset waits to be joined with a proposal."""

_GONE = "the broker to forward to is no longer a member of the cluster; try again shortly"

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    # Gazette's brokers close a connection, with all its streams, if pings arrive more often than every five minutes.
    # Paused or disconnected replicas are detected sooner, because they do not answer.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class Peers:
    """The channels to other brokers, by endpoint."""

    def __init__(self, zone: str, tokens: CallTokens | None = None, tls: ClientTls | None = None) -> None:
        """`zone` is this broker's zone: its members are preferred if any may serve. `tls` is for `https` endpoints."""
        self._zone = zone
        self._tokens = tokens
        self._tls = tls
        self._certificates = ChannelCertificates(tls)
        self._channels = Channels(self._open, self._credentials, self._draining)
        self._append_streams: dict[grpc.aio.Channel, AppendStreams] = {}
        # Ordered, because simulations must be deterministic.
        self._framed: weakref.WeakKeyDictionary[FrameCall[Any], None] = weakref.WeakKeyDictionary()
        self._ready = ReadyCalls(self._dialer)

    def stub(self, header: pb.Header) -> pb_grpc.JournalAsyncStub:
        """Return a stub of the broker that `header` names or, if it names none, of any member of its Route."""
        return self.stub_at(self._endpoint_of(header))

    def append_streams(self, header: pb.Header) -> AppendStreams:
        """Return the stream for small appends to the broker that `header` names (see `stub`).

        Raises Unavailable if that broker is gone.
        """
        return self._append_streams_at(self._endpoint_of(header))

    def _append_streams_at(self, endpoint: str) -> AppendStreams:
        if not endpoint:
            raise Unavailable(_GONE)
        channel = self._channels.get(endpoint)
        found = self._append_streams.get(channel)
        if found is None:
            stub: stream_grpc.AppendsAsyncStub = stream_grpc.AppendsStub(channel)
            found = self._append_streams[channel] = AppendStreams(lambda: stub, self._dialer(endpoint))
        return found

    def _dialer(self, endpoint: str) -> FrameDialer | None:
        """Return the dialer of frames to the broker at an endpoint; None if it does not support frames."""
        return frame_dialer(endpoint, self._tls)

    def _draining(self, channel: grpc.aio.Channel) -> None:
        streams = self._append_streams.pop(channel, None)
        if streams is not None:
            streams.renew()

    def _endpoint_of(self, header: pb.Header) -> str:
        route = header.route
        members = list(route.members)
        if header.HasField("process_id") and header.process_id in members:
            index = members.index(header.process_id)
        else:
            index = next((i for i, member in enumerate(members) if member.zone == self._zone), 0)
        return route.endpoints[index] if index < len(route.endpoints) else ""

    def stub_at(self, endpoint: str) -> pb_grpc.JournalAsyncStub:
        """Return a stub of the broker at an endpoint. Raises Unavailable if the endpoint is empty."""
        if not endpoint:
            raise Unavailable(_GONE)
        stub: pb_grpc.JournalAsyncStub = pb_grpc.JournalStub(self._channels.get(endpoint))
        return stub

    def replicate(
        self, endpoint: str, member: pb.ProcessSpec.ID, journal: str, metadata: Metadata | None
    ) -> PeerStream:
        """Begin to replicate to the broker at an endpoint, over frames if such a call is already open."""
        ready = self._ready.take(endpoint, journal)
        if ready is not None:
            self._framed[ready] = None
            stream = PeerStream(ready, member)
            stream.token_age = asyncio.get_running_loop().time() - ready.begun
            return stream
        stream = PeerStream(GrpcCall(self.stub_at(endpoint).Replicate(metadata=metadata)), member)

        def prepare(port: FramePort) -> None:
            # A new token, because the next pipeline outlives the token of this one.
            token = self.metadata(Capability.REPLICATE, journal)
            self._ready.prepare(endpoint, journal, port, token, stream.replacement_is_ready)

        stream.on_busy = prepare
        self._ready.replace_callback(endpoint, journal, stream.replacement_is_ready)
        return stream

    def heads_stub_at(self, endpoint: str) -> heads_grpc.JournalsAsyncStub:
        """Return a stub of the service `Journals` of the broker at an endpoint. Raises Unavailable like `stub_at`."""
        if not endpoint:
            raise Unavailable("the broker to ask is no longer a member of the cluster; try again shortly")
        stub: heads_grpc.JournalsAsyncStub = heads_grpc.JournalsStub(self._channels.get(endpoint))
        return stub

    def metadata_over(self, capability: Capability, selector: pb.LabelSelector) -> Metadata | None:
        """Return metadata like `metadata`, for a call about the journals that a selector matches."""
        return (
            self._tokens.for_selector(capability | Capability.REPLICATE, selector) if self._tokens is not None else None
        )

    def metadata(self, capability: Capability, journal: str) -> Metadata | None:
        """Return the metadata that authorizes a call of this broker about a journal; None without tokens.

        Its token includes REPLICATE, which exempts the call from quotas.
        """
        return (
            self._tokens.for_journal(capability | Capability.REPLICATE, journal) if self._tokens is not None else None
        )

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        try:
            target = parse_endpoint(endpoint)
            if self._tokens is not None and self._tokens.auth is not None:
                require_private(endpoint)
        except InvalidInput as error:
            raise Unavailable(f"peer endpoint {endpoint!r} cannot be used: {error}") from error
        if target.secure:
            return grpc.aio.secure_channel(target.address, self._certificates.get(), options=_OPTIONS)
        return grpc.aio.insecure_channel(target.address, options=_OPTIONS)

    def _credentials(self, endpoint: str) -> grpc.ChannelCredentials | None:
        """Return the current credentials for a channel to an endpoint."""
        return self._certificates.get() if endpoint.startswith("https:") else None

    @contextmanager
    def calling(self, header: pb.Header) -> Iterator[None]:
        """Translate a peer's failure into an error that names the peer."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            named = header.process_id
            peer = f"broker {named.zone}#{named.suffix}" if named.suffix else "a broker of the journal"
            detail = f"{peer} answered {error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidInput(detail) from error
            if error.code() is grpc.StatusCode.ABORTED:  # The append was certainly rolled back.
                raise RolledBack(detail) from error
            raise Unavailable(detail) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # This broker's own client has left.
            raise Unavailable("this broker is shutting down; ask another one") from None

    async def close(self) -> None:
        await asyncio.gather(*(streams.close() for streams in self._append_streams.values()), self._ready.close())
        for call in list(self._framed):
            call.cancel()
        await self._channels.close()


class _StreamEnded(ReplicationFailed):
    """The peer ended the stream normally, which is a failure only if a response is awaited."""


class PeerStream:
    """A peer's spool as a replica of the pipeline: a Replicate call that lives as long as the pipeline.

    Requests are queued and written by a separate task, so sending does not suspend. Responses of all peers are received
    concurrently, whichever is awaited first.
    """

    def __init__(self, call: MessageCall[pb.ReplicateResponse], member: pb.ProcessSpec.ID) -> None:
        """`call` is a started Replicate call."""
        self._member = member
        self._call = call
        self._loop = asyncio.get_running_loop()
        self.token_age = 0.0
        """The age of the call's token in seconds when this stream began."""
        self.on_busy: Callable[[FramePort], None] | None = None
        """Called with the peer's port for frames, if it has one, when proposals are frequent."""
        self.replace: Callable[[], None] = lambda: None
        """Requests the replacement of the pipeline, because a call over frames is open."""
        self._port: FramePort | None = None
        self._busy = 0
        self._busy_since = 0.0
        self._takes_readable = self._takes_joined = False
        self.tells_synced = False
        self._readable: int | None = None  # The unsent `readable` offset, which waits for the next proposal.
        self._readable_since = 0.0  # Event loop time when it began to wait.
        self._readable_is_due = False
        self._readable_timer: asyncio.TimerHandle | None = None  # Checks whether it is due. Serves many proposals.
        self._queue: deque[pb.ReplicateRequest] = deque()
        self._queued_bytes = 0
        self._more = asyncio.Event()
        self._less = asyncio.Event()
        self._closing = False
        self._failed = False
        self._stall_seconds = FIRST_STALL_SECONDS
        self._moved_at = 0.0  # Event loop time of the last sent message.
        self._waits = 0  # The number of waits for the peer.
        self._watch: asyncio.TimerHandle | None = None  # Checks for a stall. Serves many waits.
        self._writing = False
        self._requested = 0  # Responses that were requested and have not arrived.
        self._responses: deque[pb.ReplicateResponse] = deque()
        self._ended: ReplicationFailed | None = None  # The reason for the end of responses.
        self._awaiting: asyncio.Future[None] | None = None
        self._writer = asyncio.create_task(self._write_queue(), name=f"replicate to {member.zone}#{member.suffix}")
        call.receive(self._received, self._call_ended)

    @property
    def is_open(self) -> bool:
        return self._ended is None and not self._failed

    def write(self, content_delta: int, content: Bytes) -> None:
        self._send(pb.ReplicateRequest(content=bytes(content), content_delta=content_delta), len(content))

    def propose(
        self,
        proposal: Fragment,
        registers: pb.LabelSet,
        *,
        header: pb.Header | None,
        acknowledge: bool,
        ask: Ask.ValueType = Ask.NOTHING,
        traceparent: str = "",
    ) -> None:
        request = self._unsent_content()
        if request is None:
            request = pb.ReplicateRequest()
            self._send(request, 0)
        proposal.fill(request.proposal)
        request.acknowledge = acknowledge
        self._requested += acknowledge
        if self._port is not None:
            self._count_proposal(self._port)
        request.registers.CopyFrom(registers)
        if header is not None:
            request.header.CopyFrom(header)
            request.header.process_id.CopyFrom(self._member)
            # Gazette's brokers of the previous release look for the journal here.
            request.deprecated_journal = proposal.journal
            request.readable = 0  # Announces that this primary sends `readable` offsets.
        if ask != Ask.NOTHING and self.tells_synced:
            request.ask = ask
        if traceparent:
            request.traceparent = traceparent

    def extend(self, extension: Extension) -> None:
        call, waits = self._call, self._queue or self._writing or self._closing or self._failed
        knows_ask = extension.ask == Ask.NOTHING or self.tells_synced
        in_one = call.can_write_now and not waits and self._takes_joined and knows_ask
        if not in_one or not call.write_now(extension.encoded()):
            self.write(0, extension.content)
            self.propose(
                extension.proposal,
                extension.registers,
                header=None,
                acknowledge=True,
                ask=extension.ask,
                traceparent=extension.traceparent,
            )
            return
        self._requested += 1
        self._take_readable()  # The message has included the offset.
        self._moved_at = self._loop.time()

    def readable(self, offset: int) -> None:
        # A peer without support for this makes all of its commits visible to readers.
        if self._takes_readable and not self._failed and not self._closing:
            if self._readable is None:
                self._readable_since = self._loop.time()
                if self._readable_timer is None:
                    self._readable_timer = self._loop.call_later(READABLE_SECONDS, self._check_readable)
            self._readable = offset

    async def drain(self) -> None:
        while self._queued_bytes > HIGH_WATER_BYTES and not self._failed:
            self._less.clear()
            with self._waiting():
                await self._less.wait()

    async def acknowledgement(self) -> pb.ReplicateResponse:
        if self._responses:
            response = self._responses.popleft()
        else:
            with self._waiting():
                response = await self._next_response()
        if self._stall_seconds != STALL_SECONDS:
            self._stall_seconds = STALL_SECONDS
            self._stop_watching()  # The timer is set for FIRST_STALL_SECONDS.
        self._takes_readable = self._takes_readable or response.takes_readable
        self.tells_synced = self.tells_synced or response.tells_synced
        self._takes_joined = self._takes_joined or response.takes_content_with_proposal
        if self.on_busy is not None and response.HasField("frames"):
            self._port = response.frames
        return response

    def replacement_is_ready(self) -> None:
        """Request the replacement of the pipeline, unless this stream has ended."""
        if not self._failed and not self._closing:
            self.replace()

    def _count_proposal(self, port: FramePort) -> None:
        """Call `on_busy` after BUSY_PROPOSALS within a second, at most once a second."""
        now = self._loop.time()
        if now - self._busy_since > 1.0:
            self._busy, self._busy_since = 0, now
        self._busy += 1
        if self._busy == BUSY_PROPOSALS and self.on_busy is not None:
            self.on_busy(port)

    def close_send(self) -> None:
        self._closing = True
        self._more.set()

    async def closed(self) -> None:
        try:
            await self._next_response()
            raise ReplicationFailed("the peer sent an answer that was not requested")
        except _StreamEnded:
            return
        finally:
            self.abort()
            await asyncio.gather(self._writer, return_exceptions=True)

    def abort(self) -> None:
        self._failed = True
        self._responses.clear()  # Later calls must not return them.
        self._end(ReplicationFailed("it did not answer in time, and its stream was aborted"))
        self._take_readable()
        self._stop_watching()
        if self._readable_timer is not None:
            self._readable_timer.cancel()
        self._writer.cancel()
        self._call.cancel()
        self._less.set()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Abort the stream if it stalls during the block."""
        self._moved_at = self._loop.time()
        self._waits += 1
        if self._watch is None and not self._failed:
            self._watch = self._loop.call_at(self._moved_at + self._stall_seconds, self._check_stall)
        try:
            yield
        finally:
            self._waits -= 1

    def _check_stall(self) -> None:
        """Abort the stream if it has stalled for too long during a wait."""
        self._watch = None
        if not self._waits or self._failed:
            return
        due = self._moved_at + self._stall_seconds
        if self._loop.time() >= due:
            self.abort()
        else:
            self._watch = self._loop.call_at(due, self._check_stall)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _unsent_content(self) -> pb.ReplicateRequest | None:
        """Return the last unsent message if it has content that a proposal can be joined with."""
        if not self._takes_joined or self._failed or not self._queue:
            return None
        last = self._queue[-1]
        return last if 0 < len(last.content) <= JOINED_BYTES and not last.HasField("proposal") else None

    def _check_readable(self) -> None:
        """Let the writer send the `readable` offset if it has waited for READABLE_SECONDS."""
        self._readable_timer = None
        if self._readable is None:
            return
        due = self._readable_since + READABLE_SECONDS
        if self._loop.time() >= due:
            self._readable_is_due = True
            self._more.set()
        else:
            self._readable_timer = self._loop.call_at(due, self._check_readable)

    def _take_readable(self) -> int:
        """Return the unsent `readable` offset, and clear it. 0 if there is none."""
        offset, self._readable, self._readable_is_due = self._readable or 0, None, False
        return offset

    def _send(self, request: pb.ReplicateRequest, size: int) -> None:
        if self._failed:
            raise ReplicationFailed("the stream is broken")
        self._queue.append(request)
        self._queued_bytes += size
        self._more.set()

    async def _next_response(self) -> pb.ReplicateResponse:
        """Return the next response. Raises _StreamEnded at the end of the stream, and ReplicationFailed."""
        while not self._responses:
            if self._ended is not None:
                raise self._ended
            self._awaiting = self._loop.create_future()
            try:
                await self._awaiting
            except asyncio.CancelledError:
                self.abort()
                raise
            finally:
                self._awaiting = None
        return self._responses.popleft()

    def _received(self, response: pb.ReplicateResponse) -> None:
        if not self._requested:
            self._end(ReplicationFailed("the peer sent a response that was not requested"))
            self._call.cancel()
            return
        self._requested -= 1
        if self._ended is None:
            self._responses.append(response)
            self._wake()

    def _call_ended(self, status: grpc.aio.AioRpcError | None) -> None:
        if status is None:
            self._end(_StreamEnded("the peer ended the stream"))
            return
        failure = ReplicationFailed(f"{status.code().name}: {status.details()}")
        failure.__cause__ = status
        self._end(failure)

    def _end(self, reason: ReplicationFailed) -> None:
        """Set the reason for the end of responses, unless there is one."""
        self._ended = self._ended or reason
        self._wake()

    def _wake(self) -> None:
        if self._awaiting is not None and not self._awaiting.done():
            self._awaiting.set_result(None)

    async def _write_queue(self) -> None:
        try:
            while True:
                while self._queue:
                    self._writing = True
                    request = self._queue.popleft()
                    if self._readable is not None and request.HasField("proposal"):
                        request.readable = self._take_readable()
                    await self._call.write(request)
                    self._moved_at = self._loop.time()
                    self._queued_bytes -= len(request.content)
                    if self._queued_bytes <= HIGH_WATER_BYTES:
                        self._less.set()
                if self._readable is not None and (self._readable_is_due or self._closing):
                    self._writing = True
                    await self._call.write(pb.ReplicateRequest(readable=self._take_readable()))
                    continue
                if self._closing:
                    await self._call.done_writing()
                    return
                self._writing = False
                self._more.clear()
                await self._more.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._failed = True  # `_call_ended` gets the reason.
            self._less.set()
