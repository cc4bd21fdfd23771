"""Listeners for frame connections: the interface that `FrameServer` uses, and its implementation over sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final, Protocol

from coranto.errors import ClusterError
from coranto.security.certificates import Reloaded

_BACKLOG: Final = 1024


class AcceptedConnection(Protocol):
    """An accepted connection. Its received bytes wait until a protocol is attached."""

    async def attach(self, protocol: asyncio.Protocol) -> None:
        """Attach a protocol, after the TLS handshake if TLS is used.

        If the handshake fails, close the connection and raise OSError.
        """
        ...

    def close(self) -> None:
        """Close the connection, which has no protocol."""
        ...


class FrameListener(Protocol):
    """A port that accepts frame connections."""

    @property
    def port(self) -> int: ...

    async def accept(self) -> AcceptedConnection:
        """Return the next connection. Raises OSError if the system cannot accept one now."""
        ...

    def close(self) -> None:
        """Stop accepting connections."""
        ...


class SocketListener:
    """A `FrameListener` over TCP, with TLS if it has TLS contexts."""

    def __init__(self, listener: socket.socket, contexts: Reloaded[ssl.SSLContext] | None) -> None:
        self._listener = listener
        self._contexts = contexts

    @classmethod
    def bind(cls, host: str, port: int, contexts: Reloaded[ssl.SSLContext] | None) -> SocketListener:
        """Listen on a port (0: any free one). `contexts` are for TLS; None: no TLS. Raises ClusterError."""
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
