"""Proxies that break connections. A fault applies to a *link*: all connections from one process to another.

A broker announces one address to all others, so its proxy must identify the connecting process. It listens on a unix
socket, because the kernel knows the process at the other end.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from pathlib import Path

_BLOCK = 1 << 16


class ProxiedLink:
    """The current and future connections from one process to another, and their fault."""

    def __init__(self) -> None:
        self.is_cut = False
        self.delay_seconds = 0.0
        self.refused = 0
        """The number of broken or refused connections."""
        self.held = 0
        """The number of delayed blocks of content."""
        self._passing = asyncio.Event()
        self._passing.set()
        self._pipes: set[_Pipe] = set()

    def cut(self) -> None:
        """Break all connections, and refuse new ones until `heal`."""
        self.is_cut = True
        for pipe in list(self._pipes):
            self.refused += 1
            pipe.abort()

    def hold(self) -> None:
        """Keep connections open, but hold all traffic until `heal`."""
        self._passing.clear()

    def delay(self, seconds: float) -> None:
        self.delay_seconds = seconds

    def heal(self) -> None:
        """End all faults. Held traffic passes."""
        self.is_cut = False
        self.delay_seconds = 0.0
        self._passing.set()

    def join(self, pipe: _Pipe) -> None:
        self._pipes.add(pipe)

    def leave(self, pipe: _Pipe) -> None:
        self._pipes.discard(pipe)

    async def passage(self) -> None:
        """Wait until a block may pass."""
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if not self._passing.is_set():
            self.held += 1
            await self._passing.wait()


class Proxy:
    """A proxy of connections to a port. `link_of` returns the link for the id of the connecting process.

    It listens on a unix socket at `path`, if given. Otherwise it listens on a free port of `host`, and the process id
    is 0.
    """

    def __init__(
        self, upstream: int, link_of: Callable[[int], ProxiedLink], path: Path | None = None, host: str = "127.0.0.1"
    ) -> None:
        self._host = host
        self.upstream = upstream
        """The port. It may be changed at any time, for later connections."""
        self._link_of = link_of
        self._path = path
        self._server: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()
        self.endpoint = ""
        """`host:port` or `unix://…`; empty until it listens."""

    async def start(self) -> None:
        if self._path is not None:
            self._server = await asyncio.start_unix_server(self._accept, self._path)
            self.endpoint = f"unix://localhost{self._path}"
        else:
            self._server = await asyncio.start_server(self._accept, self._host, 0)
            self.endpoint = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening, and break all connections."""
        if self._server is not None:
            self._server.close()
        pipes = list(self._pipes)
        for pipe in pipes:
            pipe.abort()
        await asyncio.gather(*(pipe.ended.wait() for pipe in pipes))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = self._link_of(_process_of(writer.get_extra_info("socket")))
        if link.is_cut:
            link.refused += 1
            writer.transport.abort()
            return
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            writer.transport.abort()
            return
        pipe = _Pipe(link, (reader, writer), (upstream_reader, upstream_writer))
        self._pipes.add(pipe)
        await pipe.run()
        self._pipes.discard(pipe)


class _Pipe:
    """One connection through a proxy."""

    def __init__(
        self,
        link: ProxiedLink,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._link = link
        self._near = near
        self._far = far
        self.ended = asyncio.Event()

    def abort(self) -> None:
        self._near[1].transport.abort()
        self._far[1].transport.abort()

    async def run(self) -> None:
        self._link.join(self)
        try:
            # When one side closes, break both.
            await asyncio.gather(self._forward(self._near[0], self._far[1]), self._forward(self._far[0], self._near[1]))
        except OSError:
            return
        finally:
            self._link.leave(self)
            self.abort()
            self.ended.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_BLOCK):
            await self._link.passage()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("this side has closed")


def _process_of(connected: socket.socket) -> int:
    """Return the id of the process at the other end of a unix socket; 0 for other sockets."""
    if connected.family != socket.AF_UNIX:
        return 0
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)
