"""Certificates of a client, and the check for loopback hosts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from coranto.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Certificates for `https` endpoints, as PEM files.

    `ca` holds the authorities to trust (default: gRPC's). `cert` and `key` identify the client to the broker.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidInput("a certificate and its key must be given together; give both or neither", field="TLS")


def is_loopback(host: str) -> bool:
    """Return True if a host is certainly this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
