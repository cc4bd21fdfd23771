"""Adapters between HTTP and the handlers: the answer that a read writes, and the body that an append reads.

Neither buffers content. A chunk of a read is sent before the next is fetched. Only the connection's buffer of an
append's body is in memory.
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
from coranto.tracing import KEY
from coranto.wire import protocol_pb2 as pb
from coranto_broker.http.statuses import HINTS, STATUSES
from coranto_broker.rpc.source import SinkComplete

MAX_OFFSET = (1 << 63) - 1


class _Call:
    """The trace headers of a request, in the form of gRPC's metadata."""

    def __init__(self, http: web.Request) -> None:
        self._http = http

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(KEY, value) for value in self._http.headers.getall(KEY, [])]


class ReadAnswer(_Call):
    """The answer to a GET or HEAD. The read's handler sends its messages to `write`."""

    def __init__(self, http: web.Request, request: pb.ReadRequest) -> None:
        super().__init__(http)
        self._request = request
        self._next = 0  # Offset of the next byte.
        self._stop = 0  # End of the content; 0 when it is open.
        self.response: web.StreamResponse | None = None
        """Set once the headers, or a complete refusal, have been created."""

    async def run(self, reading: Coroutine[Any, Any, None]) -> None:
        """Run `reading`, which writes to this answer, until it ends or has written enough.

        Raises the errors of `reading`, and Unavailable if it ends before all content that the headers promised.
        """
        await reading
        if self._next < self._stop:
            raise Unavailable(f"the read ended at offset {self._next}, before {self._stop}; read on from there")

    async def write(self, message: pb.ReadResponse) -> None:
        """Write the next message of the read. The first is metadata, which gives the headers; then comes content."""
        if message.content:
            assert self.response is not None
            if message.offset != self._next:
                # The headers gave the first offset of the content. From there on, it must have no gap.
                raise Unavailable(f"the journal continues at offset {message.offset}, after {self._next}")
            content = message.content
            if self._stop:
                content = content[: self._stop - self._next]
            self._next += len(content)
            if not self.response.prepared:  # Not earlier, so that a failure before any content gets its own status.
                await self.response.prepare(self._http)
            await self.response.write(content)
            if self._next == self._stop:
                raise SinkComplete  # The journal may have grown since the headers were sent.
        elif self.response is None:
            self.response = self._begin(message)
        # Ignore later metadata: it names another fragment, or reports that the read has reached the head.

    def _begin(self, metadata: pb.ReadResponse) -> web.StreamResponse:
        headers = read_headers(metadata)
        if metadata.status != pb.OK:
            return refusal(metadata.status, headers)
        wanted = self._request.end_offset
        if wanted and metadata.offset >= wanted:
            text = f"there is nothing left of the range: the journal continues at offset {metadata.offset}"
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


class AppendBody(_Call):
    """The body of a PUT as the messages of an append. The append's handler calls `read` for them."""

    def __init__(self, http: web.Request, first: pb.AppendRequest, chunk_bytes: int) -> None:
        super().__init__(http)
        self._messages = self._make(http, first, chunk_bytes)

    async def read(self) -> pb.AppendRequest | None:
        """Return the next message, or None at the end. Raises for a truncated body, which is never committed."""
        return await anext(self._messages, None)

    @staticmethod
    async def _make(http: web.Request, first: pb.AppendRequest, chunk_bytes: int) -> AsyncIterator[pb.AppendRequest]:
        yield first
        while chunk := await http.content.read(chunk_bytes):
            yield pb.AppendRequest(content=chunk)
        yield pb.AppendRequest()  # The body is complete: commit.


def read_headers(metadata: pb.ReadResponse) -> dict[str, str]:
    """Return the headers for a read's first metadata, under the names that Gazette's gateway uses."""
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
    """Return the answer to a PUT whose append ended with `response`."""
    headers = _route_headers(response.header)
    if response.HasField("registers"):
        headers["X-Registers"] = urlencode(labels.as_pairs(response.registers))
    if response.status != pb.OK:
        return refusal(response.status, headers, response.store_health_error)
    commit = response.commit
    headers["X-Commit-Begin"] = str(commit.begin)
    headers["X-Commit-End"] = headers["X-Write-Head"] = str(commit.end)
    headers["X-Commit-SHA1-Sum"] = sum_from_wire(commit.sum).hex()
    if response.HasField("durability"):
        reported = response.durability
        headers["X-Durability"] = urlencode(
            {
                "replicas": reported.replicas,
                "zones": reported.zones,
                "synced-replicas": reported.synced_replicas,
                "synced-zones": reported.synced_zones,
            }
        )
    return web.Response(status=204, headers=headers)


def refusal(status: pb.Status.ValueType, headers: dict[str, Any], detail: str = "") -> web.Response:
    """Return the answer for a status other than OK, with its name and meaning."""
    hint = "" if status == pb.NOT_ALLOWED and detail else HINTS.get(status, "")  # `detail` has the actual reason.
    text = ": ".join(part for part in (pb.Status.Name(status), hint, detail) if part)
    code = STATUSES.get(status, 500)
    if code == 503:
        headers = {**headers, "Retry-After": "1"}
    return web.Response(status=code, text=f"{text}\n", headers=headers)


def _route_headers(header: pb.Header) -> dict[str, str]:
    if not header.route.members:
        return {}
    return {"X-Route-Token": text_format.MessageToString(header.route, as_one_line=True).strip()}
