"""Refusing requests that a web page has a browser of this machine send (DNS rebinding).

A page may have its own name lead to 127.0.0.1, and its scripts then reach whatever listens there, as if it were the
page's own server. Where nothing else tells callers apart, a port of the loopback interface therefore serves only
requests that are addressed to this machine. Browsers say in `Host` which name they followed.

Ports of gRPC need no such check: browsers do not speak HTTP/2 without TLS, and with TLS they verify the name.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from coranto.security.server import ServerSettings, keys_of
from coranto.security.tls import is_loopback


def trusts_the_machine(settings: ServerSettings) -> bool:
    """Whether whoever is on this machine may do everything, over a connection that shows nobody's name."""
    keys = keys_of(settings)
    return is_loopback(settings.host) and settings.tls_cert is None and (keys is None or keys.accept_missing)


def local_only(advertise: str = "") -> Middleware:
    """A middleware that answers 421 to requests for another host than this machine, or that of `advertise`, a URL."""
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
    """The name or address in a Host header, in lower case; empty when there is none to be understood."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
