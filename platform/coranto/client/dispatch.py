"""Routing of calls: to a broker that serves the journal if its route is known, otherwise to a seed.

A *seed* is an endpoint of the client's configuration. Seeds get calls that are not about a single journal, and calls
about journals without a known route. Brokers proxy calls about journals that they do not serve, and each answer has the
journal's route. Several seeds are tried in turn.

A broker that is unreachable at the endpoint in its route is avoided for five seconds, and its calls go to seeds. Calls
go to seeds, too, if the endpoint in a route is insecure: a client with TLS never follows a route to an endpoint without
TLS, and never sends a token to an endpoint where others could read it.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from zlib import crc32

import grpc
import grpc.aio
import structlog

from coranto.client.call_ends import cancelled_from_outside
from coranto.client.config import ChannelTarget, ClientConfig, parse_endpoint
from coranto.client.connection import CONNECT_ADVICE, Connection
from coranto.client.routes import KnownRoute, RouteCache
from coranto.client.values import DurabilityClient
from coranto.effects import Clock, Entropy
from coranto.errors import CorantoError, InvalidInput, Unavailable
from coranto.security.call_tokens import CallTokens, Metadata
from coranto.security.tokens import TOKEN_SECONDS, Capability
from coranto.tracing import tracer
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

_AVOID_SECONDS = 5.0
_CONNECT_SECONDS = 10.0
_MAX_CONNECTIONS = 64
_MAX_REFUSED = 1024
_DRAIN_SECONDS = 3600.0

_ELSEWHERE = frozenset({pb.NOT_JOURNAL_BROKER, pb.NOT_JOURNAL_PRIMARY_BROKER, pb.NO_JOURNAL_PRIMARY_BROKER})

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenConnection:
    """The connection for one call. It reports the call's answer to the dispatcher.

    `routed` is true if a known route chose the connection, and false for a seed.
    """

    connection: Connection
    journal: str = ""
    routed: bool = False
    _dispatcher: Dispatcher | None = field(default=None, repr=False)

    @property
    def stub(self) -> pb_grpc.JournalAsyncStub:
        return self.connection.stub

    @property
    def tokens(self) -> CallTokens:
        return self.connection.tokens

    async def for_journal(self, capability: Capability, journal: str) -> Metadata | None:
        """Return the metadata that authorizes a call about one journal. Raises the errors of `CallTokens.ready`."""
        await self.tokens.ready()
        return self.tokens.for_journal(capability, journal)

    async def for_selector(
        self, capability: Capability, selector: pb.LabelSelector, seconds: float = TOKEN_SECONDS
    ) -> Metadata | None:
        """Return the metadata for a call about the journals that `selector` matches, like `for_journal`."""
        await self.tokens.ready()
        return self.tokens.for_selector(capability, selector, seconds)

    @property
    def endpoint(self) -> str:
        return self.connection.endpoint

    @property
    def durability_client(self) -> DurabilityClient | None:
        """The client that reports the later durability of this call's append."""
        return self._dispatcher.durability_client if self._dispatcher is not None else None

    def answered(self, status: int, header: pb.Header) -> None:
        """Report the broker's answer to the dispatcher."""
        if self._dispatcher is not None:
            self._dispatcher.answered(self, status, header)

    def failure(self, subject: str, error: grpc.aio.AioRpcError) -> CorantoError:
        """Report a gRPC error, and return the client's error (`Connection.failure`).

        Later calls avoid an unreachable broker.
        """
        if self._dispatcher is not None:
            self._dispatcher.failed(self, error.code())
        return self.connection.failure(subject, error)

    @contextmanager
    def calling(self, subject: str, call: grpc.aio.RpcContext) -> Iterator[None]:
        """Raise the call's failures as errors of the client about `subject`, and cancel the call at the block's end.

        A call whose channel is closed fails with Unavailable.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self.failure(subject, error) from error
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            raise Unavailable(f"{subject}: the connection was closed; try again") from None
        finally:
            call.cancel()


Connect: TypeAlias = Callable[[ClientConfig, Clock, CallTokens], Connection]


class Dispatcher:
    """The connections and known routes of a client.

    All calls use `connection`, if given. Otherwise `connect` makes the connections.
    """

    def __init__(
        self,
        config: ClientConfig,
        clock: Clock,
        connection: Connection | None = None,
        *,
        connect: Connect = Connection,
        entropy: Entropy = os.urandom,
    ) -> None:
        self.durability_client: DurabilityClient | None = None
        """The client that append results ask for their later durability."""
        self.tracer = tracer()
        """Starts the spans of calls; None if tracing is off."""
        self._config = config
        self._clock = clock
        self._connect_to = connect
        self.tokens = connection.tokens if connection is not None else CallTokens(config.auth, clock, config.name)
        self._seeds = [connection] if connection is not None else [self._connect(seed) for seed in config.seeds]
        self._secure = parse_endpoint(config.seeds[0]).secure
        self._seed = 0
        self._routes = RouteCache(config.route_cache if connection is None else 0)
        self._learns = config.route_cache > 0 and connection is None
        self._others: OrderedDict[ChannelTarget, Connection] = OrderedDict()
        self._avoided: dict[ChannelTarget, float] = {}
        self._refused: set[str] = set()
        self._draining: set[asyncio.Task[None]] = set()
        # Spreads clients over the replicas of a journal. Each client stays with one replica.
        self._salt = int.from_bytes(entropy(4))

    # -- Choosing connections ----------------------------------------------------------------------------------------

    def to_seed(self, journal: str = "") -> ChosenConnection:
        """Return the connection for a call that any broker accepts."""
        for turn in range(len(self._seeds)):
            index = (self._seed + turn) % len(self._seeds)
            if not self._is_avoided(self._seeds[index].target):
                self._seed = index
                break
        return ChosenConnection(self._seeds[self._seed], journal, False, self)

    def to_primary(self, journal: str) -> ChosenConnection:
        """Return the connection for a call that the journal's primary serves."""
        return self._routed_or_seed(journal, lambda route: route.writers)

    def to_replica(self, journal: str) -> ChosenConnection:
        """Return the connection for a call that any replica serves, preferably one in the client's zone."""
        choice = crc32(journal.encode(), self._salt)
        return self._routed_or_seed(journal, lambda route: route.readers(self._config.zone, choice))

    @property
    def streams_appends(self) -> bool:
        """True if small appends use streams, to brokers that serve them."""
        return self._config.append_streams

    def may_stream(self, journal: str) -> bool:
        """Return True if small appends to a journal may go over a stream. Raises CorantoError after `close`."""
        return self.streams_appends and self.to_primary(journal).connection.append_streams.may_serve

    @property
    def has_choice(self) -> bool:
        """True if there are several seeds."""
        return len(self._seeds) > 1

    async def connected_to_primary(self, subject: str, journal: str) -> ChosenConnection:
        """Return the connection to the journal's primary, or to a connected seed. Raises Unavailable."""
        chosen = self.to_primary(journal)
        if chosen.routed or not self.has_choice:
            return chosen
        return await self.connected(subject, _CONNECT_SECONDS, journal)

    async def connected(self, subject: str, seconds: float, journal: str = "") -> ChosenConnection:
        """Return a connected seed. If necessary, connects for at most `seconds`. Raises Unavailable."""
        chosen = self.to_seed(journal)
        if chosen.connection.channel.get_state() is grpc.ChannelConnectivity.READY:
            return chosen
        attempts = {asyncio.ensure_future(seed.channel.channel_ready()): seed for seed in self._seeds}
        try:
            done, _ = await asyncio.wait(attempts, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                if attempt.exception() is None:
                    self._seed = self._seeds.index(attempts[attempt])
                    self._avoided.pop(attempts[attempt].target, None)
                    return ChosenConnection(attempts[attempt], journal, False, self)
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        raise Unavailable(f"{subject}: cannot connect to {self._config.endpoint}. {CONNECT_ADVICE}")

    async def close(self) -> None:
        """Close all connections."""
        for draining in self._draining:
            draining.cancel()
        await asyncio.gather(
            *self._draining, *(each.close() for each in (*self._seeds, *self._others.values())), return_exceptions=True
        )

    # -- Learning routes ---------------------------------------------------------------------------------------------

    def suggest(self, routes: Mapping[str, KnownRoute]) -> None:
        """Use these routes for journals without a known route."""
        if self._learns:
            self._routes.suggest(routes, self._clock.monotonic())

    def answered(self, chosen: ChosenConnection, status: int, header: pb.Header) -> None:
        """Update the journal's route after a broker's answer."""
        self._avoided.pop(chosen.connection.target, None)
        if not chosen.journal or not self._learns:
            return
        if status not in _ELSEWHERE:
            self._routes.learn(chosen.journal, header, self._clock.monotonic())
            return
        self._routes.refused(chosen.journal, header, self._clock.monotonic())
        again = self.to_replica if status == pb.NOT_JOURNAL_BROKER else self.to_primary
        if again(chosen.journal).connection is chosen.connection:
            # The route leads to the same broker, which lags behind etcd or is about to exit.
            self._routes.forget(chosen.journal)

    def failed(self, chosen: ChosenConnection, code: grpc.StatusCode) -> None:
        """Forget the route of a call that ended with a gRPC error, and avoid its broker if that is unreachable."""
        if chosen.routed:
            self._routes.forget(chosen.journal)
        if code is grpc.StatusCode.UNAVAILABLE and (chosen.routed or self.has_choice):
            now = self._clock.monotonic()
            # Drop expired entries. Brokers that are no longer in use leave them behind.
            self._avoided = {target: until for target, until in self._avoided.items() if now < until}
            self._avoided[chosen.connection.target] = now + _AVOID_SECONDS

    # -- Connections -------------------------------------------------------------------------------------------------

    def _routed_or_seed(self, journal: str, choose: Callable[[KnownRoute], Sequence[str]]) -> ChosenConnection:
        route = self._routes.get(journal, self._clock.monotonic()) if self._learns else None
        for endpoint in choose(route) if route is not None else ():
            connection = self._connection(endpoint)
            if connection is not None:
                return ChosenConnection(connection, journal, True, self)
        return self.to_seed(journal)

    def _connection(self, endpoint: str) -> Connection | None:
        """Return a connection to the endpoint of a route, or None if the endpoint is avoided or refused."""
        if not endpoint or endpoint in self._refused:
            return None
        try:
            target = parse_endpoint(endpoint)
            if self._is_avoided(target):
                return None
            for seed in self._seeds:
                if seed.target == target:
                    return seed
            connection = self._others.get(target)
            if connection is None:
                if self._secure and not target.secure:
                    raise InvalidInput(f"{endpoint} is without TLS", field="endpoint")
                connection = self._others[target] = self._connect(endpoint)
                self._drain_beyond_limit()
        except InvalidInput as error:
            _log.warning("client.route_refused", endpoint=endpoint, reason=str(error))
            if len(self._refused) < _MAX_REFUSED:
                self._refused.add(endpoint)
            return None
        self._others.move_to_end(target)
        return connection

    def _connect(self, endpoint: str) -> Connection:
        """Make a connection. Raises InvalidInput for an endpoint that must not get the client's tokens."""
        secure = parse_endpoint(endpoint).secure
        config = replace(self._config, endpoint=endpoint, tls=self._config.tls if secure else None)
        return self._connect_to(config, self._clock, self.tokens)

    def _drain_beyond_limit(self) -> None:
        while len(self._others) > _MAX_CONNECTIONS:
            _, connection = self._others.popitem(last=False)
            # Its in-flight calls continue.
            task = asyncio.ensure_future(connection.close(_DRAIN_SECONDS))
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)

    def _is_avoided(self, target: ChannelTarget) -> bool:
        until = self._avoided.get(target)
        if until is None:
            return False
        if self._clock.monotonic() < until:
            return True
        del self._avoided[target]
        return False
