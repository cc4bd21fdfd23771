"""The twin of TCP: bytes in order in any pieces, windows, pauses, ends, resets, cuts and deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.network import Network
from coranto.testing.sim.timeline import Process
from tests.simulation.kit.tcp import SimTcp

PORT = 7


class Recorder(asyncio.Protocol):
    """A protocol that records its events."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = bytearray()
        self.pieces = 0
        self.events: list[str] = []
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert "lost" not in self.events
        self.received += data
        self.pieces += 1

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")
        self.error = exc


@dataclass
class Setting:
    """Two machines: `a` connects to `b`, which accepts one connection."""

    loop: SimLoop
    network: Network = field(init=False)
    tcp: SimTcp = field(init=False)
    a: Process = field(init=False)
    b: Process = field(init=False)

    def __post_init__(self) -> None:
        self.network = Network(self.loop, self.loop.rng)
        self.tcp = SimTcp(self.network, self.loop)
        self.a, self.b = Process(self.loop, "a"), Process(self.loop, "b")

    async def connected(self) -> tuple[Recorder, Recorder]:
        listener = self.tcp.listen("b", PORT, self.b)
        client, server = Recorder(), Recorder()

        async def accept() -> None:
            await (await listener.accept()).attach(server)

        accepting = self.b.start(accept())
        await self.a.start(self.tcp.connect("a", client, "b", PORT))
        await accepting
        return client, server


def played(work: Callable[[Setting], Coroutine[Any, Any, None]], seeds: int = 20) -> None:
    for seed in range(seeds):
        with simulated(seed) as loop:
            loop.run_until_complete(asyncio.wait_for(work(Setting(loop)), 1000))


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # In virtual time.
        await asyncio.sleep(0.01)


def test_bytes_arrive_in_order_in_other_pieces_both_ways() -> None:
    pieces: list[int] = []

    async def work(setting: Setting) -> None:
        client, server = await setting.connected()
        sent = [bytes([number % 251]) * (number % 90) for number in range(200)]
        for number, each in enumerate(sent):
            client.transport.write(each)
            server.transport.write(each[::-1] + b"!")
            if number % 20 == 0:
                await asyncio.sleep(0.003)
        await until(lambda: len(server.received) == len(b"".join(sent)))
        await until(lambda: client.received.count(b"!") >= len(sent))
        assert server.received == b"".join(sent)
        pieces.append(server.pieces)

    played(work)
    assert len(set(pieces)) > 5
    assert max(pieces) > 20


def test_a_paused_or_stalled_reader_stops_the_writer_and_loses_nothing() -> None:
    async def work(setting: Setting) -> None:
        client, server = await setting.connected()
        assert client.transport.get_extra_info("peername") == ("b", PORT)
        client.transport.set_write_buffer_limits(high=100_000)
        for how in (server.transport.pause_reading, server.transport.stall):
            before = len(server.received)
            restore = how() or server.transport.resume_reading
            for _ in range(100):
                client.transport.write(b"x" * 4096)
            await asyncio.sleep(1.0)
            assert len(server.received) == before
            assert client.events[-1] == "pause"
            assert client.transport.get_write_buffer_size() > 100_000
            restore()
            await until(lambda: len(server.received) == before + 409_600)  # noqa: B023
            await until(lambda: client.events[-1] == "resume")

    played(work, 5)


def test_close_sends_all_written_bytes_and_abort_only_those_in_flight() -> None:
    async def closes(setting: Setting) -> None:
        client, server = await setting.connected()
        client.transport.write(b"y" * 50_000)
        client.transport.close()
        await until(lambda: server.events == ["lost"])
        assert len(server.received) == 50_000
        assert server.error is None
        await until(lambda: "lost" in client.events)

    async def aborts(setting: Setting) -> None:
        client, server = await setting.connected()
        client.transport.write(b"y" * 100)
        client.transport.abort()
        assert client.transport.is_closing()
        client.transport.write(b"not sent")
        await until(lambda: server.events and client.events)
        assert (len(server.received), client.events) == (100, ["lost"])

    played(closes)
    played(aborts)


def test_an_abort_with_unread_bytes_resets_and_may_lose_the_peers_unread_bytes() -> None:
    kept: list[int] = []

    async def work(setting: Setting) -> None:
        client, server = await setting.connected()
        server.transport.pause_reading()
        client.transport.write(b"z" * 50)
        await asyncio.sleep(0.1)
        restore = client.transport.stall()
        server.transport.write(b"the last words")
        await asyncio.sleep(0.1)
        server.transport.abort()
        await asyncio.sleep(0.1)
        restore()
        await until(lambda: client.events == ["lost"])
        assert isinstance(client.error, ConnectionResetError)
        kept.append(len(client.received))

    played(work)
    assert set(kept) == {0, 14}


def test_a_connect_fails_without_a_listener_or_an_answer() -> None:
    async def work(setting: Setting) -> None:
        with pytest.raises(ConnectionRefusedError):
            await setting.a.start(setting.tcp.connect("a", Recorder(), "b", PORT))
        setting.tcp.listen("b", PORT, setting.b)
        restore = setting.network.cut("b", "a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await setting.a.start(setting.tcp.connect("a", Recorder(), "b", PORT))
        restore()
        await asyncio.sleep(1.0)
        assert not setting.tcp.live

    played(work, 5)


def test_a_peer_learns_of_a_dead_process_but_not_of_a_cut_link() -> None:
    async def dies(setting: Setting) -> None:
        client, server = await setting.connected()
        server.transport.write(b"sent before")
        setting.b.kill()
        await until(lambda: client.events == ["lost"])
        assert client.received in (b"sent before", b"")
        assert server.events == []
        with pytest.raises(ConnectionRefusedError):
            await setting.a.start(setting.tcp.connect("a", Recorder(), "b", PORT))

    half_open: list[bool] = []

    async def cut(setting: Setting) -> None:
        client, server = await setting.connected()
        restore = setting.network.cut("a", "b")
        client.transport.write(b"held")
        await asyncio.sleep(0.5)
        assert (client.events, server.events, server.received) == ([], [], b"")
        await until(lambda: client.events or server.events)  # One gives up, without a message to the other.
        half_open.append(not (client.events and server.events))
        restore()
        await until(lambda: client.events and server.events)
        assert not setting.tcp.live

    played(dies)
    played(cut)
    assert any(half_open)


def test_a_paused_process_receives_nothing_until_it_resumes() -> None:
    async def work(setting: Setting) -> None:
        client, server = await setting.connected()
        setting.b.pause()
        client.transport.write(b"for later")
        await asyncio.sleep(5.0)
        assert server.received == b""
        setting.b.resume()
        await until(lambda: server.received == b"for later")

    played(work, 5)
