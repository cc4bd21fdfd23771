"""The listener of frame connections: what `FrameServer` needs of the network, and its form over sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final, Protocol

from coranto.errors import ClusterError
from coranto.security.certificates import Reloaded

_BACKLOG: Final = 1024


class AcceptedConnection(Protocol):
    """A connection that was accepted. Its bytes wait until a protocol is attached."""

    async def attach(self, protocol: asyncio.Protocol) -> None:
        """Serve it by a protocol, after the TLS handshake if there is one. It is closed if that fails.

        Raises OSError when the handshake fails.
        """
        ...

    def close(self) -> None:
        """Close it, with no protocol attached."""
        ...


class FrameListener(Protocol):
    """A port for connections with frames."""

    @property
    def port(self) -> int: ...

    async def accept(self) -> AcceptedConnection:
        """Return the next connection. Raises OSError while the system has no room for one."""
        ...

    def close(self) -> None:
        """Take no more connections."""
        ...


class SocketListener:
    """A `FrameListener` over TCP, with TLS if it has contexts for it."""

    def __init__(self, listener: socket.socket, contexts: Reloaded[ssl.SSLContext] | None) -> None:
        self._listener = listener
        self._contexts = contexts

    @classmethod
    def bind(cls, host: str, port: int, contexts: Reloaded[ssl.SSLContext] | None) -> SocketListener:
        """Take a port (0: any free one). `contexts` are for TLS; None: it is without TLS. Raises ClusterError."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ClusterError(
                f"cannot listen on {host} port {port} for frames: {error.strerror or error}. Free the port, or choose "
                "another --frame-port"
            ) from error
        return cls(listener, contexts)

    @property
    def port(self) -> int:
        number: int = self._listener.getsockname()[1]
        return number

    async def accept(self) -> AcceptedConnection:
        accepted, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        return _AcceptedSocket(accepted, self._contexts)

    def close(self) -> None:
        self._listener.close()


class _AcceptedSocket:
    def __init__(self, accepted: socket.socket, contexts: Reloaded[ssl.SSLContext] | None) -> None:
        self._accepted = accepted
        self._contexts = contexts

    async def attach(self, protocol: asyncio.Protocol) -> None:
        try:
            tls = self._contexts.get() if self._contexts is not None else None
        except BaseException:
            self._accepted.close()
            raise
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, self._accepted, ssl=tls)

    def close(self) -> None:
        self._accepted.close()
