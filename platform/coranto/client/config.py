"""Where a cluster is, as a value that travels: to another thread, a forked worker or a Spark executor."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from coranto.auth import Auth, BearerToken, Keys
from coranto.errors import InvalidInput

DEFAULT_PATIENCE = 60.0
"""Seconds for which a call is repeated while brokers cannot serve it: longer than a lease, to sit out a fail-over."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Certificates for `https` endpoints, as PEM files.

    `ca` holds the authorities to trust (default: those of gRPC). `cert` and `key` show the broker who we are.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidInput("a certificate and its key must be given together", field="TLS")


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How to reach a cluster.

    `endpoint` is `host:port`, `http://host:port`, `https://host:port`, `unix:///path`, or several `ip:port` separated
    by commas, of which the first that answers is used. `file_root` is the folder that `file:///` fragment stores are
    rooted at, when this process can read it: persisted fragments are then read there rather than through brokers.
    `patience` is how many seconds calls are repeated for while brokers cannot serve them.

    With `auth` every call has a token: one that is signed for just that call, or the one that is given. Tokens are sent
    over TLS, to loopback addresses and to unix sockets only; another endpoint raises InvalidInput.
    """

    endpoint: str
    file_root: Path | None = None
    patience: float = DEFAULT_PATIENCE
    auth: Auth | None = None
    tls: ClientTls | None = None

    def __post_init__(self) -> None:
        if self.auth is not None:
            require_private(self.endpoint)
        if self.tls is not None and not parse_endpoint(self.endpoint).secure:
            raise InvalidInput(f"{self.endpoint} is without TLS; write https://host:port", field="endpoint")

    @classmethod
    def from_environment(
        cls,
        endpoint: str,
        file_root: Path | None = None,
        patience: float = DEFAULT_PATIENCE,
        environment: Mapping[str, str] = os.environ,
    ) -> ClientConfig:
        """The configuration for an endpoint, with what the environment says of tokens and certificates.

        `$CORANTO_AUTH_KEYS` or `$CORANTO_AUTH_TOKEN`; and, for `https` endpoints, `$CORANTO_TLS_CA`,
        `$CORANTO_TLS_CERT` and `$CORANTO_TLS_KEY`. Raises InvalidInput.
        """
        return cls(endpoint, file_root, patience, _auth_of(environment), _tls_of(environment, endpoint))


@dataclass(frozen=True, slots=True)
class Target:
    """What gRPC dials."""

    address: str
    secure: bool


def parse_endpoint(endpoint: str) -> Target:
    """The gRPC target of an endpoint. Raises InvalidInput."""
    parts = [part.strip() for part in endpoint.split(",")]
    if len(parts) > 1:
        return Target(_several(endpoint, parts), secure=False)
    text = parts[0]
    if text.startswith("unix:"):
        path = urlsplit(text).path
        if not path:
            raise InvalidInput(f"{endpoint!r} names no socket; write unix:///path/to/socket", field="endpoint")
        return Target(f"unix:{path}", secure=False)
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
        raise InvalidInput(f"{endpoint!r} is not host:port", field="endpoint")
    if port is None:
        port = 443 if url.scheme == "https" else 80
    return Target(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", secure=url.scheme == "https")


def require_private(endpoint: str) -> None:
    """Raises InvalidInput when a token sent to this endpoint could be read on its way."""
    target = parse_endpoint(endpoint)
    if target.secure or target.address.startswith("unix:"):
        return
    for address in target.address.removeprefix("ipv4:").split(","):
        host = address.rpartition(":")[0].strip("[]")
        if not is_loopback(host):
            raise InvalidInput(
                f"a token must not be sent to {host} in the clear: use https://, or an endpoint on this machine",
                field="endpoint",
            )


def is_loopback(host: str) -> bool:
    """Whether a host is certainly this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _auth_of(environment: Mapping[str, str]) -> Auth | None:
    keys, token = environment.get("CORANTO_AUTH_KEYS", ""), environment.get("CORANTO_AUTH_TOKEN", "")
    if keys and token:
        raise InvalidInput("only one of CORANTO_AUTH_KEYS and CORANTO_AUTH_TOKEN can be set", field="environment")
    if keys:
        return Keys.parse(keys)
    return BearerToken.parse(token) if token else None


def _tls_of(environment: Mapping[str, str], endpoint: str) -> ClientTls | None:
    if not parse_endpoint(endpoint).secure:
        return None
    ca, cert, key = (
        Path(value) if (value := environment.get(f"CORANTO_TLS_{name}")) else None for name in ("CA", "CERT", "KEY")
    )
    return ClientTls(ca, cert, key) if ca or cert or key else None


def _several(endpoint: str, parts: list[str]) -> str:
    addresses = []
    for part in parts:
        target = parse_endpoint(part) if part else None
        if target is None or target.secure or target.address.startswith("unix:"):
            raise InvalidInput(f"{endpoint!r}: each of several endpoints must be ip:port", field="endpoint")
        host = target.address.rpartition(":")[0]
        try:
            version = ipaddress.ip_address(host.strip("[]")).version
        except ValueError as error:
            raise InvalidInput(
                f"{endpoint!r}: {host!r} is not an IP address, which each of several endpoints must be",
                field="endpoint",
            ) from error
        if version != 4:
            raise InvalidInput(f"{endpoint!r}: several endpoints must all be IPv4", field="endpoint")
        addresses.append(target.address)
    return "ipv4:" + ",".join(addresses)
