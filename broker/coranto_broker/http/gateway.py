"""The HTTP gateway: journals for clients without gRPC.

A GET reads, a HEAD returns the offset where a read would begin, a PUT appends its body (`coranto_broker.http.requests`
documents the arguments). Addresses, headers and statuses are as in Gazette's gateway, with some additions. The gateway
calls the handlers of the RPCs Read and Append, with their authorization, routing and flow control.

If an answer fails after its headers were sent, the connection is closed without completing the HTTP body, so that
clients detect the truncation. An answer of open length ends with the read: at the head of the journal or, with `block`,
only when the broker ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import structlog
from aiohttp import web

from coranto.errors import CorantoError, InvalidInput
from coranto.member.call_errors import public_text
from coranto.member.hosts import local_only, trusts_the_machine
from coranto.security.admission import caller_of
from coranto.security.tokens import HEADER, Claims
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers import append, read
from coranto_broker.handlers.refusals import is_hidden
from coranto_broker.http.answers import AppendBody, ReadAnswer, append_answer, refusal
from coranto_broker.http.requests import append_request, journal_of, read_request
from coranto_broker.http.statuses import http_status

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

METHODS: Final = {"GET": "Read", "HEAD": "Read", "PUT": "Append"}
"""The RPC that serves each method. Callers need the same authorization as for that RPC."""

_log = structlog.get_logger(__name__)


class CutOff(ConnectionError):
    """Raised to close a connection whose answer cannot be completed."""


class _Caller:
    """The authorization headers of a request, in the form of gRPC's metadata."""

    def __init__(self, http: web.Request) -> None:
        self._values = http.headers.getall("Authorization", [])

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(HEADER, value) for value in self._values]


def application(broker: Broker) -> web.Application:
    """Return the gateway application of a broker."""
    gateway = _Gateway(broker)
    settings = broker.settings
    result = web.Application(middlewares=[local_only(settings.advertise)] if trusts_the_machine(settings) else ())
    result.router.add_route("*", "/{journal:.*}", gateway.serve)
    return result


def _caller_of(http: web.Request, claims: Claims) -> str:
    """Return the caller of a request. Its address has gRPC's form, so that calls over HTTP and gRPC count together."""
    return caller_of(claims, f"ipv4:{http.remote}:0")


class _Gateway:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._actions: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "GET": self._read,
            "HEAD": self._read,
            "PUT": self._append,
        }

    async def serve(self, http: web.Request) -> web.StreamResponse:
        """Serve any request. Raises CutOff if its connection must be closed immediately."""
        action = self._actions.get(http.method)
        if action is None:
            answer: web.StreamResponse = web.Response(
                status=405, text="a journal takes GET, HEAD and PUT\n", headers={"Allow": "GET, HEAD, PUT"}
            )
        else:
            try:
                answer = await action(http)
            except CutOff:
                raise
            except (CorantoError, OSError) as error:
                answer = self._failed(http, error)
        self._broker.metrics.http_requests.labels(
            http.method if action is not None else "other", str(answer.status)
        ).inc()
        return answer

    async def _read(self, http: web.Request) -> web.StreamResponse:
        answer: ReadAnswer | None = None
        try:
            async with self._broker.authorizer.admitted(METHODS[http.method], _Caller(http)) as claims:
                ranges = http.headers.getall("Range", [])
                try:
                    request = read_request(http.raw_path, ranges, metadata_only=http.method == "HEAD")
                except InvalidInput:
                    if is_hidden(self._broker, journal_of(http.raw_path), claims):
                        return refusal(pb.JOURNAL_NOT_FOUND, {})
                    raise
                answer = ReadAnswer(http, request)
                await answer.run(read.serve(self._broker, request, answer, claims, _caller_of(http, claims)))
        except (CorantoError, OSError) as error:
            if answer is None or answer.response is None or not answer.response.prepared:
                raise
            _log.info("http.answer_cut_off", method=http.method, path=http.path, client=http.remote, error=str(error))
            raise CutOff from error
        assert answer.response is not None
        return answer.response

    async def _append(self, http: web.Request) -> web.StreamResponse:
        async with self._broker.authorizer.admitted(METHODS[http.method], _Caller(http)) as claims:
            try:
                request = append_request(http.raw_path)
            except InvalidInput:
                if is_hidden(self._broker, journal_of(http.raw_path), claims):
                    return refusal(pb.JOURNAL_NOT_FOUND, {})
                raise
            body = AppendBody(http, request, self._broker.settings.chunk_bytes)
            caller = _caller_of(http, claims) if self._broker.quotas.apply_to(claims) else ""
            await self._broker.quotas.admit_appends(caller)
            return append_answer(await append.serve(self._broker, body, claims, caller))

    def _failed(self, http: web.Request, error: CorantoError | OSError) -> web.Response:
        """Return the answer to a request that failed before its headers were sent."""
        status = http_status(error)
        level = logging.INFO if status == 400 else logging.WARNING
        _log.log(
            level,
            "http.request_failed",
            method=http.method,
            path=http.path,
            client=http.remote,
            status=status,
            error=str(error),
        )
        headers = (
            {"WWW-Authenticate": "Bearer"} if status == 401 else {"Retry-After": "1"} if status in (429, 503) else {}
        )
        return web.Response(status=status, text=f"{public_text(error)}\n", headers=headers)
