"""Keys and certificates of a consumer process, and who may call what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import structlog

from coranto.auth import HEADER, LEEWAY_SECONDS, Capability, Claims, Keys, bearer_of, require, verify
from coranto.client.config import ClientTls, is_loopback
from coranto.client.connection import read_pem
from coranto.effects import Clock
from coranto.errors import InvalidInput, Unauthenticated, Unavailable
from coranto_consumers.runtime.settings import ConsumerSettings

_log = structlog.get_logger(__name__)

RULES: Final[Mapping[str, Capability]] = {
    "Stat": Capability.READ,
    "List": Capability.LIST,
    "Apply": Capability.APPLY,
    "GetHints": Capability.READ,
    "Unassign": Capability.APPLY,
}
"""What each method of `consumer.Shard` takes. One that is not here cannot be served."""


def keys_of(settings: ConsumerSettings) -> Keys | None:
    """The keys that tokens are verified with; None when there are none. Raises InvalidInput."""
    text = settings.auth_keys.get_secret_value()
    return Keys.parse(text) if text.strip() else None


def peer_tls(settings: ConsumerSettings) -> ClientTls:
    """How to connect to peers. Where callers have to show certificates, we show ours."""
    if settings.tls_client_ca is None:
        return ClientTls(settings.peer_ca)
    return ClientTls(settings.peer_ca, settings.tls_cert, settings.tls_key)


def etcd_tls(settings: ConsumerSettings) -> ClientTls | None:
    """How to connect to etcd; None where nothing is said of it."""
    files = settings.etcd_ca, settings.etcd_cert, settings.etcd_key
    return ClientTls(*files) if any(files) else None


def server_credentials(settings: ConsumerSettings) -> grpc.ServerCredentials | None:
    """Credentials to serve with; None when there is no certificate, and so no TLS. Raises InvalidInput."""
    if settings.tls_cert is None or settings.tls_key is None:
        if settings.tls_cert or settings.tls_key or settings.tls_client_ca:
            raise InvalidInput("serving with TLS takes both tls_cert and tls_key", field="settings")
        return None
    client_ca = settings.tls_client_ca
    return grpc.ssl_server_credentials(
        [(read_pem(settings.tls_key), read_pem(settings.tls_cert))],
        read_pem(client_ca) if client_ca is not None else None,
        require_client_auth=client_ca is not None,
    )


def check_exposure(settings: ConsumerSettings, endpoint: str) -> None:
    """Raise InvalidInput where tokens would be sent here in the clear, or where anybody may change shards although
    nobody said so. `endpoint` is what this process tells others."""
    loopback = is_loopback(settings.host)
    if keys_of(settings) is None:
        if not loopback and settings.tls_client_ca is None and not settings.serve_anyone_without_keys:
            raise InvalidInput(
                f"whoever can reach {settings.host} could change shards: give the process auth_keys or tls_client_ca, "
                "or listen on 127.0.0.1. If everybody there is to be trusted, say so by --serve-anyone-without-keys",
                field="host",
            )
        return
    url = urlsplit(endpoint)
    if (settings.tls_cert is None and not loopback) or (url.scheme == "http" and not is_loopback(url.hostname or "")):
        raise InvalidInput(
            f"with keys, callers would send tokens to {endpoint} in the clear: set tls_cert and tls_key, or listen on "
            "127.0.0.1",
            field="host",
        )


class Authorizer:
    """Admits calls by their tokens."""

    def __init__(self, keys: Keys | None, clock: Clock) -> None:
        """Without keys everybody may do everything."""
        self._keys = keys
        self._clock = clock

    @asynccontextmanager
    async def admitted(self, method: str, context: Any) -> AsyncIterator[Claims]:
        """Serve a call under the claims that it comes with, for as long as they are valid.

        Raises Unauthenticated, PermissionDenied, and Unavailable when the claims run out before it has been served.
        """
        if self._keys is None:
            yield Claims(Capability.ALL)
            return
        metadata = context.invocation_metadata() or ()
        token = bearer_of(value for name, value in metadata if name == HEADER)
        if token is None:
            if not self._keys.accept_missing:
                raise Unauthenticated("a token is needed: send the metadata `authorization: Bearer <token>`")
            yield Claims(Capability.ALL)
            return
        claims = verify(token, self._keys, self._clock.now())
        require(claims, RULES[method])
        left = claims.exp + LEEWAY_SECONDS - self._clock.now()
        try:
            async with asyncio.timeout(left) as timeout:
                yield claims
        except TimeoutError:
            if timeout.expired():
                raise Unavailable("the call's token has expired; call again with another") from None
            raise
