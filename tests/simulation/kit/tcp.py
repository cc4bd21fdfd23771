"""TCP over the simulated network: byte streams with asyncio's transports, for real protocols.

Each direction delivers the written bytes in order, split and joined arbitrarily. At most the window of the peer's
kernel is in flight. The transport keeps the others, and asks its protocol to pause.

Each end learns independently that the other has ended. When a process ends or closes, its kernel sends a FIN after all
sent bytes, or a reset if it has unread bytes. After a reset the other end may lose its unread bytes, too. A cut link
signals nothing: bytes wait, and each end gives the connection up after a while or never. If only one end gives up, the
other is half-open until its next bytes are answered with a reset.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

from coranto.testing.sim.loop import SimLoop
from coranto.testing.sim.network import Lane, Network
from coranto.testing.sim.rpc import GIVE_UP_SECONDS
from coranto.testing.sim.timeline import Process, current_process

WINDOWS: Final = (256, 2048, 1 << 16)
"""Bytes that may be in flight in one direction. Some windows are small, because runs write little."""

MARKS: Final = (64, 1024, 1 << 16)
"""Bytes that a transport keeps before it asks its protocol to pause, if the protocol has set no lower limit."""

HEADER_BYTES: Final = 8
"""Splits within so many bytes of the start of a write are frequent, because headers are there."""

_FIRST_PORT: Final = 30_000


class SimTcp:
    """The listeners and connections of a network."""

    def __init__(self, network: Network, loop: SimLoop, *, give_up: tuple[float, float] = GIVE_UP_SECONDS) -> None:
        """Create a network's connections. `give_up` is the range of seconds until an end gives up on a cut link."""
        self.network = network
        self.loop = loop
        self.give_up = give_up
        self.live: dict[SimTransport, None] = {}
        """The ends that are attached to a protocol and not lost."""
        self.on_bytes: Callable[[SimTransport, bool, bytes], None] = lambda end, sent, data: None
        """Called with the bytes that an end's protocol has written (True), or is about to receive (False)."""
        self.counts: Counter[str] = Counter()
        """The number of events that only some runs have, by name."""
        self._listeners: dict[tuple[str, int], SimListener] = {}
        self._pairs: dict[_Pair, None] = {}
        self._ports = _FIRST_PORT
        network.observe(self._link_cut, self._link_restored)

    def listen(self, node: str, port: int, process: Process) -> SimListener:
        """Bind a port of a node for a process, until it dies."""
        listener = self._listeners[node, port] = SimListener(self, node, port, process)
        return listener

    async def connect(self, node: str, protocol: asyncio.Protocol, host: str, port: int) -> None:
        """Connect a protocol of the calling process, on `node`, to a port of the node `host`. Raises OSError."""
        process = current_process()
        if process is not None:
            process.check_alive()
        self._ports += 1
        pair = _Pair(self, node, host, self._ports, port)
        self._pairs[pair] = None
        pair.client.own(process)
        try:
            await pair.client.established()
        except BaseException:
            pair.client.abort()
            raise
        pair.client.made(protocol)

    def break_connections(self, node: str, rng: random.Random, share: float) -> None:
        """Break some of a node's connections. Bytes in flight are lost, and each end learns of the break on its own."""
        for pair in list(self._pairs):
            if node in (pair.client.node, pair.server.node) and rng.random() < share:
                pair.lose()

    def listener_at(self, node: str, port: int) -> SimListener | None:
        return self._listeners.get((node, port))

    def forget(self, pair: _Pair) -> None:
        self._pairs.pop(pair, None)

    def closed(self, listener: SimListener) -> None:
        if self._listeners.get((listener.node, listener.port)) is listener:
            del self._listeners[listener.node, listener.port]

    def _link_cut(self, source: str, target: str) -> None:
        for pair in list(self._pairs):
            if {source, target} == {pair.client.node, pair.server.node}:
                for end in (pair.client, pair.server):
                    self.loop.later(self.network.rng.uniform(*self.give_up), self._give_up, source, target, end)

    def _give_up(self, source: str, target: str, end: SimTransport) -> None:
        if self.network.is_cut(source, target) and not end.gone:
            self.counts["tcp: an end gave its connection up"] += 1
            end.lost(TimeoutError("the other side does not answer"))

    def _link_restored(self, source: str, target: str) -> None:
        """Let an end that has given up answer later bytes with a reset."""
        for pair in list(self._pairs):
            if {source, target} == {pair.client.node, pair.server.node} and (pair.client.gone or pair.server.gone):
                self.loop.later(self.network.delay(), pair.lose)


class _Pair:
    def __init__(self, tcp: SimTcp, node: str, host: str, own_port: int, port: int) -> None:
        self._tcp = tcp
        self._number = tcp.loop.number()
        self.client = SimTransport(tcp, self, node, (host, port))
        self.server = SimTransport(tcp, self, host, (node, own_port))
        network = tcp.network
        self.client.out = Lane(network, node, host, self._arrived_at_server)
        self.server.out = Lane(network, host, node, self.client.arrived)
        self._port = port
        self.client.out.send(("open",))

    def __hash__(self) -> int:
        return self._number

    def _arrived_at_server(self, message: tuple[Any, ...]) -> None:
        if message[0] != "open":
            self.server.arrived(message)
            return
        listener = self._tcp.listener_at(self.server.node, self._port)
        if listener is None:
            self.server.out.send(("refused",))
            self.server.gone = True
        else:
            self.server.out.send(("opened",))
            self.server.own(listener.process)
            listener.take(self.server)

    def lose(self) -> None:
        """Lose the connection. Each end learns of it after its own delay."""
        for end in (self.client, self.server):
            end.out.close()
            self._tcp.loop.later(self._tcp.network.delay(), end.was_reset)

    def end_gone(self) -> None:
        if self.client.gone and self.server.gone:
            self._tcp.forget(self)


class SimTransport(asyncio.Transport):
    """One end of a connection: asyncio's transport, and the kernel's part."""

    out: Lane

    def __init__(self, tcp: SimTcp, pair: _Pair, node: str, peer: tuple[str, int]) -> None:
        super().__init__({"peername": peer})
        self.node = node
        self.peer = peer
        self.gone = False
        """True once this end neither sends nor receives."""
        self._tcp = tcp
        self._pair = pair
        self._number = tcp.loop.number()
        self._process: Process | None = None
        self._context: contextvars.Context | None = None
        self._protocol: asyncio.Protocol | None = None
        self._opened: asyncio.Future[None] | None = None
        rng = tcp.network.rng
        self._window = rng.choice(WINDOWS)
        self._unsent = bytearray()
        self._mark = rng.choice(MARKS)
        self._high, self._low = self._mark, self._mark // 4
        self._writing_paused = self._resume_due = False
        self._received = bytearray()
        self._ended = self._reset = False  # Events after the received bytes.
        self._reading_paused = self._stalled = False
        self._delivery_due = False
        self._closing = False

    def __hash__(self) -> int:
        return self._number

    @property
    def is_client(self) -> bool:
        """True for the end that has connected."""
        return self is self._pair.client

    # -- asyncio.Transport ---------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._process is not None:
            self._process.check_alive()
        if self._closing or self.gone:
            return
        if self._reset:  # The kernel reports it on the next write.
            self._deliver_soon()
            return
        piece = bytes(data)
        self._tcp.on_bytes(self, True, piece)
        self._unsent += piece
        self._pump()
        if len(self._unsent) > self._high and not self._writing_paused and self._protocol is not None:
            self._writing_paused = True
            self._tcp.counts["tcp: a writer was paused"] += 1
            self._protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = self._mark if high is None else min(high, self._mark)
        self._low = self._high // 4 if low is None else min(low, self._high)

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def pause_reading(self) -> None:
        self._tcp.counts["tcp: a reader was paused"] += 1
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._deliver_soon()

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    def is_closing(self) -> bool:
        return self._closing or self.gone

    def close(self) -> None:
        """Close once all written bytes are sent."""
        if not self._closing and not self.gone:
            self._closing = True
            self._pump()

    def abort(self) -> None:
        if self.gone or (self._process is not None and not self._process.alive):
            return
        self._tell_end()
        self.lost(None)

    # -- The life of an end --------------------------------------------------------------------------------------------

    def own(self, process: Process | None) -> None:
        """Let the kernel close this end when a process dies."""
        self._process = process
        if process is not None:
            process.on_death.append(self._died)

    async def established(self) -> None:
        """Wait until the other side has accepted. Raises OSError."""
        self._opened = self._tcp.loop.create_future()
        await self._opened

    async def attach(self, protocol: asyncio.Protocol) -> None:
        """Serve the connection with a protocol of the calling process, as `coranto_broker.server` requires."""
        if self._process is not None:
            self._process.check_alive()
        self.made(protocol)
        await asyncio.sleep(0)

    def made(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self._context = contextvars.copy_context()
        protocol.connection_made(self)
        if self.gone:
            self._soon(protocol.connection_lost, ConnectionResetError("the connection was reset"))
            return
        self._tcp.live[self] = None
        self._deliver_soon()

    def stall(self) -> Callable[[], None]:
        """Stop delivering bytes to its process. Return a function that resumes delivery."""
        self._stalled = True

        def resume() -> None:
            self._stalled = False
            self._deliver_soon()

        return resume

    def was_reset(self) -> None:
        """Handle a reset or a broken connection. Received and unread bytes may be lost with it."""
        if self.gone:
            return
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(ConnectionResetError("the connection was reset"))
        self._reset = True
        if self._tcp.network.rng.random() < 0.5:
            self._received.clear()
        if self._protocol is None:
            self.lost(None)
        else:
            self._deliver_soon()

    def lost(self, error: Exception | None) -> None:
        """End the connection, and notify the protocol."""
        if self.gone:
            return
        self.gone = self._closing = True
        self._unsent.clear()
        self._received.clear()
        self._tcp.live.pop(self, None)
        if self._process is not None and self._died in self._process.on_death:
            self._process.on_death.remove(self._died)
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(error or ConnectionResetError("the connection was closed"))
        if self._protocol is not None:
            self._soon(self._protocol.connection_lost, error)
        self._pair.end_gone()

    def arrived(self, message: tuple[Any, ...]) -> None:
        """Receive a message of the other side."""
        kind = message[0]
        if kind == "reset":
            self.was_reset()
        elif kind == "refused":
            self._refused()
        elif self.gone:
            if kind in ("data", "opened"):
                self.out.send(("reset",))
        elif kind == "opened":
            if self._opened is not None and not self._opened.done():
                self._opened.set_result(None)
        elif kind == "data":
            self._received += message[1]
            self._deliver_soon()
        elif kind == "read":
            self._window += message[1]
            self._pump()
        else:
            self._ended = True
            self._deliver_soon()

    def _refused(self) -> None:
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(ConnectionRefusedError("no listener is there"))

    def _died(self) -> None:
        """Close this end as the kernel of a dead process does."""
        if not self.gone:
            self._tell_end()
            self._protocol = None
            self.lost(None)

    def _tell_end(self) -> None:
        if self._received:
            self._tcp.counts["tcp: a connection was reset with bytes that nobody had read"] += 1
        self.out.send(("reset",) if self._received else ("end",))

    def _pump(self) -> None:
        """Send as much as the window allows, in pieces of any size."""
        rng = self._tcp.network.rng
        while self._unsent and self._window > 0:
            most = min(len(self._unsent), self._window)
            chance = rng.random()
            size = most if chance < 0.6 else rng.randint(1, min(most, HEADER_BYTES) if chance < 0.8 else most)
            self.out.send(("data", bytes(self._unsent[:size])))
            del self._unsent[:size]
            self._window -= size
        if self._writing_paused and len(self._unsent) <= self._low and not self._resume_due:
            self._resume_due = True
            self._soon(self._resume)
        if self._closing and not self._unsent and not self.gone:
            self._tell_end()
            self.lost(None)

    def _resume(self) -> None:
        self._resume_due = False
        if self._writing_paused and not self.gone and len(self._unsent) <= self._low and self._protocol is not None:
            self._writing_paused = False
            self._protocol.resume_writing()

    def _deliver_soon(self) -> None:
        """Schedule a delivery to the process. It includes bytes that arrive until then."""
        if self._protocol is not None and not self._delivery_due and not self.gone:
            self._delivery_due = True
            self._tcp.loop.call_later(
                self._tcp.network.rng.uniform(0, 0.0005), self._alive, self._deliver, context=self._context
            )

    def _deliver(self) -> None:
        self._delivery_due = False
        protocol = self._protocol
        if self.gone or protocol is None:
            return
        if not self._reading_paused and not self._stalled and not self._closing:
            if self._received:
                rng, size = self._tcp.network.rng, len(self._received)
                size = size if rng.random() < 0.8 else rng.randint(1, size)
                data = bytes(self._received[:size])
                del self._received[:size]
                self.out.send(("read", size))
                self._tcp.on_bytes(self, False, data)
                protocol.data_received(data)
                self._deliver_soon()
                return
            if self._ended and not self._reset and not protocol.eof_received():
                self.close()
        if self._reset and not self.gone and not self._received:
            self.lost(ConnectionResetError("the connection was reset"))

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        self._tcp.loop.call_soon(self._alive, call, *arguments, context=self._context)

    def _alive(self, call: Callable[..., object], *arguments: object) -> None:
        if self._process is None or self._process.alive:
            call(*arguments)


class SimListener:
    """A port that accepts connections: a `FrameListener` of `coranto_broker.server`."""

    def __init__(self, tcp: SimTcp, node: str, port: int, process: Process) -> None:
        self.node = node
        self.port = port
        self.process = process
        self._tcp = tcp
        self._come: deque[SimTransport] = deque()
        self._waiter: asyncio.Future[None] | None = None
        process.on_death.append(self.close)

    async def accept(self) -> SimTransport:
        """Return the next connection."""
        self.process.check_alive()
        while not self._come:
            self._waiter = self._tcp.loop.create_future()
            await self._waiter
        return self._come.popleft()

    def take(self, end: SimTransport) -> None:
        self._come.append(end)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Accept no more connections, and close the unaccepted ones."""
        self._tcp.closed(self)
        come, self._come = self._come, deque()
        for end in come:
            end.abort()
