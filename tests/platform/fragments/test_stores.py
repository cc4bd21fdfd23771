"""Fragment stores: a real file store, and cloud stores as far as they work without a network."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import structlog

from coranto.errors import CorruptFragment, FragmentNotFound, InvalidInput, StoreDenied, StoreError
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec
from coranto.fragments.stores import MAX_OPEN_STORES, FragmentStore, StoreRegistry, open_store, verified_content
from coranto.testing.fragments import CONTENT, fragment_of, listed, put

URL = "file:///fragments/"


def path_of(signed: str, root: Path) -> Path:
    """Return the file of a signed URL, as a reader with the root finds it."""
    return root / unquote(urlsplit(signed).path).lstrip("/")


@pytest.fixture
def store(tmp_path: Path) -> FragmentStore:
    return open_store(URL, file_root=tmp_path)


# -------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.GZIP_OFFLOAD_DECOMPRESSION])
async def test_fragments_round_trip(store: FragmentStore, tmp_path: Path, codec: Codec) -> None:
    fragment = fragment_of(CONTENT, codec)
    assert not await store.exists(fragment)
    await put(store, fragment)
    assert await store.exists(fragment)
    assert await store.get(fragment) == compress(codec, CONTENT)
    assert await store.read(fragment) == CONTENT
    path = tmp_path / "fragments" / fragment.content_path
    assert path.read_bytes() == compress(codec, CONTENT)
    assert await listed(store, fragment.journal) == [
        replace(fragment, backing_store=URL, mod_time=int(path.stat().st_mtime))
    ]
    await store.remove(fragment)
    assert not await store.exists(fragment)
    await store.remove(fragment)


@pytest.mark.parametrize(
    ("journal", "postfix"),
    [
        ("flights/events/part-000", ""),
        ("a/region=eu/part-000", "date=2013-01-01/hour=05"),
        ("a/100%/b%2Fc/%41", "p%20q"),
        ("été/漢字/Ω=٣", "día=1"),
        ("a+b/c_d.e/.hidden", "x+y"),
        ("abcd", "c/d"),
    ],
)
async def test_names_round_trip(store: FragmentStore, tmp_path: Path, journal: str, postfix: str) -> None:
    fragment = fragment_of(CONTENT, journal=journal, postfix=postfix)
    await put(store, fragment)
    assert (tmp_path / "fragments" / fragment.content_path).is_file()
    (found,) = await listed(store, journal)
    assert replace(found, backing_store="", mod_time=0) == fragment
    assert await store.read(found) == CONTENT
    signed = await store.sign_async(fragment, 60)
    assert signed == store.sign(fragment, 60)
    assert signed.startswith("file:///fragments/")
    assert str(tmp_path) not in signed
    assert path_of(signed, tmp_path).read_bytes() == compress(fragment.codec, CONTENT)


async def test_listing_skips_and_reports_files_that_are_not_fragments(store: FragmentStore, tmp_path: Path) -> None:
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    folder = tmp_path / "fragments" / fragment.journal
    (folder / "README").write_text("hello")
    (folder / f"{fragment.content_name}.bak").write_bytes(b"")
    (folder / ".partial-abc").write_bytes(b"")
    with structlog.testing.capture_logs() as logs:
        found = await listed(store, fragment.journal)
    assert len(found) == 1
    warned = {entry["path"] for entry in logs if entry["log_level"] == "warning"}
    assert warned == {"README", f"{fragment.content_name}.bak"}
    assert all(entry["journal"] == fragment.journal and entry["store"] == URL for entry in logs)


async def test_content_may_arrive_in_pieces(store: FragmentStore, tmp_path: Path) -> None:
    fragment = fragment_of(CONTENT)
    data = compress(fragment.codec, CONTENT)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 10):
            yield data[start : start + 10]

    await store.put(fragment, pieces())
    assert await store.read(fragment) == CONTENT
    names = [path.name for path in (tmp_path / "fragments" / fragment.journal).iterdir()]
    assert names == [fragment.content_name]


async def test_a_put_that_fails_leaves_nothing(store: FragmentStore, tmp_path: Path) -> None:
    fragment = fragment_of(CONTENT)

    async def broken() -> AsyncIterator[bytes]:
        yield b"half of it"
        raise RuntimeError("the disk went away")

    with pytest.raises(RuntimeError, match="went away"):
        await store.put(fragment, broken())
    assert list((tmp_path / "fragments" / fragment.journal).iterdir()) == []
    assert not await store.exists(fragment)


async def test_a_put_that_is_cancelled_leaves_nothing(store: FragmentStore, tmp_path: Path) -> None:
    fragment = fragment_of(CONTENT)
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"half of it"
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(store.put(fragment, endless()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "fragments" / fragment.journal).iterdir()) == []


async def test_an_overwritten_file_is_detected_on_reading(store: FragmentStore, tmp_path: Path) -> None:
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    path = tmp_path / "fragments" / fragment.content_path
    path.write_bytes(b"not gzip at all" * 100)
    with pytest.raises(CorruptFragment, match="cannot be decompressed"):
        await store.read(fragment)


def test_content_read_by_other_means_is_verified_the_same_way() -> None:
    fragment = fragment_of(CONTENT)
    assert verified_content(fragment, compress(Codec.GZIP, CONTENT), source="http://store/x") == CONTENT
    with pytest.raises(CorruptFragment, match="http://store/x"):
        verified_content(replace(fragment, sum=bytes(20)), compress(Codec.GZIP, CONTENT), source="http://store/x")


async def test_files_can_be_found_and_replaced_by_url_rewriting(tmp_path: Path) -> None:
    url = "file:///p/?find=/events/&replace=/archive/"
    store = open_store(url, file_root=tmp_path)
    fragment = fragment_of(CONTENT, journal="flights/events/part-000", postfix="events/x=1")
    await put(store, fragment)
    assert (tmp_path / "p/flights/archive/part-000/events/x=1" / fragment.content_name).is_file()
    (found,) = await listed(store, fragment.journal)
    assert replace(found, backing_store="", mod_time=0) == fragment
    assert found.backing_store == url
    assert await store.read(found) == CONTENT
    assert "/archive/" in store.sign(fragment, 60)


async def test_the_offload_codec_is_refused(store: FragmentStore) -> None:
    with pytest.raises(InvalidInput, match="use GZIP") as caught:
        await put(store, fragment_of(CONTENT, Codec.GZIP_OFFLOAD_DECOMPRESSION))
    assert caught.value.field == "compression_codec"


async def test_a_file_in_place_of_a_folder_is_a_store_error(store: FragmentStore, tmp_path: Path) -> None:
    (tmp_path / "fragments").write_text("in the way")
    with pytest.raises(StoreError, match="cannot put flights/events"):
        await put(store, fragment_of(CONTENT))


async def test_the_root_of_the_file_system_must_be_set_explicitly(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--file-root.*\$CORANTO_FILE_ROOT"):
        open_store(f"file://{tmp_path}/deep/")
    store = open_store(f"file://{tmp_path}/deep/", file_root=Path("/"))
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    assert (tmp_path / "deep" / fragment.content_path).is_file()
    assert path_of(store.sign(fragment, 60), Path("/")).is_file()


def test_registry_opens_each_store_once(tmp_path: Path) -> None:
    registry = StoreRegistry(tmp_path)
    assert registry.get(URL) is registry.get(URL)
    assert registry.get("file:///other/") is not registry.get(URL)
    with pytest.raises(InvalidInput):
        registry.get("nonsense")


def test_the_registry_is_bounded(tmp_path: Path) -> None:
    registry = StoreRegistry(tmp_path)
    opened = [registry.get(f"file:///{number}/") for number in range(MAX_OPEN_STORES + 1)]
    assert len(registry._stores) == MAX_OPEN_STORES
    assert registry.get(f"file:///{MAX_OPEN_STORES}/") is opened[-1]
    assert registry.get("file:///0/") is not opened[0], "it was evicted"


# ------------------------------------------------------------------------------------------------------------- clouds


@pytest.fixture
def _aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set static credentials, and hide the files and variables of the caller."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.mark.usefixtures("_aws")
async def test_s3_urls_are_signed_offline() -> None:
    store = open_store("s3://bucket/prefix/?region=eu-central-1&acl=bucket-owner-full-control")
    fragment = fragment_of(CONTENT, journal="a/b=1/100%")
    for signed in (store.sign(fragment, 90), await store.sign_async(fragment, 90)):
        parts = urlsplit(signed)
        assert parts.netloc == "s3.eu-central-1.amazonaws.com"
        assert parts.path == f"/bucket/prefix/a/b%3D1/100%25/{fragment.content_name}"
        query = parse_qs(parts.query)
        assert query["X-Amz-Expires"] == ["90"]
        assert query["X-Amz-Credential"][0].startswith("AKIDEXAMPLE/")
        # GET requests of the URL send no other header.
        assert query["X-Amz-SignedHeaders"] == ["host"]


@pytest.mark.usefixtures("_aws")
async def test_urls_are_signed_for_seconds_and_at_most_a_week(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_credentials(monkeypatch, tmp_path)
    fragment = fragment_of(CONTENT)
    for url, argument in (("s3://bucket/?region=x", "X-Amz-Expires"), ("gs://bucket/", "X-Goog-Expires")):
        store = open_store(url)
        for seconds, expected in ((0.1, "1"), (59.5, "60"), (604800, "604800")):
            assert parse_qs(urlsplit(store.sign(fragment, seconds)).query)[argument] == [expected]
        for sign in (store.sign_async(fragment, 604801), asyncio.to_thread(store.sign, fragment, 1e12)):
            with pytest.raises(InvalidInput, match="7 days"):
                await sign
    assert "se=" in open_store("azure://container/").sign(fragment, 604801)


@pytest.mark.usefixtures("_aws")
def test_s3_needs_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="no AWS region is known"):
        open_store("s3://bucket/")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert "eu-west-1" in open_store("s3://bucket/").sign(fragment_of(CONTENT), 60)


@pytest.mark.usefixtures("_aws")
def test_s3_stores_use_aws_profiles(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = TEAMKEY\naws_secret_access_key = x\n")
    (tmp_path / "config").write_text("[profile team]\nregion = ap-south-1\n")
    signed = open_store("s3://bucket/?profile=team").sign(fragment_of(CONTENT), 60)
    assert "ap-south-1" in signed
    assert "TEAMKEY" in signed


def rsa_key() -> str:
    """A key of 2048 bits in PEM, of two well-known primes."""

    def der(tag: int, body: bytes) -> bytes:
        length = len(body).to_bytes(3, "big").lstrip(b"\0")
        return bytes([tag]) + (length if len(body) < 128 else bytes([0x80 | len(length)]) + length) + body

    def integer(value: int) -> bytes:
        return der(2, value.to_bytes(value.bit_length() // 8 + 1, "big"))

    p, q, e = 2**1024 - 105, 3 * 2**1022 - 91, 65537
    d = pow(e, -1, (p - 1) * (q - 1))
    numbers = (0, p * q, e, d, p, q, d % (p - 1), d % (q - 1), pow(q, -1, p))
    pkcs1 = der(0x30, b"".join(map(integer, numbers)))
    algorithm = bytes.fromhex("300d06092a864886f70d0101010500")
    pkcs8 = der(0x30, integer(0) + algorithm + der(4, pkcs1))
    kind = "PRIVATE KEY"
    return f"-----BEGIN {kind}-----\n{base64.encodebytes(pkcs8).decode()}-----END {kind}-----\n"


def set_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set credentials of Google and Azure by their environment variables."""
    key = {
        "type": "service_account",
        "private_key_id": "1",
        "private_key": rsa_key(),
        "client_email": "broker@example.iam.gserviceaccount.com",
    }
    path = tmp_path / "key.json"
    path.write_text(json.dumps(key))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_ACCOUNT_KEY", base64.b64encode(b"k" * 32).decode())


def test_gs_urls_are_signed_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch, tmp_path)
    signed = urlsplit(open_store("gs://bucket/p/").sign(fragment_of(CONTENT), 60))
    assert signed.path.startswith("/bucket/p/flights/events/") or signed.netloc.startswith("bucket.")
    assert "broker%40example" in signed.query


def test_azure_urls_are_signed_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch, tmp_path)
    fragment = fragment_of(CONTENT)
    signed = urlsplit(open_store("azure://container/p/").sign(fragment, 60))
    assert signed.netloc == "account.blob.core.windows.net"
    assert signed.path == f"/container/p/{fragment.content_path}"
    assert parse_qs(signed.query)["sp"] == ["r"]


def test_azure_needs_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("AZURE_ACCOUNT_NAME", "AZURE_ACCOUNT_KEY", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInput, match="AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_KEY"):
        open_store("azure://container/")
    with pytest.raises(InvalidInput, match="AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"):
        open_store("azure-ad://tenant/account/container/")
    monkeypatch.setenv("AZURE_CLIENT_ID", "id")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "secret")
    assert open_store("azure-ad://tenant/account/container/").url == "azure-ad://tenant/account/container/"


# ------------------------------------------------------------------------------ an S3 endpoint that records requests


class Recorder(ThreadingHTTPServer):
    """Answers every PUT with success, or every request with `status` and `body`."""

    status = 200
    body = b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []


class RecordingHandler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        server = self.server
        assert isinstance(server, Recorder)
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        server.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.send_response(server.status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(server.body)))
        self.end_headers()
        self.wfile.write(server.body)

    do_PUT = do_GET = do_HEAD = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    server = Recorder()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.usefixtures("_aws")
async def test_s3_uploads_have_the_arguments_of_the_url(recorder: Recorder) -> None:
    endpoint = f"http%3A%2F%2F127.0.0.1:{recorder.server_port}"
    store = open_store(
        f"s3://bucket/p/?region=us-east-1&endpoint={endpoint}&acl=private&storageClass=STANDARD_IA"
        "&sse=aws%3Akms&sseKmsKeyId=key-1"
    )
    fragment = fragment_of(CONTENT, Codec.GZIP_OFFLOAD_DECOMPRESSION)
    await put(store, fragment)
    ((command, path, headers, body),) = recorder.requests
    assert (command, path) == ("PUT", f"/bucket/p/{fragment.content_path}")
    assert body == compress(fragment.codec, CONTENT)
    expected = {
        "content-encoding": "gzip",
        "x-amz-acl": "private",
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "key-1",
    }
    assert {name: headers.get(name) for name in expected} == expected
    signed = headers["authorization"].split("SignedHeaders=")[1].split(",")[0].split(";")
    assert set(expected) <= set(signed)


@pytest.mark.usefixtures("_aws")
async def test_refusals_are_distinguished(recorder: Recorder) -> None:
    store = open_store(f"s3://bucket/?region=x&endpoint=http%3A%2F%2F127.0.0.1:{recorder.server_port}")
    fragment = fragment_of(CONTENT)
    recorder.status = 403
    with pytest.raises(StoreDenied, match="Check the store's credentials"):
        await store.get(fragment)
    recorder.status = 404
    with pytest.raises(FragmentNotFound):
        await store.get(fragment)
    assert not await store.exists(fragment)
    recorder.status = 400
    with pytest.raises(StoreError) as caught:
        await store.exists(fragment)
    assert caught.type is StoreError
    assert caught.value.retriable


@pytest.mark.usefixtures("_aws")
@pytest.mark.parametrize(
    ("variable", "path", "url", "key"),
    [
        ("AWS_ENDPOINT_URL", "", "s3://bucket/p/?region=x", "/bucket/p/"),
        ("GOOGLE_BASE_URL", "", "gs://bucket/p/", "/bucket/p/"),
        ("AZURE_ENDPOINT", "/account", "azure://bucket/p/", "/account/bucket/p/"),
    ],
)
async def test_endpoints_are_read_from_the_environment(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, path: str, url: str, key: str
) -> None:
    """Emulators and private endpoints are configured by name, without TLS for an http URL."""
    set_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv(variable, f"http://127.0.0.1:{recorder.server_port}{path}")
    monkeypatch.setenv(f"{variable.split('_')[0]}_USER_AGENT", "told by the environment")
    store = open_store(url)
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    ((command, target, headers, body),) = recorder.requests
    assert (command, unquote(target)) == ("PUT", key + fragment.content_path)
    assert headers["authorization"].split()[0] in ("AWS4-HMAC-SHA256", "Bearer", "SharedKey")
    assert headers["user-agent"] == "told by the environment"
    assert body == compress(fragment.codec, CONTENT)
    assert store.sign(fragment, 60).startswith(f"http://127.0.0.1:{recorder.server_port}{key}")
    recorder.status = 404
    with pytest.raises(StoreError, match=r"there is no such (bucket|container)"):
        await put(store, fragment)
    recorder.status, recorder.body = 400, b'{"error": "what is wrong"}'
    with pytest.raises(StoreError, match=r'400 Bad Request: \{"error": "what is wrong"}'):
        await store.get(fragment)
    recorder.status = 403
    recorder.body = b"<Error><Code>NotYou</Code><Message>Signature differs.\nRequestId:5\nTime:now</Message></Error>"
    with pytest.raises(StoreDenied, match=r"NotYou: Signature differs \(403 Forbidden\)\. Check") as caught:
        await store.get(fragment)
    assert "\n" not in str(caught.value)
