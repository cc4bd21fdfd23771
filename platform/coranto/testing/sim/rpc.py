"""gRPC's asyncio calls over a simulated network, for the services of brokers and `consumer.Shard`.

Stubs, calls and servicer contexts behave as in `grpc.aio`: messages are copied, and statuses and cancellations
travel over the network. A broken connection ends a call with UNAVAILABLE at the client. At the server, the handler is
cancelled, and its reads may see an end of the stream.

Each end of a connection learns of a break independently. When a process is killed, its peers get a message. When a
machine or a link fails, they get no message, and give up the connection after a while.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio

from coranto.testing.sim.network import Endpoints, Lane, Network
from coranto.testing.sim.timeline import Process, Timeline, current_process
from coranto.transport.calls import rpc_error
from coranto.wire import consumer_pb2 as pc
from coranto.wire import consumer_pb2_grpc as pc_grpc
from coranto.wire import heads_pb2 as heads
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto.wire.append_stream_pb2 import AppendAnswers, AppendBatch

GIVE_UP_SECONDS = (1.0, 15.0)
"""The range of the time after which an end gives up a connection over a cut link."""
RECONNECT_SECONDS = (0.05, 1.0)
"""The range of a client's wait before it tries to connect again."""


@dataclass(frozen=True, slots=True)
class RpcMethod:
    """A method of a service: its response type, and whether requests and responses are streams."""

    name: str
    response: Any
    streams_requests: bool = False
    streams_responses: bool = False


def _methods(*methods: RpcMethod) -> Mapping[str, RpcMethod]:
    return {method.name: method for method in methods}


_JOURNAL = _methods(
    RpcMethod("List", pb.ListResponse, streams_responses=True),
    RpcMethod("Apply", pb.ApplyResponse),
    RpcMethod("Read", pb.ReadResponse, streams_responses=True),
    RpcMethod("Append", pb.AppendResponse, streams_requests=True),
    RpcMethod("Replicate", pb.ReplicateResponse, streams_requests=True, streams_responses=True),
    RpcMethod("ListFragments", pb.FragmentsResponse),
    RpcMethod("FragmentStoreHealth", pb.FragmentStoreHealthResponse),
    # Methods of Coranto's own services, which the same brokers serve.
    RpcMethod("Heads", heads.HeadsResponse, streams_responses=True),
    RpcMethod("Note", heads.NoteResponse),
    RpcMethod("AppendStream", AppendAnswers, streams_requests=True, streams_responses=True),
)
_SHARD = _methods(
    RpcMethod("Stat", pc.StatResponse),
    RpcMethod("List", pc.ListResponse),
    RpcMethod("Apply", pc.ApplyResponse),
    RpcMethod("GetHints", pc.GetHintsResponse),
    RpcMethod("Unassign", pc.UnassignResponse),
)
Status = tuple[grpc.StatusCode, str]
_OK: Status = (grpc.StatusCode.OK, "")
_LOST: Status = (grpc.StatusCode.UNAVAILABLE, "connection lost")


class CallAborted(Exception):
    """Ends a handler whose context was aborted."""


class Rpc:
    """The endpoints, stubs and calls of a network."""

    def __init__(self, network: Network, *, give_up: tuple[float, float] = GIVE_UP_SECONDS) -> None:
        """`give_up` is the range of seconds after which an end gives up a connection over a cut link."""
        self.network = network
        self.give_up = give_up
        self.loop: Timeline = network.loop
        self.endpoints = Endpoints()
        self.live: dict[SimCall, None] = {}
        self.calls: Counter[tuple[str, str]] = Counter()
        """The number of calls of each method that each node has begun."""
        self.appends: Counter[str] = Counter()
        """The number of appends that each node has begun, in separate calls or on streams."""
        self.on_delivery: Callable[[SimCall, bool, tuple[Any, ...]], bool] | None = None
        """Called with each message just before its delivery to the server (True) or to the client (False).

        If it returns False, the message and its connection are lost. `SimCall` describes the messages.
        """
        self.problems: list[str] = []
        """Descriptions of handlers that ended with an unexpected exception."""

    def stub(self, node: str, endpoint: str, process: Process | None = None) -> pb_grpc.JournalAsyncStub:
        """Return a stub of the broker at `endpoint` for code that runs on `node`."""
        stub: Any = _Stub(self, _JOURNAL, node, endpoint, process)
        return cast("pb_grpc.JournalAsyncStub", stub)

    def shard_stub(self, node: str, endpoint: str, process: Process | None = None) -> pc_grpc.ShardAsyncStub:
        """Return a stub of the consumer at `endpoint` for code that runs on `node`."""
        stub: Any = _Stub(self, _SHARD, node, endpoint, process)
        return cast("pc_grpc.ShardAsyncStub", stub)

    def cancel_calls(self, stub: object) -> None:
        """Cancel the calls of a stub, as closing its channel does."""
        for call in [call for call in self.live if call.stub is stub]:
            call.cancel()

    def channel(self, node: str, endpoint: str) -> grpc.aio.Channel:
        """Return a channel that reports the connectivity from `node` to `endpoint`, and waits for a connection."""
        channel: Any = _Channel(self, node, endpoint)
        return cast("grpc.aio.Channel", channel)

    def break_call(self, call: SimCall) -> None:
        """Break a call's connection. Messages on their way are lost."""
        call.lose()


class _Channel:
    """A connection that is established on request, and lasts until the other end or the link is gone."""

    def __init__(self, rpc: Rpc, node: str, endpoint: str) -> None:
        self._rpc = rpc
        self._node = node
        self._endpoint = endpoint
        self._connected: Process | None = None

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        ready = self._connected is not None and self._reachable() is self._connected
        return grpc.ChannelConnectivity.READY if ready else grpc.ChannelConnectivity.IDLE

    async def channel_ready(self) -> None:
        network = self._rpc.network
        while self.get_state() is not grpc.ChannelConnectivity.READY:
            await asyncio.sleep(network.delay() + network.delay())
            self._connected = self._reachable()
            if self._connected is None:
                await asyncio.sleep(network.rng.uniform(*RECONNECT_SECONDS))

    def _reachable(self) -> Process | None:
        found = self._rpc.endpoints.find(self._endpoint)
        if found is None:
            return None
        target, process, _ = found
        network = self._rpc.network
        return None if network.is_cut(self._node, target) or network.is_cut(target, self._node) else process


class _Stub:
    def __init__(
        self, rpc: Rpc, methods: Mapping[str, RpcMethod], node: str, endpoint: str, process: Process | None
    ) -> None:
        self._rpc = rpc
        self._methods = methods
        self._node = node
        self._endpoint = endpoint
        self._process = process

    def __getattr__(self, name: str) -> Callable[..., SimCall]:
        method = self._methods.get(name)
        if method is None:
            raise AttributeError(name)

        def call(request: Any = None, **_: Any) -> SimCall:
            process = self._process or current_process()
            if process is not None:
                process.check_alive()
            self._rpc.calls[self._node, method.name] += 1
            self._rpc.appends[self._node] += method.name == "Append"
            return SimCall(self._rpc, self, self._node, self._endpoint, method, request, process)

        return call


class SimCall:
    """The client's end of a call.

    Messages to the server are `open`, then any number of `message` with its bytes, then `end`; or `cancel`, or `lost`.
    Messages to the client are any number of `message` with its bytes, and then `status`.
    """

    def __init__(
        self, rpc: Rpc, stub: object, node: str, endpoint: str, method: RpcMethod, request: Any, process: Process | None
    ) -> None:
        self.stub = stub
        self.method = method
        self.node = node
        self.peer = endpoint
        self._rpc = rpc
        self._loop = rpc.loop
        self._process = process
        self._number = rpc.loop.number()
        self._inbox: deque[Any] = deque()
        self._status: Status | None = None
        self._cancelled_here = False
        self._half_closed = False
        self._waiters: list[asyncio.Future[None]] = []
        self._on_done: list[Callable[[Any], None]] = []
        self._server: _ServerEnd | None = None
        self._up: Lane | None = None
        self._down: Lane | None = None
        self._stop_observing: Callable[[], None] | None = None
        rpc.live[self] = None
        self._connect(endpoint, request)
        if process is not None:
            process.on_death.append(self._process_died)

    def __hash__(self) -> int:
        return self._number

    # -- The API of grpc.aio -------------------------------------------------------------------------------------------

    async def write(self, message: Any) -> None:
        self._check()
        if self._status is not None:
            if self._cancelled_here:
                raise asyncio.CancelledError
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError("RPC is half closed.")
        if isinstance(message, AppendBatch):
            self._rpc.appends[self.node] += len(message.appends)
        assert self._up is not None
        self._up.send(("message", message.SerializeToString(), type(message)))
        await asyncio.sleep(0)

    async def done_writing(self) -> None:
        self._check()
        if self._status is not None:
            if self._cancelled_here:
                raise asyncio.CancelledError
            raise asyncio.InvalidStateError("RPC already finished.")
        if not self._half_closed:
            self._half_closed = True
            assert self._up is not None
            self._up.send(("end",))
        await asyncio.sleep(0)

    async def read(self) -> Any:
        self._check()
        while not self._inbox and self._status is None:
            await self._changed()
        if self._inbox:
            return self._inbox.popleft()
        self._raise_for_status()
        return grpc.aio.EOF

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._responses()

    async def _responses(self) -> AsyncGenerator[Any, None]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        self._check()
        try:
            while self._status is None:
                await self._changed()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_for_status()
        return self._inbox[0]

    def cancel(self) -> bool:
        if self._status is not None or (self._process is not None and not self._process.alive):
            return False
        self._cancelled_here = True
        if self._up is not None:
            self._up.send(("cancel",))
        self._finish((grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    def cancelled(self) -> bool:
        return self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._on_done.append(callback)
        if self._status is not None:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        while self._status is None:
            await self._changed()
        return self._status[0]

    async def details(self) -> str:
        await self.code()
        assert self._status is not None
        return self._status[1]

    # -- The connection ------------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Lose the connection. Each end learns of the loss after its own delay."""
        self._close_lanes()
        network = self._rpc.network
        self._loop.later(network.delay(), self.end_lost)
        if self._server is not None:
            self._loop.later(network.delay(), self._server.end_lost)

    def end_lost(self) -> None:
        """End the call at the client, when it learns that the connection is lost."""
        self._finish(_LOST)

    def server_died(self) -> None:
        """Close the connection as the dead server's kernel does, after all messages that the server has sent."""
        if self._down is not None:
            self._down.send(("status", _LOST))

    def _connect(self, endpoint: str, request: Any) -> None:
        network = self._rpc.network
        found = self._rpc.endpoints.find(endpoint)
        if found is None:
            self._loop.later(network.delay(), self._finish, (grpc.StatusCode.UNAVAILABLE, "connection refused"))
            self._up = self._down = None
            self._up = Lane(network, self.node, endpoint, lambda _: None)
            return
        target = found[0]
        self._down = Lane(network, target, self.node, self._arrived)
        self._up = Lane(network, self.node, target, self._arrived_at_server)
        self.peer = target
        self._stop_observing = network.observe(self._link_cut, self._link_restored)
        if network.is_cut(self.node, target) or network.is_cut(target, self.node):
            self._link_cut(self.node, target)
        self._up.send(("open", endpoint))
        if request is not None:
            self._half_closed = True
            self._up.send(("message", request.SerializeToString(), type(request)))
            self._up.send(("end",))

    def _arrived_at_server(self, message: tuple[Any, ...]) -> None:
        if self._is_lost(True, message):
            return
        if message[0] != "open":
            if self._server is not None:
                self._server.arrived(message)
            return
        found = self._rpc.endpoints.find(message[1])
        assert self._down is not None
        if found is None:
            self._down.send(("status", (grpc.StatusCode.UNAVAILABLE, "connection refused")))
            return
        _, process, service = found
        self._server = _ServerEnd(self._rpc, self, self._down, process, service)

    def _is_lost(self, to_server: bool, message: tuple[Any, ...]) -> bool:
        on_delivery = self._rpc.on_delivery
        if on_delivery is None or on_delivery(self, to_server, message):
            return False
        self.lose()
        return True

    def _arrived(self, message: tuple[Any, ...]) -> None:
        if self._is_lost(False, message):
            return
        if message[0] == "message":
            if self._status is None:
                self._inbox.append(self.method.response.FromString(message[1]))
                self._wake()
        else:
            self._finish(message[1])

    def _link_cut(self, source: str, target: str) -> None:
        if {source, target} != {self.node, self.peer} or self._status is not None:
            return
        network = self._rpc.network
        self._loop.later(network.rng.uniform(*self._rpc.give_up), self._give_up, source, target, self._client_gives_up)
        self._loop.later(network.rng.uniform(*self._rpc.give_up), self._give_up, source, target, self._server_gives_up)

    def _give_up(self, source: str, target: str, end: Callable[[], None]) -> None:
        if self._rpc.network.is_cut(source, target):
            end()

    def _client_gives_up(self) -> None:
        if self._server is None:
            self._close_lanes()  # The connection was never established.
        self._finish(_LOST)

    def _server_gives_up(self) -> None:
        if self._server is not None:
            self._server.end_lost()

    def _link_restored(self, source: str, target: str) -> None:
        """Let an end that has given up answer arriving messages with a reset."""
        if {source, target} != {self.node, self.peer}:
            return
        server_gone = self._server is not None and self._server.over
        if self._status is not None or server_gone:
            self._loop.later(self._rpc.network.delay(), self.lose)

    def _process_died(self) -> None:
        """Close the connection as the dead client's kernel does, after all messages that the client has sent."""
        if self._status is None and self._up is not None:
            self._up.send(("lost",))
            self._status = _LOST
            self._forget()

    def _close_lanes(self) -> None:
        for lane in (self._up, self._down):
            if lane is not None:
                lane.close()

    def _finish(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        self._forget()
        self._wake()
        for callback in self._on_done:
            callback(self)

    def _forget(self) -> None:
        self._rpc.live.pop(self, None)
        if self._process is not None and self._process_died in self._process.on_death:
            self._process.on_death.remove(self._process_died)
        if self._stop_observing is not None and (self._server is None or self._server.over):
            self._stop_observing()

    def server_over(self) -> None:
        """Stop observing the link if the client's end is done too. Called when the server's end is done."""
        if self._status is not None and self._stop_observing is not None:
            self._stop_observing()

    def _check(self) -> None:
        if self._process is not None:
            self._process.check_alive()

    async def _changed(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _raise_for_status(self) -> None:
        assert self._status is not None
        code, details = self._status
        if self._cancelled_here:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise rpc_error(code, details)


class _ServerEnd:
    """The server's end of a call: a servicer context, and the task that runs the handler."""

    def __init__(self, rpc: Rpc, call: SimCall, down: Lane, process: Process, service: Any) -> None:
        self.over = False
        self._rpc = rpc
        self._call = call
        self._down = down
        self._process = process
        self._inbox: deque[Any] = deque()
        self._ended = False
        self._waiters: list[asyncio.Future[None]] = []
        self._status_sent = False
        process.on_death.append(self._died)
        self._task = process.start(self._handle(service), name=f"{call.method.name} from {call.node}")

    # -- The API of grpc.aio -------------------------------------------------------------------------------------------

    async def read(self) -> Any:
        self._process.check_alive()
        while not self._inbox and not self._ended:
            waiter = self._rpc.loop.create_future()
            self._waiters.append(waiter)
            await waiter
        return self._inbox.popleft() if self._inbox else grpc.aio.EOF

    async def write(self, message: Any) -> None:
        self._process.check_alive()
        if self.over:
            raise asyncio.CancelledError
        self._down.send(("message", message.SerializeToString()))
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self._finish((code, details))
        raise CallAborted

    def peer(self) -> str:
        return self._call.node

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return no metadata: `peer` identifies the caller."""
        return ()

    # -- The connection ------------------------------------------------------------------------------------------------

    def arrived(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == "message":
            self._inbox.append(message[2].FromString(message[1]))
        elif kind == "end":
            self._ended = True
        else:
            self.end_lost()
            return
        self._wake()

    def end_lost(self) -> None:
        """Cancel the handler, because the client is gone. The handler may see the end of the stream before that."""
        if self.over:
            return
        self.over = True
        self._ended = True
        if self._rpc.network.rng.random() < 0.5:
            self._inbox.clear()  # Received, but not read by the handler.
        self._wake()
        if self._rpc.network.rng.random() < 0.5:
            self._task.cancel()
        else:
            self._rpc.loop.later(0.0001, self._task.cancel)

    async def _handle(self, service: Any) -> None:
        method = self._call.method
        try:
            handler = getattr(service, method.name, None)
            if handler is None:
                self._finish((grpc.StatusCode.UNIMPLEMENTED, f"method {method.name} not implemented"))
                return
            if method.streams_requests:
                response = await handler(None, self)
            else:
                request = await self.read()
                if request is grpc.aio.EOF:
                    return
                response = await handler(request, self)
            if not method.streams_responses:
                self._process.check_alive()
                self._down.send(("message", response.SerializeToString()))
            self._finish(_OK)
        except CallAborted:
            return
        except asyncio.CancelledError:
            self._finish((grpc.StatusCode.CANCELLED, "the handler was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001  # gRPC's server catches all exceptions too.
            self._rpc.problems.append(f"{method.name} from {self._call.node} raised {error!r}")
            self._finish((grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))
        finally:
            self.over = True
            if self._died in self._process.on_death:
                self._process.on_death.remove(self._died)
            self._call.server_over()

    def _finish(self, status: Status) -> None:
        if not self._status_sent and self._process.alive:
            self._status_sent = True
            self._down.send(("status", status))

    def _died(self) -> None:
        if not self._status_sent:
            self._status_sent = True
            self._call.server_died()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
