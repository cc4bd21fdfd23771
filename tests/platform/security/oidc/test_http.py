"""Requests to a provider that is slow, redirects, or returns large or wrong answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trustme

from coranto.errors import InvalidInput, Unavailable
from coranto.security.oidc import http
from coranto.security.oidc.http import MAX_BYTES, discover, json_of, request, require_private_url
from tests.servers.oidc import OidcServer, oidc_server


async def test_the_discovery_document_is_read(oidc: OidcServer) -> None:
    found = await discover(oidc.issuer)
    assert found.endpoint("jwks_uri") == f"{oidc.issuer}/keys"
    assert oidc.requests == {"openid-configuration": 1}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"issuer": "https://other.example"}, "names the issuer 'https://other.example'"),
        ({"issuer": None}, "names the issuer 'None'"),
        ({"jwks_uri": None}, "not an https"),
        ({"jwks_uri": "http://10.0.0.1/keys"}, "not an https"),
        ({"jwks_uri": "file:///etc/passwd"}, "not an https"),
        ({"jwks_uri": ["https://a"]}, "not an https"),
        ({"jwks_uri": "https://[::1/keys"}, "not an https"),
    ],
)
async def test_a_wrong_discovery_document_is_refused(oidc: OidcServer, document: dict[str, Any], problem: str) -> None:
    oidc.discovery = document
    with pytest.raises(Unavailable, match=problem):
        (await discover(oidc.issuer)).endpoint("jwks_uri")


async def test_an_answer_of_ten_megabytes_is_cut_off(oidc: OidcServer) -> None:
    oidc.jwks = b'{"keys": [' + b" " * (10 << 20) + b"]}"
    with pytest.raises(Unavailable, match=f"more than {MAX_BYTES} bytes"):
        await request(f"{oidc.issuer}/keys")


async def test_a_slow_answer_ends_at_the_time_limit(oidc: OidcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TIMEOUT_SECONDS", 0.3)
    oidc.drips = True
    with pytest.raises(Unavailable, match=r"did not answer within 0\.3 seconds"):
        await request(f"{oidc.issuer}/keys")


async def test_redirects_are_not_followed(oidc: OidcServer) -> None:
    oidc.status = 302
    response = await request(f"{oidc.issuer}/keys")
    assert response.status == 302
    assert oidc.requests == {"keys": 1}


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"{", b"[" * 100_000, b'"text"'])
async def test_answers_other_than_json_objects_are_refused(oidc: OidcServer, body: bytes) -> None:
    oidc.jwks = body
    url = f"{oidc.issuer}/keys"
    with pytest.raises(Unavailable, match=url):
        json_of(url, await request(url))


async def test_failures_are_reported(oidc: OidcServer) -> None:
    oidc.status = 500
    with pytest.raises(Unavailable, match="status 500"):
        await discover(oidc.issuer)
    oidc.stop()
    with pytest.raises(Unavailable, match=f"127.0.0.1:{oidc.port}"):
        await discover(oidc.issuer)


async def test_a_proxy_of_the_environment_is_not_used_for_this_machine(
    oidc: OidcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert await discover(oidc.issuer)


PROGRAM = """
import asyncio, sys
from coranto.security.oidc.http import discover
try:
    print(asyncio.run(discover(sys.argv[1])).issuer)
except Exception as error:
    print(error)
"""


def discovered(issuer: str, **variables: str) -> str:
    """Return the output of a process that requests the discovery document in this environment."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", PROGRAM, issuer]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_tls_is_verified_with_the_authorities_of_the_environment(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with oidc_server(context) as server:
        assert discovered(server.issuer, SSL_CERT_FILE=str(tmp_path / "ca.pem")) == f"{server.issuer}\n"
        assert "certificate verify failed" in discovered(server.issuer)


def test_a_proxy_of_the_environment_gets_no_password_of_a_netrc_file(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine login.example login ada password from-netrc\n")
    netrc.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        received: list[bytes] = []

        def serve() -> None:
            connection, _ = proxy.accept()
            with connection:
                received.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        found = discovered(
            "https://login.example",
            HTTPS_PROXY=f"http://127.0.0.1:{proxy.getsockname()[1]}",
            NO_PROXY="",
            NETRC=str(netrc),
        )
        thread.join()
    assert "cannot be read" in found
    assert received[0].startswith(b"CONNECT login.example:443 ")
    assert b"uthorization" not in received[0]


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"\x16\x03\x01 TLS",
        b"HTTP/1.1 999999 ?\r\n\r\n",
        HEAD + b"A: " + b"x" * (1 << 20),
        HEAD + b"A: b\r\n" * 100_000,
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 500\r\n\r\n{}",
        HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\n{}",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    ],
)
async def test_answers_that_are_not_http_are_refused(answer: bytes) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(answer)
            await writer.drain()
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys"
        with pytest.raises(Unavailable, match=url):
            json_of(url, await request(url))


@pytest.mark.parametrize("url", ["https://login.example/a", "http://127.0.0.1:1", "http://localhost", "http://[::1]:1"])
def test_private_urls_are_accepted(url: str) -> None:
    require_private_url(url, "issuer")


@pytest.mark.parametrize(
    "url", ["", "login.example", "http://login.example", "http://127.0.0.1.example", "https://", "ftp://127.0.0.1"]
)
def test_urls_that_others_could_read_or_answer_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="not an https"):
        require_private_url(url, "issuer")
