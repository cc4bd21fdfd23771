"""Requests to an OpenID Connect provider: bounded in time and bytes, without redirects, and over TLS."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from coranto.errors import InvalidInput, Unavailable
from coranto.security.tls import is_loopback

TIMEOUT_SECONDS: Final = 10.0
"""The time limit of one request, from its connection to the last byte of the response."""
MAX_BYTES: Final = 256 << 10
"""The size limit of a response. Providers' key sets have some kilobytes."""
_DISCOVERY: Final = "/.well-known/openid-configuration"


@dataclass(frozen=True, slots=True)
class Response:
    """The response to one request."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Discovery:
    """A provider's description of itself."""

    issuer: str
    content: Mapping[str, Any]

    def endpoint(self, name: str) -> str:
        """Return the URL of one of the provider's endpoints. Raises Unavailable if the provider has none."""
        url = self.content.get(name)
        try:
            require_private_url(url if isinstance(url, str) else "", name)
        except InvalidInput as error:
            raise Unavailable(f"the discovery document of {self.issuer} cannot be used: {error}") from None
        return str(url)


def require_private_url(url: str, field: str) -> None:
    """Check that a URL is https, or http to this machine. Raises InvalidInput."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        host = ""
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))):
        raise InvalidInput(f"{url[:200]!r} is not an https:// URL (http:// only for this machine)", field=field)
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("a URL must not have a user name or password", field=field)


async def discover(issuer: str) -> Discovery:
    """Return the discovery document of an issuer. Raises Unavailable if there is none, or if it has another issuer."""
    url = issuer.rstrip("/") + _DISCOVERY
    content = json_of(url, await request(url))
    if content.get("issuer") != issuer:
        raise Unavailable(
            f"{url} names the issuer {str(content.get('issuer'))[:200]!r}, not {issuer!r}: set the issuer exactly as "
            "the provider writes it"
        )
    return Discovery(issuer, content)


def json_of(url: str, response: Response) -> dict[str, Any]:
    """Return the JSON object of a successful response. Raises Unavailable."""
    if response.status != 200:
        raise Unavailable(f"{url} answered with status {response.status}")
    try:
        content = json.loads(response.text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Unavailable(f"{url} did not answer with a JSON object")
    return content


async def request(url: str, form: str | None = None, credentials: tuple[str, str] | None = None) -> Response:
    """GET a URL, or POST a form to it, and return the response. `credentials` are a client's id and secret.

    Raises Unavailable for a response that is late, too large or not text, and for a failed connection.
    """
    import aiohttp

    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    if credentials is not None:
        # RFC 6749, 2.3.1: both parts are encoded as in a form before they become Basic credentials.
        pair = ":".join(quote(part, safe="") for part in credentials)
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    try:
        # Compressed responses are not read: they may be far larger than their transfer.
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), auto_decompress=False
        ) as session:
            async with session.request(
                "GET" if form is None else "POST",
                url,
                data=form,
                headers=headers,
                allow_redirects=False,
                proxy=_proxy_of(url),
            ) as response:
                content = bytearray()
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) > MAX_BYTES:
                        raise Unavailable(f"{url} answered with more than {MAX_BYTES} bytes")
                return Response(response.status, content.decode())
    except TimeoutError:
        raise Unavailable(f"{url} did not answer within {TIMEOUT_SECONDS:g} seconds") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(f"{url} cannot be read: {str(error)[:300] or type(error).__name__}") from None


def _proxy_of(url: str) -> str | None:
    """Return the proxy of the environment for a URL. (aiohttp's own lookup would also use passwords of ~/.netrc.)"""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return None if is_loopback(host) or proxy_bypass(host) else getproxies().get(parts.scheme)
