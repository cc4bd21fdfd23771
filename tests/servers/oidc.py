"""An OpenID Connect provider for tests: real keys, real HTTP, and faults on demand."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

AUDIENCE: Final = "coranto"
CLIENT, SECRET = "etl", "p&ss=word of etl"
PERSON: Final = "device"
DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"


_numbers = itertools.count()


@functools.cache
def _rsa_key(number: int) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def rsa_key() -> rsa.RSAPrivateKey:
    """Return a key that differs from the last seven. Creating one takes long."""
    return _rsa_key(next(_numbers) % 8)


def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def public_jwk(key: Any, key_id: str, **fields: Any) -> dict[str, Any]:
    """Return a key's public part as a JWK."""
    if isinstance(key, rsa.RSAPrivateKey):
        content = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        content = jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        content = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    content.pop("key_ops", None)
    return {**content, "kid": key_id, "use": "sig", **fields}


class OidcServer:
    """A provider on a port of this machine. Its keys, its answers and its faults can be changed at any time."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.keys: dict[str, Any] = {"rsa-1": rsa_key()}
        """The private keys by id. The public part of each is published."""
        self.key_fields: dict[str, Any] = {}
        self.jwks: bytes | None = None
        """The answer for keys, unless it is made of `keys`."""
        self.discovery: dict[str, Any] = {}
        """Values that override the discovery document."""
        self.status = 200
        self.drips = False
        """True to send one byte at a time, without an end."""
        self.requests: Counter[str] = Counter()
        self.forms: list[dict[str, str]] = []
        self.token_seconds: float = 300
        self.token_claims: dict[str, Any] = {"groups": ["shop"]}
        self.refusal = ""
        """The error of the token endpoint, if it gives no tokens."""
        self.approved = False
        """True once the user has entered the code."""
        self.polls: list[str] = []
        """Errors of the next polls for a login, before `approved` counts."""
        self.refresh = ""
        self.given = 0
        """The number of tokens that the token endpoint has given."""
        self._stopping = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def issuer(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}/realm"

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._stopping.clear()
        provider = self

        class Handler(_Handler):
            server_of = provider

        ThreadingHTTPServer.allow_reuse_address = True
        server = self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        server.daemon_threads = True
        if self._tls is not None:
            server.socket = self._tls.wrap_socket(server.socket, server_side=True)
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def token(
        self, key_id: str = "rsa-1", algorithm: str = "RS256", headers: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a token. Claims that are None are omitted."""
        now = time.time()
        content = {"iss": self.issuer, "aud": AUDIENCE, "sub": "ada", "iat": int(now), "exp": int(now) + 300} | claims
        content = {name: value for name, value in content.items() if value is not None}
        return jwt.encode(content, self.keys[key_id], algorithm, {"kid": key_id, **(headers or {})})

    def answer(self, path: str, form: dict[str, str], authorization: str) -> tuple[int, bytes]:
        """Return the status and body for a request."""
        if path == "/realm/.well-known/openid-configuration":
            document = {
                "issuer": self.issuer,
                "jwks_uri": f"{self.issuer}/keys",
                "token_endpoint": f"{self.issuer}/token",
                "device_authorization_endpoint": f"{self.issuer}/device",
            } | self.discovery
            return 200, json.dumps({name: value for name, value in document.items() if value is not None}).encode()
        if path == "/realm/keys":
            keys = [public_jwk(key, key_id, **self.key_fields) for key_id, key in self.keys.items()]
            return 200, self.jwks if self.jwks is not None else json.dumps({"keys": keys}).encode()
        if path == "/realm/device":
            answer = {"device_code": "dev-1", "user_code": "WDJB-MJHT", "verification_uri": f"{self.issuer}/enter"}
            return 200, json.dumps(answer | {"expires_in": 60, "interval": 0.01}).encode()
        if path == "/realm/token":
            return self._token(form, authorization)
        return 404, b"{}"

    def _token(self, form: dict[str, str], authorization: str) -> tuple[int, bytes]:
        self.forms.append(form)
        error, kind = self.refusal, form.get("grant_type")
        if kind == "client_credentials":
            given = base64.b64decode(authorization.removeprefix("Basic ")).decode()
            client, _, secret = given.partition(":")
            if "client_secret" in form:
                client, secret = form["client_id"], form["client_secret"]
            if (unquote(client), unquote(secret)) != (CLIENT, SECRET):
                error = error or "invalid_client"
        elif kind == "refresh_token":
            if form.get("refresh_token") != self.refresh or form.get("client_id") != PERSON:
                error = error or "invalid_grant"
        elif kind == DEVICE_GRANT and form.get("device_code") == "dev-1" and form.get("client_id") == PERSON:
            if self.polls:
                error = error or self.polls.pop(0)
            elif not self.approved:
                error = error or "authorization_pending"
        else:
            error = error or "unsupported_grant_type"
        if error:
            return 400, json.dumps({"error": error, "error_description": "no \x1b[31mway"}).encode()
        key_id = next(iter(self.keys))
        subject = CLIENT if kind == "client_credentials" else "ada"
        self.given += 1
        claims = self.token_claims | {
            "sub": subject,
            "jti": str(self.given),
            "exp": int(time.time() + self.token_seconds),
        }
        answer: dict[str, Any] = {"access_token": self.token(key_id, **claims), "token_type": "Bearer"}
        answer["expires_in"] = self.token_seconds
        if kind != "client_credentials":
            self.refresh = answer["refresh_token"] = f"refresh-{self.given}"
        return 200, json.dumps(answer).encode()


@contextmanager
def oidc_server(tls: ssl.SSLContext | None = None) -> Iterator[OidcServer]:
    """Run a provider during the block."""
    server = OidcServer(tls)
    try:
        yield server
    finally:
        server.stop()


class _Handler(BaseHTTPRequestHandler):
    server_of: OidcServer

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        self._serve({name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()})

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _serve(self, form: dict[str, str]) -> None:
        provider = self.server_of
        provider.requests[self.path.rpartition("/")[2]] += 1
        status, body = provider.answer(self.path, form, self.headers.get("Authorization", ""))
        status = status if provider.status == 200 else provider.status
        try:
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"{provider.issuer}/elsewhere")
            self.send_header("Content-Type", "application/json")
            if provider.drips:
                self.end_headers()
                while not provider._stopping.wait(0.05):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # The client has left.
