"""One HTTP port of a member."""

from __future__ import annotations

import logging
import ssl

from aiohttp import web

from coranto.errors import ClusterError

READ_BUFFER_BYTES = 1 << 19
"""The buffer size for a request's body, in bytes. Backpressure applies when twice as much is unread."""

# Handlers log their own errors. Requests that are not HTTP need no log entry.
_silent = logging.getLogger("coranto.member.silent")
_silent.setLevel(logging.CRITICAL + 1)


class Site:
    """An application, served from `start` to `stop`."""

    def __init__(self, application: web.Application, *, grace_seconds: float) -> None:
        """Create a site. Requests in flight may continue for `grace_seconds` after `stop`."""
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            access_log=None,
            logger=_silent,
            handler_cancellation=True,
            shutdown_timeout=grace_seconds,
            read_bufsize=READ_BUFFER_BYTES,
            auto_decompress=False,
        )

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> str:
        """Start serving and return the URL. If `port` is 0, the URL has the chosen port. Raises ClusterError."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=tls, reuse_address=True).start()
        except OSError as error:
            raise ClusterError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; free the port, or choose another"
            ) from error
        chosen = self._runner.addresses[0][1]
        return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{chosen}"

    async def stop(self) -> None:
        await self._runner.cleanup()
