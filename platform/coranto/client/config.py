"""The configuration of a client: a value that can be sent to a thread, a forked worker or a Spark executor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from coranto.client.disk_cache import DiskCache
from coranto.errors import InvalidInput
from coranto.names import validate_zone
from coranto.security.oidc.client import OidcClient
from coranto.security.tls import ClientTls, is_loopback
from coranto.security.tokens import Auth, BearerToken, Keys, Secret
from coranto.transport.calls import FrameDialer

DEFAULT_ROUTE_CACHE = 1024
"""The default number of journals whose brokers a client remembers."""

OIDC_VARIABLES: Final = (
    "CORANTO_OIDC_ISSUER",
    "CORANTO_OIDC_CLIENT_ID",
    "CORANTO_OIDC_CLIENT_SECRET",
    "CORANTO_OIDC_SCOPE",
    "CORANTO_OIDC_AUDIENCE",
)
"""The variables of `OidcClient`, in the order of its fields."""
AUTH_VARIABLES: Final = ("CORANTO_AUTH_TOKEN", "CORANTO_AUTH_KEYS", *OIDC_VARIABLES)
AUTH_KINDS: Final = AUTH_VARIABLES[:3]
"""The variables that choose the kind of `auth`. Only one of them may be set."""
_MAX_NAME = 128
DEFAULT_RETRY_TIMEOUT = 60.0
"""The default retry timeout in seconds: longer than a lease, to outlast a failover."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The configuration for reaching a cluster.

    `endpoint` is `host:port`, `http://host:port`, `https://host:port` or `unix:///path`, or several of them separated
    by commas, all with TLS or all without. Any of them may be down. `file_root` is the root folder of `file:///`
    fragment stores, if this process can read it: then persisted fragments are read there instead of through brokers.
    Calls that brokers cannot serve are retried for `retry_timeout` seconds.

    With `auth` every call has a token: signed for that call, given, or from an OpenID Connect provider. Tokens are sent
    only over TLS, to loopback addresses and to unix sockets; any other endpoint raises InvalidInput.

    Calls go to `endpoint` until an answer names the brokers of a journal. Then appends go to its primary, and reads to
    one of its replicas, preferably one in `zone`. `route_cache` is the number of journals whose brokers are remembered.
    With 0 all calls go to `endpoint`.

    `disk_cache`, if given, keeps the content of fragments that are read directly.

    Small appends to Coranto's brokers share a stream, which makes many of them far cheaper. An append that is cancelled
    after it was sent may then still be applied. Without `append_streams`, and to Gazette's brokers, each append is a
    separate call.

    `name` identifies the caller, such as `nightly/orders`. Brokers log it with failed calls. It begins gRPC's header
    `user-agent`, and has up to 128 printable ASCII characters without spaces.
    """

    endpoint: str
    file_root: Path | None = None
    retry_timeout: float = DEFAULT_RETRY_TIMEOUT
    auth: Auth | None = None
    tls: ClientTls | None = None
    zone: str = ""
    route_cache: int = DEFAULT_ROUTE_CACHE
    disk_cache: DiskCache | None = None
    append_streams: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        secure = {parse_endpoint(seed).secure for seed in self.seeds}
        if len(secure) > 1:
            raise InvalidInput(
                f"{self.endpoint!r}: all endpoints must be https, or none; give all of them one scheme",
                field="endpoint",
            )
        if self.auth is not None:
            for seed in self.seeds:
                require_private(seed)
        if self.tls is not None and secure == {False}:
            raise InvalidInput(f"{self.endpoint} is without TLS; write https://host:port", field="endpoint")
        if self.zone:
            validate_zone(self.zone)
        if len(self.name) > _MAX_NAME or not (self.name.isascii() and self.name.isprintable()) or " " in self.name:
            raise InvalidInput(
                f"{self.name[:200]!r} cannot name a client: give up to {_MAX_NAME} printable ASCII characters without "
                "spaces",
                field="name",
            )
        if self.route_cache < 0:
            raise InvalidInput(f"{self.route_cache} is not a number of journals; give 0 or more", field="route_cache")

    @property
    def seeds(self) -> tuple[str, ...]:
        """The individual endpoints."""
        return tuple(seed.strip() for seed in self.endpoint.split(","))

    @classmethod
    def from_environment(
        cls,
        endpoint: str,
        file_root: Path | None = None,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        environment: Mapping[str, str] = os.environ,
    ) -> ClientConfig:
        """Return the configuration for an endpoint, with tokens, certificates and zone from the environment.

        The variables are `$CORANTO_AUTH_KEYS`, `$CORANTO_AUTH_TOKEN`, or `$CORANTO_OIDC_ISSUER` and the other
        `OIDC_VARIABLES`; for `https` endpoints also `$CORANTO_TLS_CA`, `$CORANTO_TLS_CERT` and `$CORANTO_TLS_KEY`;
        `$CORANTO_ZONE` for the zone of this process; and `$CORANTO_CLIENT_NAME` for the name. Raises InvalidInput.
        """
        auth, tls = _auth_of(environment), _tls_of(environment, endpoint)
        zone, name = environment.get("CORANTO_ZONE", ""), environment.get("CORANTO_CLIENT_NAME", "")
        return cls(endpoint, file_root, retry_timeout, auth, tls, zone, name=name)


@dataclass(frozen=True, slots=True)
class ChannelTarget:
    """The address that gRPC connects to."""

    address: str
    secure: bool


@lru_cache(maxsize=1024)
def parse_endpoint(endpoint: str) -> ChannelTarget:
    """Return the gRPC target of one endpoint. Raises InvalidInput."""
    text = endpoint
    if text.startswith("unix:"):
        path = urlsplit(text).path
        if not path:
            raise InvalidInput(f"{endpoint!r} names no socket; write unix:///path/to/socket", field="endpoint")
        return ChannelTarget(f"unix:{path}", secure=False)
    if "://" not in text:
        text = f"http://{text}"
    url = urlsplit(text)
    if url.scheme not in ("http", "https"):
        raise InvalidInput(
            f"{endpoint!r} has scheme {url.scheme!r}; expected host:port, http, https or unix", field="endpoint"
        )
    try:
        host, port = url.hostname, url.port
    except ValueError as error:
        raise InvalidInput(f"{endpoint!r}: {error}", field="endpoint") from error
    if not host or url.path not in ("", "/") or url.query:
        raise InvalidInput(
            f"{endpoint!r} is not host:port; write 127.0.0.1:8080, or http:// or https:// before it", field="endpoint"
        )
    if port is None:
        port = 443 if url.scheme == "https" else 80
    return ChannelTarget(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", secure=url.scheme == "https")


def frame_dialer(endpoint: str, tls: ClientTls | None, name: str = "") -> FrameDialer | None:
    """Return the dialer of frame connections to an endpoint's host, with gRPC's TLS settings; None for unix sockets."""
    target = parse_endpoint(endpoint)
    if target.address.startswith("unix:"):
        return None
    host = target.address.rpartition(":")[0].strip("[]")
    return FrameDialer(host, (tls or ClientTls()) if target.secure else None, f"{name} grpc-frames" if name else "")


def require_private(endpoint: str) -> None:
    """Check that a token stays secret on its way to this endpoint. Raises InvalidInput."""
    target = parse_endpoint(endpoint)
    if target.secure or target.address.startswith("unix:"):
        return
    host = target.address.rpartition(":")[0].strip("[]")
    if not is_loopback(host):
        raise InvalidInput(
            f"a token must not be sent to {host} in the clear: use https://, or an endpoint on this machine",
            field="endpoint",
        )


def _auth_of(environment: Mapping[str, str]) -> Auth | None:
    given = [name for name in AUTH_KINDS if environment.get(name)]
    if len(given) > 1:
        raise InvalidInput(f"only one of {' and '.join(given)} can be set; unset the other", field="environment")
    if given == ["CORANTO_AUTH_KEYS"]:
        return Keys.parse(environment["CORANTO_AUTH_KEYS"])
    if given == ["CORANTO_AUTH_TOKEN"]:
        return BearerToken.parse(environment["CORANTO_AUTH_TOKEN"])
    return oidc_client_of(environment) if given else None


def oidc_client_of(environment: Mapping[str, str]) -> OidcClient:
    """Return the OpenID Connect client that the environment configures. Raises InvalidInput."""
    issuer, client_id, secret, scope, audience = (environment.get(name, "") for name in OIDC_VARIABLES)
    if not issuer or not client_id:
        raise InvalidInput(
            "$CORANTO_OIDC_ISSUER and $CORANTO_OIDC_CLIENT_ID must both be set: the provider's issuer URL, and the id "
            "that it has given to this client",
            field="environment",
        )
    return OidcClient(issuer, client_id, Secret(secret) if secret else None, scope, audience)


def _tls_of(environment: Mapping[str, str], endpoint: str) -> ClientTls | None:
    if not parse_endpoint(endpoint.partition(",")[0].strip()).secure:
        return None
    ca, cert, key = (
        Path(value) if (value := environment.get(f"CORANTO_TLS_{name}")) else None for name in ("CA", "CERT", "KEY")
    )
    return ClientTls(ca, cert, key) if ca or cert or key else None


def require_client(client: object) -> None:
    """Raise InvalidInput unless `client` is a ClientConfig, for example if it is an endpoint."""
    if not isinstance(client, ClientConfig):
        example = repr(client) if isinstance(client, str) else "'127.0.0.1:8080'"
        raise InvalidInput(
            f"is a {type(client).__name__}, not a configuration: give ClientConfig({example}) of coranto.client, or "
            "ClientConfig.from_environment(…), which also reads tokens and TLS from the environment",
            field="client",
        )
