"""Protection against DNS rebinding: rejects requests that a web page sends through a browser on this machine.

A web page can have its own name resolve to 127.0.0.1. Its scripts then reach servers on this machine as if they were
the page's own server. So a loopback port without other access control serves only requests addressed to this machine.
Browsers send the name that they resolved in `Host`.

gRPC ports need no such check: browsers do not speak HTTP/2 without TLS, and with TLS they verify the name.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from coranto.security.server import ServerSettings, keys_of
from coranto.security.tls import is_loopback


def trusts_the_machine(settings: ServerSettings) -> bool:
    """Return True if every process on this machine may do everything without credentials.

    This is the case on a loopback host without TLS, if keys are not set or missing tokens are accepted.
    """
    keys = keys_of(settings)
    return is_loopback(settings.host) and settings.tls_cert is None and (keys is None or keys.accept_missing)


def local_only(advertise: str = "") -> Middleware:
    """Return a middleware that responds with 421 unless a request is addressed to this machine or `advertise`'s host.

    `advertise` is a URL.
    """
    ours = (urlsplit(advertise).hostname or "") if advertise else ""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        for given in request.headers.getall("Host", []):
            host = _host(given)
            if not host or not (is_loopback(host) or host == ours):
                return web.Response(
                    status=421,
                    text="this port serves requests to this machine only: address it as localhost or 127.0.0.1\n",
                )
        return await handler(request)

    return check


def _host(header: str) -> str:
    """Return the name or address in a Host header in lower case, or "" if it cannot be parsed."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
