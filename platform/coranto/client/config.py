"""Where a cluster is, as a value that travels: to another thread, a forked worker or a Spark executor."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from coranto.errors import InvalidInput

DEFAULT_PATIENCE = 60.0
"""Seconds for which a call is repeated while brokers cannot serve it: longer than a lease, to sit out a fail-over."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How to reach a cluster.

    `endpoint` is `host:port`, `http://host:port`, `https://host:port`, `unix:///path`, or several `ip:port` separated
    by commas, of which the first that answers is used. `file_root` is the folder that `file:///` fragment stores are
    rooted at, when this process can read it: persisted fragments are then read there rather than through brokers.
    `patience` is how many seconds calls are repeated for while brokers cannot serve them.
    """

    endpoint: str
    file_root: Path | None = None
    patience: float = DEFAULT_PATIENCE


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
