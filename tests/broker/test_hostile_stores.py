"""Stores that an attacker names or owns: the broker's and client's writes, reads, requests and error messages."""

from __future__ import annotations

import base64
import contextlib
import gzip
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from pydantic import SecretStr

from coranto import labels
from coranto.client import direct
from coranto.client.direct import DirectReader
from coranto.effects import SystemClock
from coranto.errors import CorruptFragment, InvalidInput, StoreError
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.store_endpoints import AllowedEndpoints
from coranto.fragments.store_urls import parse_store_url
from coranto.fragments.stores import StoreRegistry, open_store
from coranto.security.tokens import Capability, Claims, Keys, sign
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments import store_probe
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, running_broker

MakeSpec = Callable[..., pb.JournalSpec]
Metadata = tuple[tuple[str, str], ...]
KEY = base64.b64encode(bytes([1]) * 32).decode()
SECRET = b"the secret of a service that only brokers reach"
DENIED, INVALID = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT
MIB = 1 << 20


def token(capability: Capability, selector: str = "") -> Metadata:
    now = SystemClock().now()
    signed = sign(Claims(capability, labels.parse_selector(selector), now, now + 86_400), Keys.parse(KEY))
    return (("authorization", f"Bearer {signed}"),)


EVERYTHING = token(Capability.ALL)


class Service(ThreadingHTTPServer):
    """A server at a store's URL: it answers all requests alike, and records them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.status, self.headers = 403, [("Content-Length", str(len(SECRET)))]
        self.body: Iterator[bytes] | list[bytes] = [SECRET]
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.sent = 0

    def store(self, **arguments: str) -> str:
        given = {"region": "x", "endpoint": self.url, **arguments}
        return "s3://bucket/?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in given.items())

    def serve(self, *body: bytes, **headers: str) -> None:
        self.status, self.body = 200, list(body)
        self.headers = [(name.replace("_", "-"), value) for name, value in headers.items()]


class Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        service = self.server
        assert isinstance(service, Service)
        service.asked.append(f"{self.command} {self.path}")
        self.send_response(service.status)
        for name, value in service.headers:
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # The client has closed the connection.
            for piece in service.body:
                self.wfile.write(piece)
                service.sent += len(piece)

    do_GET = do_PUT = do_HEAD = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield service
        service.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_PROFILE", "CORANTO_STORE_ENDPOINTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the broker's")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "identity")


class Asking:
    """A broker with keys, and calls with tokens."""

    def __init__(self, client: RawClient) -> None:
        self.client = client

    async def health(self, store: str, metadata: Metadata | None, **fields: Any) -> Any:
        """Return the answer of FragmentStoreHealth, or the status code of its error."""
        request = pb.FragmentStoreHealthRequest(fragment_store=store, **fields)
        try:
            return await self.client.stub.FragmentStoreHealth(request, metadata=metadata, timeout=120)
        except grpc.aio.AioRpcError as error:
            return error.code()

    async def apply(self, spec: pb.JournalSpec, metadata: Metadata | None, revision: int = -1) -> Any:
        change = pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=revision)
        try:
            return (await self.client.stub.Apply(pb.ApplyRequest(changes=[change]), metadata=metadata)).status
        except grpc.aio.AioRpcError as error:
            return error.code()


@contextlib.asynccontextmanager
async def asking(settings: BrokerSettings) -> AsyncIterator[Asking]:
    async with running_broker(settings) as (_, client):
        yield Asking(client)


@pytest.fixture
def secured(broker_settings: BrokerSettings) -> BrokerSettings:
    return broker_settings.model_copy(update={"auth_keys": SecretStr(KEY)})


def files_of(folder: Path) -> set[str]:
    """Return all files but brokers' spools, which change."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if path.parts[0] != "data"}


# ------------------------------------------------------------------------------------------- permission to check stores


async def test_read_access_does_not_make_a_broker_write_or_call_arbitrary_addresses(
    secured: BrokerSettings, spec: MakeSpec, service: Service, tmp_path: Path
) -> None:
    secured = secured.model_copy(update={"store_endpoints": service.url})
    async with asking(secured) as broker:
        assert await broker.apply(spec("team-a/one", stores=("file:///frags/",)), EVERYTHING) == pb.OK
        before = files_of(tmp_path)
        reader = token(Capability.READ | Capability.LIST | Capability.APPEND)
        for store in (
            "file:///elsewhere/",
            "file:///frags/?find=.test&replace=team-a",
            service.store(),
            "nonsense",
            "",
        ):
            assert await broker.health(store, reader) is DENIED
            assert (
                await broker.health(store, token(Capability.APPLY | Capability.READ, "name:prefix=team-a/")) is DENIED
            )
        assert service.asked == []
        # The broker itself probes the journal's store before it takes appends.
        assert {name for name in files_of(tmp_path) - before if not name.startswith("root/frags/.test/")} == set()
        # The store of a readable journal is checked, below that journal's folders.
        of_team = token(Capability.READ, "name:prefix=team-a/")
        assert (await broker.health("file:///frags/", of_team)).status == pb.OK
        for prefix, allowed in (
            ("team-a/", True),
            ("team-a/one/", True),
            ("team-b/", False),
            ("team-a/one/two/", False),
        ):
            answer = await broker.health("file:///frags/", of_team, check_delete=True, check_delete_prefix=prefix)
            assert (answer is not DENIED) is allowed, prefix
        # A caller who may apply any spec may check any store.
        assert (await broker.health("file:///elsewhere/", EVERYTHING)).status == pb.OK


@pytest.mark.parametrize(
    "rewriting",
    [
        "find=.test&replace=../../../outside",
        "find=.test&replace=%2Foutside",
        "find=.test/&replace=",
        "find=.&replace=a//b",
    ],
)
async def test_no_key_leads_out_of_a_store(secured: BrokerSettings, tmp_path: Path, rewriting: str) -> None:
    assert secured.file_root is not None
    async with asking(secured) as broker:
        before = files_of(tmp_path)
        answer = await broker.health(f"file:///deep/?{rewriting}", EVERYTHING)
        if rewriting == "find=.test/&replace=":
            assert answer.status == pb.OK, "it stays below the prefix"
        else:
            assert answer.status == pb.FRAGMENT_STORE_UNHEALTHY
            assert "must be a clean path" in answer.store_health_error
        written = files_of(tmp_path) - before
        assert all(name.startswith("root/deep/") for name in written), written
    assert not list(tmp_path.parent.glob("outside*"))


def test_keys_are_clean_paths_below_the_prefix() -> None:
    for replacement in ("..", "../x", "/", "/x", "x//y", ".", "x/..", "a%00b", "a%0Ab", "a%5Cb"):
        with pytest.raises(InvalidInput, match="must be a clean path"):
            parse_store_url(f"file:///p/?find=a/b&replace={replacement}").key("a/b/0-1-x")
    assert parse_store_url("file:///p/?find=a/&replace=").key("a/") == "p/"
    assert parse_store_url("file:///p/?find=a/&replace=").key("a/b") == "p/b"
    assert parse_store_url("file:///p/?find=a&replace=b/c").key("a/") == "p/b/c/"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/?region=evil.example/",
        "s3://bucket/?region=evil.example%23",
        "s3://bucket@evil.example/",
        "s3://bucket%2Fother/",
        "azure-ad://tenant/evil.example%23/container/",
        "azure-ad://tenant/evil.example%3Fx/container/",
        "azure-ad://login%2F..%2Fother/account/container/",
        "azure-ad://tenant/account.evil/container/",
        "gs://bucket%3Fx/",
        "file:///a%00b/",
        "file:///a%5C..%5Cb/",
        "s3://bucket/?" + "x=1&" * 20,
        "s3://bucket/" + "x" * 5000 + "/",
    ],
)
def test_no_url_changes_the_address_of_a_services_store(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_store_url(url)
    assert refused.value.field == "store"


# ------------------------------------------------------------------------------------------------ addresses of requests


async def test_signed_requests_go_only_to_listed_addresses(
    secured: BrokerSettings, spec: MakeSpec, service: Service
) -> None:
    async with asking(secured) as broker:
        answer = await broker.health(service.store(), EVERYTHING)
        assert answer.status == pb.FRAGMENT_STORE_UNHEALTHY
        assert "store_endpoints" in answer.store_health_error
        assert await broker.apply(spec("a/journal", stores=(service.store(),)), EVERYTHING) is INVALID
        assert service.asked == []


async def test_answers_of_a_store_are_not_quoted_to_callers(
    secured: BrokerSettings, spec: MakeSpec, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its answer to a probe, nor the reason of a failed listing."""
    monkeypatch.setattr(store_probe, "BACKOFF_SECONDS", (0.0,))
    async with asking(secured.model_copy(update={"store_endpoints": f"https://other:9000, {service.url}/"})) as broker:
        answer = await broker.health(service.store(), EVERYTHING)
        assert service.asked
        assert answer.status == pb.FRAGMENT_STORE_UNHEALTHY
        assert "403" in answer.store_health_error
        assert "secret" not in answer.store_health_error
        service.body = [b"<Error><Code>a secret</Code><Message>a secret</Message></Error>"]
        service.headers = []
        answer = await broker.health(service.store(), EVERYTHING)
        assert "secret" not in answer.store_health_error
        assert await broker.apply(spec("a/journal", stores=(service.store(),)), EVERYTHING) == pb.OK

        async def messages() -> AsyncIterator[pb.AppendRequest]:
            yield pb.AppendRequest(journal="a/journal")
            yield pb.AppendRequest()

        for _ in range(1000):
            refused = await broker.client.stub.Append(messages(), metadata=EVERYTHING, timeout=120)
            if refused.status == pb.FRAGMENT_STORE_UNHEALTHY:
                break
            assert refused.status in (pb.NO_JOURNAL_PRIMARY_BROKER, pb.INSUFFICIENT_JOURNAL_BROKERS)
        assert "403" in refused.store_health_error
        assert "secret" not in refused.store_health_error


def test_only_listed_addresses_are_allowed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def allowed(listed: str, endpoint: str) -> bool:
        url = parse_store_url(f"s3://bucket/?region=x&endpoint={quote(endpoint, safe='')}")
        try:
            AllowedEndpoints(listed).require(url)
        except InvalidInput:
            return False
        return True

    assert allowed("https://minio:9000", "https://minio:9000")
    assert allowed("http://a https://MINIO", "https://minio:443/path")
    assert allowed("*", "http://169.254.169.254")
    for endpoint in (
        "http://minio:9000",
        "https://minio:9001",
        "https://minio",
        "https://minio:9000@evil.example",
        "https://evil.example\\@minio:9000",
        "https://evil.example#@minio:9000",
        "file:///etc/passwd",
        "minio:9000",
        "https://[::1",
        "https://mınio:9000",
    ):
        assert not allowed("https://minio:9000", endpoint), endpoint
    assert not allowed("", "https://minio:9000")
    with pytest.raises(InvalidInput):
        AllowedEndpoints("minio:9000")
    # The process's own configuration is allowed, and a command that reads URLs from specs asks like a broker.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio:9000")
    assert allowed("", "https://minio:9000")
    with pytest.raises(InvalidInput, match=r"\$CORANTO_STORE_ENDPOINTS"):
        StoreRegistry().get(service.store())
    monkeypatch.setenv("CORANTO_STORE_ENDPOINTS", service.url)
    assert StoreRegistry().get(service.store()).url == service.store()


# ---------------------------------------------------------------------------------------------- stores and small scopes


async def test_a_small_scope_cannot_choose_the_written_files_or_the_credentials(
    secured: BrokerSettings, spec: MakeSpec, service: Service
) -> None:
    small = token(Capability.APPLY, "name:prefix=team-a/")
    rewriting = "file:///frags/?find=team-a/&replace=team-b/"
    async with asking(secured.model_copy(update={"store_endpoints": service.url})) as broker:
        assert await broker.apply(spec("team-a/plain", stores=("file:///frags/",)), small) == pb.OK
        for store in (rewriting, service.store(), "s3://bucket/?region=x&profile=admin"):
            assert await broker.apply(spec("team-a/x", stores=(store,)), small) is DENIED
            assert await broker.apply(spec("team-a/plain", stores=("file:///frags/", store)), small) is DENIED
        # Once a caller with every right has given such a store to one of its journals, others may use it.
        assert await broker.apply(spec("team-b/y", stores=(rewriting,)), EVERYTHING) == pb.OK
        assert await broker.apply(spec("team-a/x", stores=(rewriting,)), small) is DENIED, "not one of its journals"
        assert await broker.apply(spec("team-a/x", stores=(rewriting,)), EVERYTHING) == pb.OK
        assert await broker.apply(spec("team-a/z", stores=(rewriting,)), small) == pb.OK
        assert service.asked == []


async def test_without_a_root_there_are_no_file_stores(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    async with asking(broker_settings.model_copy(update={"file_root": None})) as broker:
        answer = await broker.health("file:///tmp/", None)
        assert answer.status == pb.FRAGMENT_STORE_UNHEALTHY
        assert "--file-root" in answer.store_health_error
        assert await broker.apply(spec("a/journal", stores=("file:///tmp/",)), None) is INVALID
        assert await broker.apply(spec("a/journal"), None) == pb.OK


async def test_a_journal_with_a_store_that_is_no_longer_listed_can_be_changed(
    broker_settings: BrokerSettings, spec: MakeSpec, service: Service
) -> None:
    """An operator who removes an address from the list can still repair, or delete, the journals that name it."""
    listed = broker_settings.model_copy(update={"store_endpoints": service.url})
    journal = spec("a/journal", stores=(service.store(), "file:///frags/"))
    async with asking(listed) as broker:
        assert await broker.apply(journal, None) == pb.OK
    async with BrokerProcess(broker_settings) as process:
        client = RawClient(process.endpoint)
        broker = Asking(client)
        journal.labels.CopyFrom(labels.label_set(team="a"))
        assert await broker.apply(journal, None) == pb.OK
        del journal.fragment.stores[0]
        assert await broker.apply(journal, None) == pb.OK
        journal.fragment.stores.append(service.store())
        assert await broker.apply(journal, None) is INVALID
        await client.close()


# ---------------------------------------------------------------------------------------------------- data from a store

CONTENT = b"a line of content, again and again\n" * 100


def fragment(codec: Codec, length: int = len(CONTENT)) -> Fragment:
    return Fragment("test/journal", 0, length, sum_of(CONTENT), codec, "s3://bucket/", 1)


async def read(url: str, wanted: Fragment) -> bytes:
    return b"".join([piece async for piece in DirectReader(None).read(wanted, url, 0, wanted.end)])


def endless(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


@pytest.mark.parametrize(
    "codec", [Codec.NONE, Codec.GZIP, Codec.SNAPPY, Codec.ZSTANDARD, Codec.GZIP_OFFLOAD_DECOMPRESSION]
)
@pytest.mark.parametrize("large", [False, True])
async def test_an_endless_body_is_read_only_up_to_the_size_of_a_fragment(
    service: Service, codec: Codec, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty members of gzip, and skippable chunks of snappy, hold no content, however many there are."""
    if large:
        monkeypatch.setattr(direct, "_IN_MEMORY_BYTES", 10)
    nothing = {
        Codec.NONE: b"\0",
        Codec.SNAPPY: b"\xfe\xff\x00\x00" + b"\0" * 255,
        Codec.ZSTANDARD: b"\x50\x2a\x4d\x18\0\0\0\0",
    }
    service.serve()
    piece = nothing.get(codec, gzip.compress(b""))
    service.body = endless(piece * (65536 // len(piece)))
    with pytest.raises(CorruptFragment):
        await read(f"{service.url}/x", fragment(codec))
    assert len(service.asked) == 1
    assert service.sent < 32 * MIB  # The most that buffers between two processes hold.


@pytest.mark.parametrize("claimed", [len(CONTENT) + (3 << 20), 1 << 40])
async def test_brokers_read_no_more_of_an_endless_body_either(service: Service, claimed: int) -> None:
    service.serve(Content_Length=str(claimed), ETag='"1"', Last_Modified="Mon, 02 Jan 2006 15:04:05 GMT")
    service.body = endless(bytes(1 << 16))
    with pytest.raises(CorruptFragment, match="far longer than its content"):
        await open_store(service.store()).read(fragment(Codec.NONE))
    assert service.sent < 32 * MIB


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY, Codec.GZIP_OFFLOAD_DECOMPRESSION])
@pytest.mark.parametrize("large", [False, True])
async def test_decompression_bombs_are_refused(
    service: Service, codec: Codec, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(direct, "_IN_MEMORY_BYTES", 10)
    bomb = compress(codec, bytes(16 * MIB))
    service.serve(bomb, Content_Length=str(len(bomb)))
    with pytest.raises(CorruptFragment):
        await read(f"{service.url}/x", fragment(codec))


@pytest.mark.parametrize("claimed", [1, len(CONTENT) - 1, len(CONTENT) + 1, 1 << 40])
async def test_wrong_lengths_are_refused(service: Service, claimed: int) -> None:
    service.serve(CONTENT, Content_Length=str(claimed))
    with pytest.raises((CorruptFragment, StoreError)):
        await read(f"{service.url}/x", fragment(Codec.NONE))
    service.serve(CONTENT, Content_Length=str(len(CONTENT)))
    assert await read(f"{service.url}/x", fragment(Codec.NONE)) == CONTENT
    with pytest.raises(CorruptFragment):
        await read(f"{service.url}/x", fragment(Codec.GZIP, 1 << 40))  # No memory is reserved for the length in a name.


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_of_a_store_are_not_followed(service: Service, status: int) -> None:
    with Service() as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        other.serve(CONTENT, Content_Length=str(len(CONTENT)))
        for where in (f"{other.url}/x", "/y", "file:///etc/passwd", "ftp://127.0.0.1/x"):
            service.serve(Location=where, Content_Length="0")
            service.status = status
            with pytest.raises(StoreError, match=str(status)) as refused:
                await read(f"{service.url}/x", fragment(Codec.NONE))
            assert f"HTTP {status}" in refused.value.public_text
        assert other.asked == []
        assert set(service.asked) == {"GET /x"}
        other.shutdown()
        thread.join()


async def test_answers_that_are_not_http_are_refused(service: Service) -> None:
    with pytest.raises(StoreError, match="neither http, https nor file"):
        await read("ftp://127.0.0.1/x", fragment(Codec.NONE))
    with pytest.raises(StoreError):
        await read("http://127.0.0.1:1/\r\nx", fragment(Codec.NONE))
    service.serve(Content_Length="no number")
    with pytest.raises((StoreError, CorruptFragment)):
        await read(f"{service.url}/x", fragment(Codec.NONE))
    service.serve(**{f"h{number}": "x" for number in range(200)})
    with pytest.raises(StoreError):
        await read(f"{service.url}/x", fragment(Codec.NONE))


async def test_a_slow_store_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece arrives before the connection times out."""
    monkeypatch.setattr(direct, "_HTTP_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(direct, "MIN_BYTES_PER_SECOND", 1 << 30)
    pause = threading.Event()

    def slowly() -> Iterator[bytes]:
        for byte in CONTENT:
            pause.wait(0.01)
            yield bytes([byte])

    service.serve(Content_Length=str(len(CONTENT)))
    service.body = slowly()
    with pytest.raises(StoreError, match="too slow"):
        await read(f"{service.url}/x", fragment(Codec.NONE))
    pause.set()
