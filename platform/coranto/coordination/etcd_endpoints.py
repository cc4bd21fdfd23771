"""etcd endpoints: their syntax, gRPC targets and TLS."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from coranto.errors import InvalidInput
from coranto.security.certificates import ChannelCertificates
from coranto.security.tls import ClientTls


def channel_target(endpoint: str) -> str:
    """Return the gRPC target of an etcd endpoint.

    An endpoint is `host:port`, `http://host:port`, `https://host:port`, `unix:///path`, or several IPv4 `host:port`
    without TLS, separated by commas. Raises InvalidInput.
    """
    parts = [part.strip() for part in endpoint.split(",") if part.strip()]
    addresses = [_address(part, endpoint) for part in parts]
    if not addresses:
        raise InvalidInput("empty etcd endpoint; give host:port")
    if len(addresses) == 1:
        return addresses[0]
    for part, address in zip(parts, addresses, strict=True):
        try:
            ipaddress.IPv4Address(address.rpartition(":")[0])
            usable = not is_secure(part)  # A certificate would have to name all of them.
        except ValueError:
            usable = False
        if not usable:
            raise InvalidInput(
                f"etcd endpoints {endpoint!r}: several endpoints must be IPv4 addresses without TLS; "
                "give one host name that resolves to all of them instead"
            )
    return "ipv4:" + ",".join(addresses)


def is_secure(endpoint: str) -> bool:
    """Return True if an etcd endpoint uses TLS, that is, if it begins with `https://`."""
    return endpoint.strip().lower().startswith("https://")


def etcd_certificates(endpoint: str, tls: ClientTls | None) -> ChannelCertificates | None:
    """Return credentials for an etcd endpoint; None if it uses no TLS. Raises InvalidInput, also for unneeded `tls`."""
    if is_secure(endpoint):
        certificates = ChannelCertificates(tls)
        certificates.get()  # Fail now if a file cannot be read.
        return certificates
    if tls is not None:
        raise InvalidInput(f"etcd endpoint {endpoint!r} is without TLS; write https://host:port", field="etcd")
    return None


def _address(part: str, endpoint: str) -> str:
    if part.startswith("unix:"):
        return part
    url = urlsplit(part if "//" in part else f"//{part}")
    try:
        port = url.port
    except ValueError:
        port = None
    wrong_scheme = url.scheme not in ("", "http", "https")
    if wrong_scheme or not url.hostname or port is None or url.path.strip("/") or url.query:
        raise InvalidInput(f"etcd endpoint {endpoint!r} is not of the form host:port, http://… or https://host:port")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{port}"
