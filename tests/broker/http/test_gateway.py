"""The HTTP gateway of real brokers, called by an HTTP client and over plain connections."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import trustme
from aiohttp import web
from pydantic import SecretStr

from coranto import labels
from coranto.client import JournalClient
from coranto.effects import SystemClock
from coranto.security.tokens import Capability, Claims, Keys, sign
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, create, eventually, running_broker, stored_files

J = "test/journal"
KEY = "a" * 43 + "="
MAX = (1 << 63) - 1
MakeSpec = Callable[..., pb.JournalSpec]


@dataclass
class Gateway:
    """A broker with a gateway, and clients of both."""

    process: BrokerProcess
    client: RawClient
    session: aiohttp.ClientSession

    def url(self, query: str = "", journal: str = J) -> str:
        return f"{self.process.http_endpoint}/{journal}{query}"

    async def put(self, content: Any, query: str = "", **options: Any) -> aiohttp.ClientResponse:
        async with self.session.put(self.url(query), data=content, **options) as response:
            await response.read()
            return response

    async def get(self, query: str = "", journal: str = J, **headers: str) -> tuple[aiohttp.ClientResponse, bytes]:
        async with self.session.get(self.url(query, journal), headers=headers) as response:
            return response, await response.read()


@pytest.fixture
def gateway_settings(broker_settings: BrokerSettings) -> BrokerSettings:
    return broker_settings.model_copy(update={"http_port": 0})


@contextlib.asynccontextmanager
async def serving(settings: BrokerSettings) -> AsyncIterator[Gateway]:
    async with running_broker(settings) as (process, client), aiohttp.ClientSession() as session:
        yield Gateway(process, client, session)


@pytest.fixture
async def gateway(gateway_settings: BrokerSettings, spec: MakeSpec) -> AsyncIterator[Gateway]:
    async with serving(gateway_settings) as certificate_of:
        await create(certificate_of.client, spec())
        yield certificate_of


async def test_written_content_can_be_read(gateway: Gateway) -> None:
    put = await gateway.put(b"hello, ")
    assert put.status == 204
    digest = hashlib.sha1(b"hello, ").hexdigest()
    seen = {name: put.headers[name] for name in ("X-Commit-Begin", "X-Commit-End", "X-Write-Head", "X-Commit-SHA1-Sum")}
    assert list(seen.values()) == ["0", "7", "7", digest]
    assert re.fullmatch(r"replicas=1&zones=1&synced-replicas=([01])&synced-zones=\1", put.headers["X-Durability"])
    assert (await gateway.put(b"world!")).headers["X-Commit-Begin"] == "7"
    response, content = await gateway.get("?offset=2")
    assert (response.status, content) == (206, b"llo, world!")
    assert response.headers["Content-Range"] == f"bytes 2-{MAX}/{MAX}"
    assert response.headers["X-Write-Head"] == "13"
    assert response.headers["X-Fragment-Name"].startswith(f"{0:016x}-")
    assert 'members { zone: "local" suffix: "broker-0" }' in response.headers["X-Route-Token"]
    assert await gateway.client.content(J) == b"hello, world!"


async def test_ranges_have_a_length(gateway: Gateway) -> None:
    await gateway.put(b"0123456789")
    for query, headers in (("", {"Range": "bytes=2-4"}), ("?offset=2&end_offset=5", {})):
        response, content = await gateway.get(query, **headers)
        assert (response.status, content) == (206, b"234")
        assert response.headers["Content-Range"] == "bytes 2-4/*"
        assert response.headers["Content-Length"] == "3"
    # A range ends where the journal does, unless it may wait.
    response, content = await gateway.get("", Range="bytes=8-100")
    assert (response.headers["Content-Range"], content) == ("bytes 8-9/*", b"89")
    response, content = await gateway.get("", Range="bytes=4-")
    assert (response.headers["Content-Range"], content) == (f"bytes 4-{MAX}/{MAX}", b"456789")
    waiting = asyncio.ensure_future(gateway.get("?block=true", Range="bytes=8-11"))
    await reading(gateway)
    await gateway.put(b"abcdef")
    response, content = await waiting
    assert (response.headers["Content-Length"], content) == ("4", b"89ab")


async def test_head_reports_where_a_read_would_begin(gateway: Gateway) -> None:
    await gateway.put(b"content")
    for query, begin in (("", 0), ("?offset=3", 3)):
        async with gateway.session.head(gateway.url(query)) as response:
            assert response.status == 206
            assert response.headers["X-Write-Head"] == "7"
            assert response.headers["Content-Range"].startswith(f"bytes {begin}-")
            assert await response.read() == b""
    async with gateway.session.head(gateway.url("?offset=-1")) as response:
        assert (response.status, response.headers["X-Write-Head"]) == (416, "7")


async def reading(gateway: Gateway, count: int = 1) -> None:
    """Wait until this many reads wait for content."""
    (replica,) = gateway.process.broker.resolver.local_replicas
    await eventually(lambda: len(replica.index._waiters) == count)


async def test_a_long_poll_continues_as_content_arrives_and_ends_with_its_client(gateway: Gateway) -> None:
    await gateway.put(b"before")
    response, content = await gateway.get("?offset=-1")
    assert (response.status, response.headers["X-Write-Head"]) == (416, "6")
    assert b"OFFSET_NOT_YET_AVAILABLE" in content
    waiting = asyncio.ensure_future(gateway.session.get(gateway.url("?offset=-1&block=true")))
    await reading(gateway)
    await gateway.put(b"one")
    async with await asyncio.wait_for(waiting, 60) as response:
        assert response.headers["Content-Range"] == f"bytes 6-{MAX}/{MAX}"
        assert await response.content.readexactly(3) == b"one"
        await reading(gateway)
        await gateway.put(b"two")
        assert await response.content.readexactly(3) == b"two"
        await reading(gateway)
    # The client has disconnected, so its read ends.
    await reading(gateway, 0)


async def test_content_is_not_buffered_for_a_client_that_does_not_read(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports: list[Any] = []
    write = web.StreamResponse.write

    async def recording(answer: web.StreamResponse, data: bytes) -> None:
        assert answer._req is not None
        transports.append(answer._req.transport)
        await write(answer, data)

    monkeypatch.setattr(web.StreamResponse, "write", recording)
    piece = bytes(1 << 20)
    for _ in range(24):
        await gateway.put(piece)
    sent = gateway.process.broker.metrics.read_bytes
    url = urlsplit(gateway.process.http_endpoint)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 10)
    writer.write(f"GET /{J} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    # The client has stopped reading, and the server has stopped writing: the sockets' buffers are full.
    await eventually(lambda: reader._paused and transports and transports[-1].get_protocol()._paused)
    assert transports[-1].get_write_buffer_size() < 2 << 20
    last = sent._value.get()
    assert 0 < last < 20 << 20
    await reader.readexactly(8 << 20)  # The server was waiting for the client, and continues.
    await eventually(lambda: sent._value.get() > last)
    writer.transport.abort()
    tasks = [task.get_name() for task in asyncio.all_tasks()]
    await eventually(lambda: len(asyncio.all_tasks()) < len(tasks))


async def test_a_large_body_is_one_append(gateway: Gateway) -> None:
    async def body() -> AsyncIterator[bytes]:
        for number in range(300):
            yield bytes([number % 256]) * 50_000

    put = await gateway.put(body())
    assert (put.headers["X-Commit-Begin"], put.headers["X-Commit-End"]) == ("0", "15000000")
    response, content = await gateway.get()
    assert content == b"".join([bytes([number % 256]) * 50_000 for number in range(300)])
    assert int(response.headers["X-Write-Head"]) == len(content)


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 100\r\n\r\nonly a part",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nnonsense\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel",
    ],
)
@pytest.mark.parametrize("half_closed", [True, False])
async def test_a_truncated_body_appends_nothing(gateway: Gateway, body: bytes, half_closed: bool) -> None:
    await gateway.put(b"before")
    url = urlsplit(gateway.process.http_endpoint)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(f"PUT /{J} HTTP/1.1\r\nHost: x\r\n".encode() + body)
    await writer.drain()
    if half_closed:
        writer.write_eof()
    else:
        writer.transport.abort()
    assert (await gateway.put(b", after")).headers["X-Commit-Begin"] == "6"
    assert await gateway.client.content(J) == b"before, after"
    writer.close()


async def test_a_body_that_arrives_too_slowly_is_given_up(gateway: Gateway) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"the first bytes"
        await asyncio.Event().wait()

    put = await gateway.put(body())
    assert put.status == 408
    assert (await gateway.put(b"in time")).headers["X-Commit-Begin"] == "0"


async def test_offsets_make_appends_at_most_once(gateway: Gateway) -> None:
    assert (await gateway.put(b"first", "?offset=0")).status == 204
    assert (await gateway.put(b"second", "?offset=5")).status == 204
    again = await gateway.put(b"second", "?offset=5")
    assert (again.status, again.reason) == (409, "Conflict")
    assert await gateway.client.content(J) == b"firstsecond"


async def test_registers_are_checked_and_returned(gateway: Gateway) -> None:
    put = await gateway.put(b"first", "?union_registers=epoch=1,owner=me-too")
    assert put.headers["X-Registers"] == "epoch=1&owner=me-too"
    refused = await gateway.put(b"second", "?check_registers=epoch%3D2")
    assert (refused.status, refused.headers["X-Registers"]) == (412, "epoch=1&owner=me-too")
    put = await gateway.put(b"second", "?check_registers=epoch%3D1&subtract_registers=epoch%3D1")
    assert (put.status, put.headers["X-Registers"]) == (204, "owner=me-too")
    # Registers cannot change without content.
    assert (await gateway.put(b"", "?union_registers=aa=b")).status == 400


async def test_a_barrier_is_an_empty_body(gateway: Gateway) -> None:
    await gateway.put(b"content")
    put = await gateway.put(b"")
    assert (put.status, put.headers["X-Commit-Begin"], put.headers["X-Commit-End"]) == (204, "7", "7")


async def test_invalid_requests_are_reported(gateway: Gateway, spec: MakeSpec) -> None:
    for query, journal, status, text in (
        ("", "no/such/journal", 404, b"JOURNAL_NOT_FOUND"),
        ("?offset=5", J, 416, b"block=true"),
        ("?offset=x", J, 400, b"offset='x'"),
        ("?speed=1", J, 400, b"no argument 'speed'"),
        ("", "a//b", 400, b"clean path"),
    ):
        response, content = await gateway.get(query, journal)
        assert (response.status, text in content) == (status, True), content
    for method in ("POST", "DELETE", "PATCH", "OPTIONS"):
        async with gateway.session.request(method, gateway.url()) as response:
            assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD, PUT")
    await create(gateway.client, spec("test/no-reads", flags=pb.JournalSpec.O_WRONLY))
    async with gateway.session.put(gateway.url(journal="no/such/journal"), data=b"x") as response:
        assert response.status == 404
    response, _ = await gateway.get(journal="test/no-reads")
    assert response.status == 403
    requests = gateway.process.broker.metrics.http_requests
    assert requests.labels("GET", "416")._value.get() == 1
    assert requests.labels("other", "405")._value.get() == 4


async def test_an_answer_that_cannot_continue_is_cut_off(
    gateway_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    """The second of two stored fragments is damaged: the answer is recognizably incomplete."""
    async with serving(gateway_settings) as gateway:
        await create(gateway.client, spec(stores=("file:///frags/",), fragment={"length": 1024, "refresh_interval": 1}))
        for number in range(2):
            assert (await gateway.put(bytes([number]) * 1500)).status == 204
        await gateway.put(b"tail")
        await eventually(lambda: len(stored_files(gateway_settings)) == 2)
        (replica,) = gateway.process.broker.resolver.local_replicas
        await eventually(lambda: not replica.index.sealed_files())
        damaged = sorted(stored_files(gateway_settings))[1]
        damaged.write_bytes(bytes(1500))
        async with gateway.session.get(gateway.url()) as response:
            assert response.status == 206
            assert response.headers["X-Fragment-Location"].startswith("file:///frags/")
            assert "GMT" in response.headers["X-Fragment-Last-Modified"]
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        async with gateway.session.get(gateway.url("?offset=100&end_offset=2000")) as response:
            assert response.content_length == 1900
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        response, _ = await gateway.get("?offset=1600")
        assert response.status == 500


async def test_a_read_that_jumps_begins_where_its_headers_say(gateway_settings: BrokerSettings, spec: MakeSpec) -> None:
    async with serving(gateway_settings) as gateway:
        await create(gateway.client, spec(stores=("file:///frags/",), fragment={"length": 1024, "refresh_interval": 1}))
        for number in range(2):
            await gateway.put(bytes([number]) * 1500)
        await gateway.put(b"tail")
        await eventually(lambda: len(stored_files(gateway_settings)) == 2)
        (replica,) = gateway.process.broker.resolver.local_replicas
        await eventually(lambda: not replica.index.sealed_files())
        sorted(stored_files(gateway_settings))[0].unlink()
        await eventually(lambda: replica.index.entries.begin_offset == 1500)
        response, content = await gateway.get()
        assert response.headers["Content-Range"] == f"bytes 1500-{MAX}/{MAX}"
        assert content == bytes([1]) * 1500 + b"tail"
        response, content = await gateway.get("", Range="bytes=0-99")
        assert (response.status, content) == (
            416,
            b"there is nothing left of the range: the journal continues at offset 1500\n",
        )
        response, content = await gateway.get("", Range="bytes=1000-1599")
        assert (response.headers["Content-Range"], len(content)) == ("bytes 1500-1599/*", 100)


def bearer(capability: Capability, seconds: float = 60.0) -> dict[str, str]:
    now = SystemClock().now()
    claims = Claims(capability, labels.parse_selector(""), now - 1000, now + seconds)
    return {"Authorization": f"Bearer {sign(claims, Keys.parse(KEY))}"}


async def test_a_token_ends_a_long_poll_that_outlives_it(
    gateway_settings: BrokerSettings, spec: MakeSpec, token_ends: list[asyncio.Timeout]
) -> None:
    settings = gateway_settings.model_copy(update={"auth_keys": SecretStr(KEY)})
    async with BrokerProcess(settings) as process, aiohttp.ClientSession() as session:
        async with JournalClient(process.endpoint, auth=Keys.parse(KEY)) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec())])
            await client.append(J, b"content")
        url = f"{process.http_endpoint}/{J}?block=true"
        headers = bearer(Capability.READ)
        token_ends.clear()
        async with session.get(url, headers=headers) as response:
            assert await response.content.readexactly(7) == b"content"
            token_ends.pop().reschedule(asyncio.get_running_loop().time())
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        polling = asyncio.ensure_future(session.get(url + "&offset=-1", headers=headers))
        await eventually(lambda: token_ends)
        token_ends.pop().reschedule(asyncio.get_running_loop().time())
        async with await polling as response:
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_mutual_tls(gateway_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))

    def issue() -> None:
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.cert_chain_pems[0].write_to_path(str(cert))
        issued.private_key_pem.write_to_path(str(key))

    def context(shown: bool) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=ca)
        if shown:
            made.load_cert_chain(cert, key)
        return made

    async def certificate_of(shown: bool) -> bytes | None:
        """Return the gateway's certificate, or None if it refuses the connection."""
        try:
            connector = aiohttp.TCPConnector(ssl=context(shown))
            async with aiohttp.ClientSession(connector=connector) as session:
                async with session.get(f"{process.http_endpoint}/no/such/journal") as response:
                    assert response.status == 404
            url = urlsplit(process.http_endpoint)
            _, writer = await asyncio.open_connection(url.hostname, url.port, ssl=context(shown))
            found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            return found
        except (aiohttp.ClientError, ssl.SSLError):
            return None

    issue()
    given = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ca, "peer_ca": ca}
    async with BrokerProcess(gateway_settings.model_copy(update=given)) as process:
        assert process.http_endpoint.startswith("https://127.0.0.1:")
        first = await certificate_of(True)
        assert first is not None
        assert await certificate_of(False) is None
        issue()  # A renewed certificate is presented from the next connection on.
        second = await certificate_of(True)
        assert second not in (None, first)
        shown = cert.read_bytes()
        cert.write_bytes(shown + b"half a certificate")  # An incomplete certificate is not loaded.
        key.write_bytes(b"nothing")
        cert.write_bytes(shown)


async def test_a_gateway_of_any_broker_reaches_every_journal(gateway_settings: BrokerSettings, spec: MakeSpec) -> None:
    other = gateway_settings.model_copy(update={"id": "broker-1", "data_dir": gateway_settings.data_dir / "1"})
    async with serving(gateway_settings) as one, serving(other) as two:
        names = [f"test/journal-{number}" for number in range(4)]
        for name in names:
            await create(one.client, spec(name))
        primaries = set()
        for gateway in (one, two):
            for name in names:
                async with gateway.session.put(gateway.url(journal=name), data=b"content") as response:
                    assert response.status == 204, await response.text()
                    primaries.add(response.headers["X-Route-Token"])
        assert len(primaries) == 2
        for gateway in (one, two):
            for name in names:
                response, content = await gateway.get(journal=name)
                assert (response.status, content) == (206, b"contentcontent")
                assert (await gateway.get(journal=name, Range="bytes=0-6"))[1] == b"content"
