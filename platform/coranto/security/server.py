"""Keys and certificates of servers (brokers, consumers), from their settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

import grpc
import structlog
from prometheus_client import CollectorRegistry, Gauge

from coranto.errors import InvalidInput
from coranto.extras import require
from coranto.security.certificates import Reloaded, channel_credentials, check_usable, load, read_pem
from coranto.security.tls import ClientTls, is_loopback
from coranto.security.tokens import Keys

if TYPE_CHECKING:
    from coranto.security.oidc.provider import Provider

_log = structlog.get_logger(__name__)


class SecretText(Protocol):
    """Text with a hidden representation, such as pydantic's."""

    def get_secret_value(self) -> str: ...


class ServerSettings(Protocol):
    """The security settings of a server. Files are PEM."""

    @property
    def host(self) -> str:
        """The address that the server listens on."""

    @property
    def auth_keys(self) -> SecretText:
        """The keys of tokens, in base64 separated by commas. Empty means no tokens."""

    @property
    def oidc(self) -> Path | None:
        """The file of the OpenID Connect provider whose tokens are accepted in addition to tokens by keys."""

    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_client_ca(self) -> Path | None:
        """The authorities for the certificates of clients and peers. None: they need no certificates."""

    @property
    def peer_cert(self) -> Path | None: ...
    @property
    def peer_key(self) -> Path | None: ...
    @property
    def peer_ca(self) -> Path | None: ...
    @property
    def etcd_ca(self) -> Path | None: ...
    @property
    def etcd_cert(self) -> Path | None: ...
    @property
    def etcd_key(self) -> Path | None: ...
    @property
    def serve_anyone_without_keys(self) -> bool:
        """True if every client that can reach the server is trusted."""


def keys_of(settings: ServerSettings) -> Keys | None:
    """Return the keys that verify tokens, or None if the server uses no tokens. Raises InvalidInput."""
    text = settings.auth_keys.get_secret_value()
    return Keys.parse(text) if text.strip() else None


def provider_of(settings: ServerSettings, registry: CollectorRegistry) -> Provider | None:
    """Return the provider whose tokens are accepted, not yet started; None if there is none.

    Always adds its metric to `registry`. Raises InvalidInput, and MissingExtra without the extra `oidc`.
    """
    age = Gauge(
        "coranto_oidc_keys_age_seconds",
        "Time since the keys of the OpenID Connect provider were fetched; 0 without a provider.",
        registry=registry,
    )
    if settings.oidc is None:
        return None
    if keys_of(settings) is None:
        raise InvalidInput(
            "set auth_keys too: processes of a cluster sign their own tokens for each other", field="oidc"
        )
    require("oidc", "aiohttp", "cryptography")
    from coranto.security.oidc.grants import read_provider_file
    from coranto.security.oidc.provider import Provider

    provider = Provider(read_provider_file(settings.oidc))
    age.set_function(lambda: provider.age)
    return provider


def peer_tls(settings: ServerSettings) -> ClientTls:
    """Return the TLS settings for peers. If clients must show certificates, the server's own is the default here."""
    cert, key = settings.peer_cert, settings.peer_key
    if cert is None and key is None and settings.tls_client_ca is not None:
        cert, key = settings.tls_cert, settings.tls_key
    return ClientTls(settings.peer_ca, cert, key)


def etcd_tls(settings: ServerSettings) -> ClientTls | None:
    """Return the TLS settings for etcd; None when nothing is set."""
    if settings.etcd_ca is None and settings.etcd_cert is None and settings.etcd_key is None:
        return None
    return ClientTls(settings.etcd_ca, settings.etcd_cert, settings.etcd_key)


def server_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """Return the server's credentials; None when there is no certificate, and so no TLS.

    Changed files are read again, for new connections. Raises InvalidInput.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        if settings.tls_cert or settings.tls_key or settings.tls_client_ca:
            raise InvalidInput("serving with TLS needs both tls_cert and tls_key", field="settings")
        return None
    channel_credentials(peer_tls(settings))  # Fail now, not at the first call to a peer.
    files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    configurations = Reloaded(lambda: _configuration(*files), files)
    used = configurations.get()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        before, used = used, configurations.get()
        return used if used is not before else None

    return grpc.dynamic_ssl_server_credentials(
        used,
        # Despite the types, None is allowed and means "no change".
        cast(Callable[[], grpc.ServerCertificateConfiguration], changed),
        require_client_authentication=settings.tls_client_ca is not None,
    )


def server_contexts(settings: ServerSettings, protocol: str) -> Reloaded[ssl.SSLContext] | None:
    """Return the server's TLS contexts for a protocol other than gRPC. New connections use the current files.

    Returns None when there is no certificate, and so no TLS.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return Reloaded(lambda: _context(*files, protocol), files)


def server_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the server's TLS context for HTTP, like `server_credentials`."""
    contexts = server_contexts(settings, "http/1.1")
    if contexts is None:
        return None

    def take_up_changes(connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
        connection.context = contexts.get()

    asked = contexts.get()
    asked.sni_callback = take_up_changes
    return asked


def check_exposure(settings: ServerSettings, endpoint: str, *, harm: str) -> None:
    """Check that no tokens are sent in the clear, and that access without credentials is enabled explicitly.

    `endpoint` is the endpoint that the server advertises. `harm` names the actions open to any client, such as "change
    shards". Raises InvalidInput.
    """
    keys = keys_of(settings)
    loopback = is_loopback(settings.host)
    if keys is None:
        if not loopback and settings.tls_client_ca is None:
            if not settings.serve_anyone_without_keys:
                raise InvalidInput(
                    f"any client of {settings.host} could {harm}: set auth_keys or tls_client_ca, or listen on "
                    "127.0.0.1. If every client there is trusted, pass --serve-anyone-without-keys",
                    field="host",
                )
            _log.warning("security.anyone_may_call", host=settings.host, harm=harm)
        return
    if keys.accept_missing:
        _log.warning("security.missing_tokens_accepted", advice="remove AA== from auth_keys")
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
    check_usable(client_ca, cert, key)
    return grpc.ssl_server_certificate_configuration([pair], read_pem(client_ca) if client_ca is not None else None)


def _context(cert: Path, key: Path, client_ca: Path | None, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    load(context, client_ca, cert, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
