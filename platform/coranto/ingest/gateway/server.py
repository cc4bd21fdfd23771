"""The HTTP server of webhooks: it accepts requests, and answers in JSON.

Each request has a maximum size, and timeouts for receiving and committing it. All bodies share a memory limit, and a
quarter of it is reserved for small bodies. A sender may hold three quarters of the connections. So the server refuses
senders that flood, stall or send too much, and keeps serving others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import structlog
from aiohttp import web
from multidict import CIMultiDictProxy

from coranto.errors import ClusterError, InvalidInput
from coranto.ingest.gateway.queue import GatewayEnded, KeyUsed, Request, WindowFull
from coranto.ingest.rows import RowEncoder, dead_letter_of, encode_rows
from coranto.ingest.source import Poison
from coranto.ingest.webhook.bodies import JSON, LINES, field_of, has_known_type, parts_of, rows_of
from coranto.ingest.webhook.keys import ANY_BODY, KEY_BYTES, digest_of, key_of
from coranto.ingest.webhook.options import WebhookOptions
from coranto.ingest.webhook.signatures import verify

if TYPE_CHECKING:
    from coranto.ingest.gateway.service import WebhookIngest

_KEY: Final = "Idempotency-Key"
_MAX_KEY: Final = 255
_SMALL_BYTES: Final = 64 << 10
"""The maximum size of a small body. Small bodies may use all of the memory, larger ones three quarters of it."""
_DRAIN_SECONDS: Final = 1.0
"""The time to receive the rest of a refused request, so that its sender reads the answer."""
_AGAIN: Final = "1"
_Answer: TypeAlias = dict[str, object]

_log = structlog.get_logger(__name__)
_OPTIONS: Final[Mapping[str, Any]] = {
    "access_log": None,
    "auto_decompress": False,
    "keepalive_timeout": 75.0,
    "lingering_time": _DRAIN_SECONDS,
}


class Refused(Exception):
    """The error that answers a request."""

    def __init__(self, status: int, error: str, *, closes: bool = False, **headers: str) -> None:
        super().__init__(error)
        self.status = status
        self.closes = closes
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if status in (429, 503):
            self.headers["Retry-After"] = _AGAIN


class WebhookServer:
    """The server of one gateway, from `start` to `stop`."""

    def __init__(self, ingest: WebhookIngest) -> None:
        self._ingest = ingest
        self._options = ingest.options
        self._scheme = ingest.options.scheme
        self._connections = Counter[str]()  # By sender.
        self._serving = 0
        self._encoding = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._listening: asyncio.Server | None = None
        self._server = web.Server(self._serve, handler_cancellation=True, **_OPTIONS)

    async def start(self) -> None:
        """Listen. Raises ClusterError if the address is not available, and InvalidInput for missing secrets."""
        options = self._options
        if self._scheme is not None:
            options.keys()
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                self._connection, options.host, options.port, reuse_address=True
            )
        except OSError as error:
            raise ClusterError(
                f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; free the port, or choose "
                "another as `listen`"
            ) from error
        port = self._listening.sockets[0].getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        self._ingest.url = f"http://{host}:{port}{options.path}"

    async def stop(self) -> None:
        """Accept no more connections, and wait until all received requests are answered."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
            # aiohttp's own shutdown drops requests that have arrived in part.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.receive_seconds + self._options.commit_seconds):
                    await self._idle.wait()
            self._server.pre_shutdown()
            await self._server.shutdown(_DRAIN_SECONDS)

    def _connection(self) -> asyncio.BaseProtocol:
        return _Connection(self._server, self._options, self._connections)

    # -- Requests ------------------------------------------------------------------------------------------------------

    async def _serve(self, http: web.BaseRequest) -> web.Response:
        assert isinstance(http.protocol, _Connection)
        http.protocol.is_used = True
        headers: Mapping[str, str] = {}
        closes = False
        self._serving += 1
        self._idle.clear()
        try:
            status, answer = await self._answer(http)
        except Refused as error:
            status, answer, headers, closes = error.status, {"error": str(error)}, error.headers, error.closes
        finally:
            self._serving -= 1
            if not self._serving:
                self._idle.set()
        if http.method == "POST":
            self._ingest.webhooks.requests.labels(self._ingest.spec.name, str(status)).inc()
        response = web.json_response(answer, status=status, headers=headers)
        if closes or self._listening is None:
            response.force_close()
        return response

    async def _answer(self, http: web.BaseRequest) -> tuple[int, _Answer]:
        ingest = self._ingest
        if http.path == "/live":
            return 200, {"alive": True}
        if http.path == "/ready":
            well = ingest.is_ready and self._listening is not None
            return 200 if well else 503, {"ready": well}
        if http.path != self._options.path:
            raise Refused(404, f"there is nothing at this path; webhooks go to {self._options.path}", closes=True)
        if http.method != "POST":
            raise Refused(405, "webhooks are requests with POST", closes=True, Allow="POST")
        if not has_known_type(http.content_type):
            found = http.content_type[:100]
            raise Refused(415, f"the type of the body is {found}; send {JSON} or {LINES[0]}", closes=True)
        if http.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(415, "the body is compressed; send it as it is", closes=True)
        body = bytearray()
        try:
            await self._receive(http, body)
            return await self._take(http, bytes(body), len(body))
        finally:
            ingest.release(len(body))

    async def _receive(self, http: web.BaseRequest, body: bytearray) -> None:
        options, ingest = self._options, self._ingest
        if (http.content_length or 0) > options.body_bytes:
            self._too_large()
        try:
            async with asyncio.timeout(options.receive_seconds):
                if http.headers.get("Expect", "").lower() == "100-continue":
                    await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    http.writer.output_size = 0
                async for chunk in http.content.iter_any():
                    is_small = len(body) + len(chunk) <= _SMALL_BYTES
                    max_held = options.memory_bytes if is_small else options.memory_bytes * 3 // 4
                    if ingest.held_bytes + len(chunk) > max_held:
                        raise Refused(429, "the gateway has no room for the request; send it again", closes=True)
                    body += chunk
                    ingest.hold(len(chunk))
                    if len(body) > options.body_bytes:
                        self._too_large()
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {options.receive_seconds:g} s", closes=True) from None

    def _too_large(self) -> NoReturn:
        limit = self._options.body_bytes
        raise Refused(413, f"the body is too large; it may have {limit} bytes (`body`)", closes=True)

    async def _take(self, http: web.BaseRequest, body: bytes, size: int) -> tuple[int, _Answer]:
        if self._scheme is not None:
            try:
                secrets = self._options.keys()
            except InvalidInput as error:
                _log.warning("ingest.secrets_missing", ingest=self._ingest.spec.name, error=error.message)
                raise Refused(503, "the gateway has no secret to verify signatures with") from None
            try:
                verify(self._scheme, http.headers, body, secrets, time.time())
            except InvalidInput as error:
                raise Refused(401, error.message) from None
        try:
            async with asyncio.timeout(self._options.commit_seconds):
                encoder = await self._ingest.encoder()
                if size > _SMALL_BYTES:
                    # One at a time: concurrent computations in threads only slow each other down.
                    async with self._encoding:
                        made = await asyncio.to_thread(self._encode, http, body, encoder)
                else:
                    made = self._encode(http, body, encoder)
                return await self._commit(*made)
        except TimeoutError:
            raise Refused(
                503,
                f"the request was not committed within {self._options.commit_seconds:g} s, and may be committed later: "
                f"send it again, with the same {_KEY}",
            ) from None

    def _encode(
        self, http: web.BaseRequest, body: bytes, encoder: RowEncoder
    ) -> tuple[Request | None, dict[str, object]]:
        """Return the request with its encoded events (None for a challenge), and its answer. Raises Refused."""
        spec = self._ingest.spec
        key = _key_in(http.headers)
        digest = digest_of(body) if key else ANY_BODY
        scheme = self._scheme
        if not key and scheme is not None:
            key = http.headers.get(scheme.delivery_header, "") if scheme.delivery_header else ""
        try:
            parts = parts_of(body, http.content_type)
        except InvalidInput as error:
            raise Refused(400, error.message) from None
        if scheme is not None and scheme.delivery_field:
            challenge = field_of(parts, "challenge")
            if challenge and field_of(parts, "type") == "url_verification":
                return None, {"challenge": challenge}
            if not key:
                key = field_of(parts, scheme.delivery_field)
        id = key_of(spec.name, key) if key else os.urandom(KEY_BYTES)
        name = id.hex()
        keys, events, poison = encode_rows(
            encoder,
            rows_of(parts, name, b'"request":"%b","item":' % name.encode()),
            lambda row, number, error: Poison(parts.place(number), error.message, None, row.text),
            keeps_poison=spec.keeps_poison,
        )
        if poison and not spec.keeps_poison:
            raise Refused(400, f"{poison[0].place} {poison[0].problem}")
        dead_letters = [dead_letter_of(spec.name, f"request {name}", row) for row in poison]
        answer: _Answer = {"request": name, "events": len(events)}
        if dead_letters:
            answer["dead_letters"] = len(dead_letters)
        size = sum(map(len, events)) + sum(len(str(each.get("value", ""))) for each in dead_letters)
        return Request(id, digest if key else None, keys, events, dead_letters, size), answer

    async def _commit(self, request: Request | None, answer: _Answer) -> tuple[int, _Answer]:
        if request is None or not (request.events or request.dead_letters):
            return 200, answer
        self._ingest.hold(request.size)
        try:
            done = await self._ingest.commit(request)
        except KeyUsed:
            raise Refused(409, "another request with another body had this key; give each its own key") from None
        except WindowFull:
            raise Refused(
                429,
                f"{self._options.window_keys} keys are remembered, and there is no room for more: send it again later, "
                "or ask for a larger `keys` of `window`",
            ) from None
        except GatewayEnded:
            raise Refused(503, f"the gateway has ended: send the request again, with the same {_KEY}") from None
        return 200, {**answer, "duplicate": done.is_duplicate}


def _key_in(headers: CIMultiDictProxy[str]) -> str:
    """Return the key of a request; empty if it has none. Raises Refused."""
    keys = set(headers.getall(_KEY, []))
    key = keys.pop() if keys else ""
    if keys:
        raise Refused(400, f"the request has several headers {_KEY}")
    if len(key) > _MAX_KEY:
        raise Refused(400, f"the {_KEY} has {len(key)} characters; it may have {_MAX_KEY}")
    return key


def sender_of(address: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address, since a sender may use its whole network."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Address(int(found) >> 64 << 64))


class _Connection(web.RequestHandler):
    """A connection, which is closed if its first request is late. Later requests have aiohttp's keep-alive timeout.

    `counts` has the number of connections by sender. A sender may have three quarters of all connections, so that it
    cannot lock others out.
    """

    def __init__(self, server: web.Server, options: WebhookOptions, counts: Counter[str]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_OPTIONS)
        self.is_used = False
        self._limits = options
        self._counts = counts
        self._sender = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        most, sender = self._limits.requests, sender_of(transport.get_extra_info("peername")[0])
        if self._counts.total() >= most or self._counts[sender] >= most - most // 4:
            full = _Full()
            transport.set_protocol(full)
            full.connection_made(transport)
            return
        self._sender = sender
        self._counts[sender] += 1
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(self._limits.receive_seconds, self._close_unused)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._counts[self._sender] -= 1
        if not self._counts[self._sender]:
            del self._counts[self._sender]
        super().connection_lost(exc)

    def _close_unused(self) -> None:
        if not self.is_used and self.transport is not None:
            self.transport.close()


class _Full(asyncio.Protocol):
    """A connection beyond the limit. It is answered with status 429, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = b'{"error": "the gateway has no room for more connections; try again later"}'
        transport.write(
            b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: %b\r\nConnection: close\r\nContent-Type: %b\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (_AGAIN.encode(), JSON.encode(), len(body), body)
        )
        transport.close()
