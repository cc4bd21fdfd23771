"""The two sides of a handler that serves HTTP: what a read writes to, and what an append reads from.

Neither holds content: a read's chunk is on its way before the next is fetched, and of an append's body there is in
memory what the connection buffers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from email.utils import formatdate
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from google.protobuf import text_format

from coranto import labels
from coranto.errors import Unavailable
from coranto.fragments.fragment import Fragment, sum_from_wire
from coranto.wire import protocol_pb2 as pb
from coranto_broker.http.statuses import HINTS, STATUSES

MAX_OFFSET = (1 << 63) - 1


class _Enough(Exception):
    """Everything was written that the headers promised."""


class ReadAnswer:
    """The answer to a GET or HEAD. `write` is what the read's handler sends its messages to."""

    def __init__(self, http: web.Request, request: pb.ReadRequest) -> None:
        self._http = http
        self._request = request
        self._next = 0  # Offset of the next byte.
        self._stop = 0  # Where the content is to end; 0 when that is open.
        self.response: web.StreamResponse | None = None
        """Set once headers, or the whole of a refusal, are decided."""

    async def made_by(self, reading: Coroutine[Any, Any, None]) -> None:
        """Return when `reading`, which writes to this answer, is done or has written enough.

        Raises what it raises, and Unavailable when it has not written what the headers promised.
        """
        try:
            await reading
        except _Enough:
            return
        if self._next < self._stop:
            raise Unavailable(f"the read ended at offset {self._next}, before {self._stop}")

    async def write(self, message: pb.ReadResponse) -> None:
        """The next message of the read: metadata first, which decides the headers, then content between metadata."""
        if message.content:
            assert self.response is not None
            if message.offset != self._next:
                # Headers said what offset the content begins at; from there on it must be without a gap.
                raise Unavailable(f"the journal goes on at offset {message.offset}, after {self._next}")
            content = message.content
            if self._stop:
                content = content[: self._stop - self._next]
            self._next += len(content)
            if not self.response.prepared:  # Not before: what fails until now has a status of its own.
                await self.response.prepare(self._http)
            await self.response.write(content)
            if self._next == self._stop:
                raise _Enough  # There may be more by now than there was when the headers were sent.
        elif self.response is None:
            self.response = self._begin(message)
        # Metadata of a further fragment says nothing new, and of a head that was reached, that the content ends.

    def _begin(self, metadata: pb.ReadResponse) -> web.StreamResponse:
        headers = read_headers(metadata)
        if metadata.status != pb.OK:
            return refusal(metadata.status, headers)
        wanted = self._request.end_offset
        if wanted and metadata.offset >= wanted:
            text = f"there is nothing left of the range: the journal goes on at offset {metadata.offset}"
            return web.Response(status=416, text=f"{text}\n", headers=headers)
        self._next = metadata.offset
        response = web.StreamResponse(status=206, headers=headers)
        response.content_type = "application/octet-stream"
        if wanted:
            stop = wanted if self._request.block else min(wanted, metadata.write_head)
            response.headers["Content-Range"] = f"bytes {metadata.offset}-{stop - 1}/*"
            response.content_length = stop - metadata.offset
            self._stop = 0 if self._request.metadata_only else stop
        else:
            response.headers["Content-Range"] = f"bytes {metadata.offset}-{MAX_OFFSET}/{MAX_OFFSET}"
        return response


class AppendBody:
    """The body of a PUT as the messages of an append. `read` is what the append's handler takes them from."""

    def __init__(self, http: web.Request, first: pb.AppendRequest, chunk_bytes: int) -> None:
        self._messages = self._make(http, first, chunk_bytes)

    async def read(self) -> pb.AppendRequest | None:
        """The next message; None when there is none. A body that is cut off raises, and so never commits."""
        return await anext(self._messages, None)

    @staticmethod
    async def _make(http: web.Request, first: pb.AppendRequest, chunk_bytes: int) -> AsyncIterator[pb.AppendRequest]:
        yield first
        while chunk := await http.content.read(chunk_bytes):
            yield pb.AppendRequest(content=chunk)
        yield pb.AppendRequest()  # The body was whole: commit.


def read_headers(metadata: pb.ReadResponse) -> dict[str, str]:
    """What a read's first metadata tells, in headers named as Gazette's gateway names them."""
    headers = _route_headers(metadata.header)
    if metadata.HasField("fragment"):
        fragment = Fragment.from_wire(metadata.fragment)
        headers["X-Fragment-Name"] = fragment.content_name
        if fragment.mod_time:
            headers["X-Fragment-Last-Modified"] = formatdate(fragment.mod_time, usegmt=True)
        if metadata.fragment_url:
            headers["X-Fragment-Location"] = metadata.fragment_url
    if metadata.write_head:
        headers["X-Write-Head"] = str(metadata.write_head)
    return headers


def append_answer(response: pb.AppendResponse) -> web.Response:
    """The answer to a PUT whose append ended with `response`."""
    headers = _route_headers(response.header)
    if response.HasField("registers"):
        headers["X-Registers"] = urlencode(labels.as_pairs(response.registers))
    if response.status != pb.OK:
        return refusal(response.status, headers, response.store_health_error)
    commit = response.commit
    headers["X-Commit-Begin"] = str(commit.begin)
    headers["X-Commit-End"] = headers["X-Write-Head"] = str(commit.end)
    headers["X-Commit-SHA1-Sum"] = sum_from_wire(commit.sum).hex()
    return web.Response(status=204, headers=headers)


def refusal(status: pb.Status.ValueType, headers: dict[str, Any], detail: str = "") -> web.Response:
    """The answer of a status other than OK: its name, and what it means."""
    text = ": ".join(part for part in (pb.Status.Name(status), HINTS.get(status, ""), detail) if part)
    code = STATUSES.get(status, 500)
    if code == 503:
        headers = {**headers, "Retry-After": "1"}
    return web.Response(status=code, text=f"{text}\n", headers=headers)


def _route_headers(header: pb.Header) -> dict[str, str]:
    if not header.route.members:
        return {}
    return {"X-Route-Token": text_format.MessageToString(header.route, as_one_line=True).strip()}
