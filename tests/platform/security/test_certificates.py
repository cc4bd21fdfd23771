"""Certificates in files that change, or are unusable."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from coranto.errors import InvalidInput
from coranto.security.certificates import ChannelCertificates, Reloaded, channel_credentials
from coranto.security.server import server_context
from coranto_broker.settings import BrokerSettings
from tests.platform.security.files import Files, authority

# ------------------------------------------------------------------------------------------------------- the files


def test_credentials_are_kept_while_the_files_do_not_match(tmp_path: Path) -> None:
    clock = [0.0]
    issuer = authority()
    files, other = Files(tmp_path / "files"), Files(tmp_path / "other")
    files.issue(issuer, issuer)
    other.issue(issuer, issuer)
    certificates = ChannelCertificates(files.tls, lambda: clock[0])
    first = certificates.get()
    assert isinstance(first, grpc.ChannelCredentials)
    files.key.write_bytes(other.key.read_bytes())
    assert certificates.get() is first, "the files are checked at intervals"
    clock[0] += 1
    assert certificates.get() is first, "the key does not match the certificate"
    files.cert.unlink()
    clock[0] += 1
    assert certificates.get() is first
    files.cert.write_bytes(b"half a file")
    clock[0] += 1
    assert certificates.get() is first
    files.cert.write_bytes(other.cert.read_bytes())
    clock[0] += 1
    second = certificates.get()
    assert second is not first
    clock[0] += 1
    assert certificates.get() is second


def test_files_that_change_during_a_read_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    read: list[str] = []

    def make() -> str:
        read.append(path.read_text())
        if len(read) == 2:
            path.write_text("3 and more")  # After the file was checked and read.
        return read[-1]

    reloaded = Reloaded(make, [path, None])
    assert [reloaded.get(), reloaded.get()] == ["1", "1"]
    path.write_text("22")
    assert reloaded.get() == "22"
    assert reloaded.get() == "3 and more"
    assert read == ["1", "22", "3 and more"]


@pytest.mark.parametrize("broken", ["ca", "cert", "key"])
@pytest.mark.parametrize("how", ["missing", "nothing", "foreign", "locked"])
def test_unusable_files_are_reported_at_the_start(tmp_path: Path, broken: str, how: str) -> None:
    issuer = authority()
    files, other = Files(tmp_path / "files"), Files(tmp_path / "other")
    files.issue(issuer, issuer)
    other.issue(issuer, issuer)
    path: Path = getattr(files, broken)
    if how == "missing":
        path.unlink()
    elif how == "nothing":
        path.write_bytes(b"")
    elif how == "foreign":
        path.write_bytes(getattr(other, "cert" if broken == "key" else "key").read_bytes())
    else:
        text = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n"
        path.write_bytes(text)  # There is no password prompt on the terminal.
    with pytest.raises(InvalidInput) as refused:
        channel_credentials(files.tls)
    assert str(path.parent) in str(refused.value)
    settings = BrokerSettings(tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.ca)
    with pytest.raises(InvalidInput):
        server_context(settings)
