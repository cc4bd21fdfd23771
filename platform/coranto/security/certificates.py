"""Certificates in PEM files, which operators replace while they are in use.

New connections use the current content of the files. Established connections stay. While files do not match, because
they are being replaced one after the other, the last usable content stays in use.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Generic, TypeVar

import grpc
import structlog

from coranto.errors import InvalidInput
from coranto.security.tls import ClientTls

CHECK_SECONDS: Final = 1.0
"""Interval in seconds between checks of files, during calls."""

_log = structlog.get_logger(__name__)
T = TypeVar("T")
_Stamps = list[tuple[int, int] | None]


class Reloaded(Generic[T]):
    """A value that is built from files, and rebuilt when they change."""

    def __init__(self, make: Callable[[], T], files: Iterable[Path | None]) -> None:
        """Build the first value. Raises the errors of `make`.

        If a later rebuild raises InvalidInput or OSError, the error is logged, and the current value is kept.
        """
        self._make = make
        self._files = [path for path in files if path is not None]
        self._seen = self._refused = self._stamps()  # Before reading, so that a concurrent change is noticed.
        self._current = make()

    def get(self) -> T:
        """Return the value of the current files, or else the last good one. It is the same object until it changes."""
        now = self._stamps()
        if now not in (self._seen, self._refused):
            try:
                self._current = self._make()
            except (OSError, InvalidInput) as error:
                self._refused = now
                _log.warning("certificates.reload_failed", error=str(error))
            else:
                self._seen = self._refused = now
                _log.info("certificates.reloaded", files=[str(path) for path in self._files])
        return self._current

    def _stamps(self) -> _Stamps:
        return [_stamp(path) for path in self._files]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


class ChannelCertificates:
    """Credentials for TLS channels, built from the files of a ClientTls. The files are read at the first use."""

    def __init__(self, tls: ClientTls | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._tls = tls or ClientTls()
        self._monotonic = monotonic
        self._check_at = 0.0
        self._reloaded: Reloaded[grpc.ChannelCredentials] | None = None
        self._current: grpc.ChannelCredentials

    def get(self) -> grpc.ChannelCredentials:
        """Return credentials for a new channel: the same object until the files change.

        The files are checked every CHECK_SECONDS. At the first use, raises InvalidInput for files that cannot be read.
        """
        if self._reloaded is None:
            tls = self._tls
            self._reloaded = Reloaded(lambda: channel_credentials(tls), (tls.ca, tls.cert, tls.key))
            self._check_at = 0.0
        now = self._monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            self._current = self._reloaded.get()
        return self._current


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Return credentials for a TLS channel. Raises InvalidInput for files that cannot be used."""
    ca, key, cert = (read_pem(path) if path is not None else None for path in (tls.ca, tls.key, tls.cert))
    check_usable(tls.ca, tls.cert, tls.key)
    return grpc.ssl_channel_credentials(ca, key, cert)


def client_context(tls: ClientTls, protocol: str) -> ssl.SSLContext:
    """Return a client's TLS context for a protocol other than gRPC. Raises InvalidInput like `channel_credentials`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # It verifies the server's certificate and name.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    if tls.ca is None:
        context.load_default_certs()
    load(context, tls.ca, tls.cert, tls.key)
    return context


def check_usable(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Check that `ca` holds authorities, and that a certificate and its key match. Raises InvalidInput."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # The peer checks the strength of a certificate.
    load(context, ca, cert, key)


def load(context: ssl.SSLContext, ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Load a certificate and trusted authorities, if given, into a context. Raises InvalidInput."""
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password="")  # Otherwise OpenSSL prompts for a key's password.
        if ca is not None:
            context.load_verify_locations(ca)
    except ssl.SSLError as error:
        which = " and ".join(str(path) for path in (cert, key, ca) if path is not None)
        raise InvalidInput(f"{which} cannot be used: {error.reason or error}", field="TLS") from None
    except OSError as error:
        raise InvalidInput(f"{error.filename or cert or ca} cannot be read: {error.strerror}", field="TLS") from None


def read_pem(path: Path) -> bytes:
    """Return a PEM file's content. Raises InvalidInput."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="TLS") from error
    if b"-----BEGIN " not in content:
        raise InvalidInput(f"{path} is not a PEM file; it must hold text between BEGIN and END lines", field="TLS")
    return content
