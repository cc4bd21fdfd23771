"""The connection to brokers, and the translation of gRPC failures to errors.

One channel is opened lazily, on the event loop that first uses it. When certificate files have changed, a new channel
replaces it for new calls.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import grpc
import grpc.aio

from coranto.client.append.streams import AppendStreams
from coranto.client.config import ClientConfig, frame_dialer, parse_endpoint
from coranto.effects import Clock, SystemClock
from coranto.errors import CorantoError, PermissionDenied, RpcFailed, Unauthenticated, Unavailable
from coranto.security.call_tokens import CallTokens
from coranto.security.certificates import ChannelCertificates
from coranto.transport.calls import FrameDialer
from coranto.wire import append_stream_pb2_grpc as stream_grpc
from coranto.wire import heads_pb2_grpc as heads_grpc
from coranto.wire import protocol_pb2_grpc as pb_grpc

MAX_RECEIVE_BYTES = 16 << 20

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
    # Callers decide on retries, because they know whether a call may have been applied.
    ("grpc.enable_retries", 0),
    # Reconnect to a restarted broker within a second. gRPC's default is up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The effective timeout of one attempt to connect. Half a second is too short on a busy or distant machine.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Detects a peer that vanished while a call waits. Common servers refuse pings more often than every five minutes.
    # For writes, the kernel's retransmission timeout applies.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Readers accept content as fast as it arrives, so start with a wide window.
    ("grpc.http2.lookahead_bytes", 1 << 20),
    # Channels to the same endpoint share nothing, so that one client's close never disturbs another.
    ("grpc.use_local_subchannel_pool", 1),
]

REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)
"""Errors of a server that refuses a call without any effect."""

_LASTING = REFUSALS | {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE}

_REFUSED: dict[grpc.StatusCode, type[Unauthenticated] | type[PermissionDenied]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}

CONNECT_ADVICE = (
    "Check the address, that a broker runs there, and whether it serves with TLS (https://…, $CORANTO_TLS_CA)."
)
_TOKEN_ADVICE = ". Give this client a token or a key ($CORANTO_AUTH_TOKEN, $CORANTO_AUTH_KEYS)."

_DRAIN_SECONDS: Final = 3600.0


class _ForkGuard:
    """Refuses gRPC in a child that was forked after its parent used gRPC, because gRPC would crash there."""

    def __init__(self) -> None:
        self.used = False
        self.unusable = False

    def after_fork(self) -> None:
        self.unusable = self.unusable or self.used

    def use(self) -> None:
        if self.unusable:
            raise CorantoError(
                "this process was forked from one that had already connected to a cluster, which gRPC does not "
                "survive. Connect only in the child, or start processes by `spawn`."
            )
        self.used = True


_fork_guard = _ForkGuard()
os.register_at_fork(after_in_child=_fork_guard.after_fork)


class Connection:
    """A channel to `config.endpoint`, a single endpoint. Connections of one client share the `tokens` of calls."""

    def __init__(self, config: ClientConfig, clock: Clock | None = None, tokens: CallTokens | None = None) -> None:
        self.endpoint = config.endpoint
        self.target = parse_endpoint(config.endpoint)
        self.tokens = tokens or CallTokens(config.auth, clock or SystemClock(), config.name)
        self._named = [("grpc.primary_user_agent", config.name)] if config.name else []
        self._certificates = ChannelCertificates(config.tls) if self.target.secure else None
        self._credentials: grpc.ChannelCredentials | None = None
        self._closed = False
        self._channel: grpc.aio.Channel | None = None
        self._draining: set[asyncio.Task[None]] = set()
        self._stub: pb_grpc.JournalAsyncStub | None = None
        self._heads_stub: heads_grpc.JournalsAsyncStub | None = None
        self._append_streams = AppendStreams(lambda: self.streams_stub, self._dialer(config))

    def _dialer(self, config: ClientConfig) -> FrameDialer | None:
        """Return the dialer of frame connections to the endpoint; None if it does not support frames."""
        return frame_dialer(config.endpoint, config.tls, config.name)

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._closed:
            raise CorantoError(f"this client of {self.endpoint} was closed; make another")
        if self._channel is None or (
            self._certificates is not None and self._certificates.get() is not self._credentials
        ):
            self._channel = self._open(self._channel)
            self._stub = self._heads_stub = None
        return self._channel

    def _open(self, outdated: grpc.aio.Channel | None) -> grpc.aio.Channel:
        """Open a channel. Closes the `outdated` channel when its calls have ended."""
        _fork_guard.use()
        if self._certificates is None:
            # A proxy on another machine must not see a token for this machine.
            private = [("grpc.enable_http_proxy", 0)] if self.tokens.auth is not None else []
            return grpc.aio.insecure_channel(self.target.address, options=[*_OPTIONS, *self._named, *private])
        self._credentials = self._certificates.get()
        if outdated is not None:
            self._append_streams.renew()
            task = asyncio.ensure_future(outdated.close(_DRAIN_SECONDS))
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)
        return grpc.aio.secure_channel(self.target.address, self._credentials, options=[*_OPTIONS, *self._named])

    @property
    def stub(self) -> pb_grpc.JournalAsyncStub:
        channel = self.channel
        if self._stub is None:
            self._stub = pb_grpc.JournalStub(channel)
        return self._stub

    @property
    def heads_stub(self) -> heads_grpc.JournalsAsyncStub:
        """The stub of the service `Journals`, which only Coranto's brokers have."""
        channel = self.channel
        if self._heads_stub is None:
            self._heads_stub = heads_grpc.JournalsStub(channel)
        return self._heads_stub

    @property
    def streams_stub(self) -> stream_grpc.AppendsAsyncStub:
        """The stub of the service `Appends`, which only Coranto's brokers have."""
        stub: stream_grpc.AppendsAsyncStub = stream_grpc.AppendsStub(self.channel)
        return stub

    @property
    def append_streams(self) -> AppendStreams:
        """The stream for small appends to this broker, over the current channel."""
        _ = self.channel  # Opens another channel if certificates have changed.
        return self._append_streams

    async def close(self, grace: float | None = None) -> None:
        """Close the channel. In-flight calls have `grace` seconds to end, and are then cancelled."""
        if grace:
            self._append_streams.renew()
        else:
            await self._append_streams.close()
        self._closed = True
        channel, self._channel, self._stub, self._heads_stub = self._channel, None, None, None
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)
        if channel is not None:
            await channel.close(grace)

    def failure(self, subject: str, error: grpc.aio.AioRpcError) -> CorantoError:
        """Return the error for a gRPC error of a call that changes nothing unless it completes."""
        code, details = error.code(), error.details() or "no details"
        refused = _REFUSED.get(code)
        if refused is not None:
            if refused is Unauthenticated and self.tokens.drop_rejected():
                return Unavailable(f"{subject}: {self.endpoint} refused the token, try again with another: {details}")
            lacks_token = refused is Unauthenticated and self.tokens.auth is None
            advice = _TOKEN_ADVICE if lacks_token else ""
            return refused(f"{subject}: {self.endpoint} answered {code.name}: {details}{advice}")
        if code in _LASTING:
            return RpcFailed(f"{subject}: {self.endpoint} answered {code.name}: {details}", code.name)
        if details.startswith(("failed to connect", "errors resolving")):
            why = details.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
            return Unavailable(f"{subject}: cannot connect to {self.endpoint} ({why}). {CONNECT_ADVICE}")
        return Unavailable(f"{subject}: {self.endpoint} could not serve it ({code.name}: {details})")
