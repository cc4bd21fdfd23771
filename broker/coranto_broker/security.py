"""Keys and certificates of a broker, out of its settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import grpc
import structlog

from coranto.auth import Keys
from coranto.client.config import ClientTls, is_loopback
from coranto.client.connection import channel_credentials, read_pem
from coranto.errors import InvalidInput
from coranto_broker.settings import BrokerSettings

_log = structlog.get_logger(__name__)


def keys_of(settings: BrokerSettings) -> Keys | None:
    """The keys that tokens are verified with; None when there are none, and so no tokens. Raises InvalidInput."""
    text = settings.auth_keys.get_secret_value()
    return Keys.parse(text) if text.strip() else None


def peer_tls(settings: BrokerSettings) -> ClientTls:
    """How to connect to peers. Where clients have to show certificates, ours is shown unless there is one for peers."""
    cert, key = settings.peer_cert, settings.peer_key
    if cert is None and key is None and settings.tls_client_ca is not None:
        cert, key = settings.tls_cert, settings.tls_key
    return ClientTls(settings.peer_ca, cert, key)


def etcd_tls(settings: BrokerSettings) -> ClientTls | None:
    """How to connect to etcd; None where nothing is said of it."""
    if settings.etcd_ca is None and settings.etcd_cert is None and settings.etcd_key is None:
        return None
    return ClientTls(settings.etcd_ca, settings.etcd_cert, settings.etcd_key)


def server_credentials(settings: BrokerSettings) -> grpc.ServerCredentials | None:
    """Credentials to serve with; None when there is no certificate, and so no TLS.

    Files are read again when they change, for the connections that are made from then on. Raises InvalidInput.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        if settings.tls_cert or settings.tls_key or settings.tls_client_ca:
            raise InvalidInput("serving with TLS takes both tls_cert and tls_key", field="settings")
        return None
    channel_credentials(peer_tls(settings))  # Find out now, rather than at the first call to a peer.
    files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(*files),
        # The types deny it, but None stands for "no change".
        cast(Callable[[], grpc.ServerCertificateConfiguration], _reloader(*files)),
        require_client_authentication=settings.tls_client_ca is not None,
    )


def check_exposure(settings: BrokerSettings, endpoint: str) -> None:
    """Raise InvalidInput where tokens would be sent to this broker in the clear, or where anybody may call it although
    nobody said so. `endpoint` is what it tells others.
    """
    keys = keys_of(settings)
    loopback = is_loopback(settings.host)
    if keys is None:
        if not loopback and settings.tls_client_ca is None:
            if not settings.serve_anyone_without_keys:
                raise InvalidInput(
                    f"whoever can reach {settings.host} could read and write everything: give the broker auth_keys or "
                    "tls_client_ca, or listen on 127.0.0.1. If everybody there is to be trusted, say so by "
                    "--serve-anyone-without-keys",
                    field="host",
                )
            _log.warning("whoever can reach this broker may read and write: it has no keys", host=settings.host)
        return
    if keys.accept_missing:
        _log.warning("requests without a token are accepted: remove AA== from the keys once every client sends one")
    if settings.tls_cert is None and not loopback:
        raise InvalidInput(
            f"with keys, clients would send tokens to {settings.host} in the clear: set tls_cert and tls_key, or "
            "listen on 127.0.0.1",
            field="host",
        )
    url = urlsplit(endpoint)
    if url.scheme == "http" and not is_loopback(url.hostname or ""):
        raise InvalidInput(f"with keys, {endpoint} would have tokens sent in the clear: use https", field="advertise")


def _configuration(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCertificateConfiguration:
    pair = read_pem(key), read_pem(cert)
    return grpc.ssl_server_certificate_configuration([pair], read_pem(client_ca) if client_ca is not None else None)


def _reloader(
    cert: Path, key: Path, client_ca: Path | None
) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """What gRPC asks at each handshake: a new configuration, or None while the last one is good."""
    files = [path for path in (cert, key, client_ca) if path is not None]

    def stamps() -> list[tuple[int, int]]:
        return [(status.st_mtime_ns, status.st_ino) for status in (path.stat() for path in files)]

    seen = stamps()

    def reload() -> grpc.ServerCertificateConfiguration | None:
        nonlocal seen
        try:
            now = stamps()
            if now == seen:
                return None
            configuration = _configuration(cert, key, client_ca)
        except (OSError, InvalidInput) as error:
            _log.warning("certificates cannot be read again; the last ones stay", error=str(error))
            return None
        seen = now
        _log.info("took up changed certificates", cert=str(cert))
        return configuration

    return reload
