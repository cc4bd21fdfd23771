"""Certificates in PEM files, which are replaced from time to time while they are in use.

New connections are made with what the files hold then; those that stand stay. Files that do not belong together, as
while they are being replaced one after the other, are waited for: what was read last stays in use.
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

LOOK_SECONDS: Final = 1.0
"""How often files are looked at while calls are made."""

_log = structlog.get_logger(__name__)
T = TypeVar("T")
_Stamps = list[tuple[int, int] | None]


class Reloaded(Generic[T]):
    """What is made of files, and made anew once they have changed."""

    def __init__(self, make: Callable[[], T], files: Iterable[Path | None]) -> None:
        """Raises what `make` does. Later on, InvalidInput and OSError of it are logged, and what there is stays."""
        self._make = make
        self._files = [path for path in files if path is not None]
        self._seen = self._refused = self._stamps()  # Before they are read: what changes meanwhile has changed.
        self._current = make()

    def get(self) -> T:
        """What the files make now, or the last that they made: the same object until that changes."""
        now = self._stamps()
        if now not in (self._seen, self._refused):
            try:
                self._current = self._make()
            except (OSError, InvalidInput) as error:
                self._refused = now
                _log.warning("certificates cannot be read again; the last ones stay", error=str(error))
            else:
                self._seen = self._refused = now
                _log.info("took up changed certificates", files=[str(path) for path in self._files])
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
    """Credentials of channels with TLS, made of the files that a ClientTls names. They are read at the first use."""

    def __init__(self, tls: ClientTls | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._tls = tls or ClientTls()
        self._monotonic = monotonic
        self._look_at = 0.0
        self._reloaded: Reloaded[grpc.ChannelCredentials] | None = None
        self._current: grpc.ChannelCredentials

    def get(self) -> grpc.ChannelCredentials:
        """Credentials for a new channel: the same object until the files have changed, which is looked at now and then.

        Raises InvalidInput for files that cannot be read, at the first use.
        """
        if self._reloaded is None:
            tls = self._tls
            self._reloaded = Reloaded(lambda: channel_credentials(tls), (tls.ca, tls.cert, tls.key))
            self._look_at = 0.0
        now = self._monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._current = self._reloaded.get()
        return self._current


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials of a channel with TLS. Raises InvalidInput for files that cannot be used."""
    ca, key, cert = (read_pem(path) if path is not None else None for path in (tls.ca, tls.key, tls.cert))
    check_usable(tls.ca, tls.cert, tls.key)
    return grpc.ssl_channel_credentials(ca, key, cert)


def check_usable(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Raises InvalidInput for authorities that are none, and for a certificate and a key that are not each other's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # How good they are is for those to judge who are shown them.
    load(context, ca, cert, key)


def load(context: ssl.SSLContext, ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Have a context show a certificate, if there is one, and trust authorities. Raises InvalidInput."""
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password="")  # Without, a key that has one is asked for on the terminal.
        if ca is not None:
            context.load_verify_locations(ca)
    except ssl.SSLError as error:
        which = " and ".join(str(path) for path in (cert, key, ca) if path is not None)
        raise InvalidInput(f"{which} cannot be used: {error.reason or error}", field="TLS") from None
    except OSError as error:
        raise InvalidInput(f"{error.filename or cert or ca} cannot be read: {error.strerror}", field="TLS") from None


def read_pem(path: Path) -> bytes:
    """A PEM file's content. Raises InvalidInput."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="TLS") from error
    if b"-----BEGIN " not in content:
        raise InvalidInput(f"{path} is not a PEM file", field="TLS")
    return content
