"""The proxies that inject faults into connections, and the notes of readers' observations."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.cluster import FaultyCluster
from tests.faults.links import ProxiedLink, Proxy
from tests.faults.workload import FaultWorkload
from tests.servers.processes import until


class Echo:
    """A server that echoes its input, through a proxy with one link."""

    def __init__(self, folder: Path) -> None:
        self.link = ProxiedLink()
        self.pids: list[int] = []
        self.folder = folder

    async def __aenter__(self) -> Echo:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._proxy = Proxy(self._server.sockets[0].getsockname()[1], self._link_of, self.folder / "p")
        await self._proxy.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.link.heal()
        await self._proxy.close()
        self._server.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._proxy.endpoint.removeprefix("unix://localhost"))

    def _link_of(self, pid: int) -> ProxiedLink:
        self.pids.append(pid)
        return self.link

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()


@pytest.fixture
async def echo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Echo]:
    async with Echo(tmp_path_factory.mktemp("e")) as echo:
        yield echo


async def request(ends: tuple[asyncio.StreamReader, asyncio.StreamWriter], word: bytes) -> bytes:
    ends[1].write(word)
    return await ends[0].read(100)


async def test_a_proxy_identifies_the_calling_process(echo: Echo) -> None:
    ends = await echo.connect()
    assert await request(ends, b"hello") == b"hello"
    assert echo.pids == [os.getpid()]
    ends[1].close()


async def test_a_cut_link_refuses_connections_until_it_heals(echo: Echo) -> None:
    ends = await echo.connect()
    assert await request(ends, b"hello") == b"hello"
    echo.link.cut()
    assert await ends[0].read(100) == b""
    refused = await echo.connect()
    assert await refused[0].read(100) == b""
    assert echo.link.refused == 2
    echo.link.heal()
    again = await echo.connect()
    assert await request(again, b"hello") == b"hello"
    again[1].close()


async def test_a_held_link_delays_bytes_until_it_heals(echo: Echo) -> None:
    ends = await echo.connect()
    assert await request(ends, b"one") == b"one"
    echo.link.hold()
    answer = asyncio.ensure_future(request(ends, b"two"))
    await until(lambda: echo.link.held > 0, "the link holds bytes", 120)
    assert not answer.done()
    echo.link.heal()
    assert await answer == b"two"
    ends[1].close()


async def test_a_slow_link_delays_bytes_in_both_directions(echo: Echo) -> None:
    ends = await echo.connect()
    echo.link.delay(0.05)
    begun = asyncio.get_running_loop().time()
    assert await request(ends, b"hello") == b"hello"
    assert asyncio.get_running_loop().time() - begun >= 0.1
    ends[1].close()


async def test_equal_observations_of_readers_are_recorded_once(tmp_path: Path) -> None:
    workload = FaultWorkload(FaultyCluster(tmp_path), ["a/b"], ["z"], random.Random(0), 0.1)
    for offset, content in ((0, b"0123"), (4, b"4567"), (2, b"2345678"), (0, b"01"), (3, b"34x6")):
        workload._saw("reader", "a/b", offset, content)
    assert workload.seen["a/b"] == b"012345678"
    noted = [(each.offset, each.content) for each in workload.history.observations]
    assert noted == [(0, b"0123"), (4, b"4567"), (2, b"2345678"), (3, b"34x6")]
