"""Behaviour specific to S3 stores: arguments of URLs, signatures, and refusals. This server verifies signatures."""

from __future__ import annotations

import gzip
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from structlog.testing import capture_logs

from coranto.errors import FragmentNotFound, StoreDenied, StoreError
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec
from coranto.fragments.stores import open_store
from coranto.testing.fragments import CONTENT, fragment_of, listed, put, read_directly
from tests.servers.s3 import ANY_KEY, REGION, AwsKey, S3Server

BUCKET = "bucket"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set a key for servers that do not verify signatures, and hide the credentials of the caller."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    sign_with(ANY_KEY, monkeypatch)


@pytest.fixture
def verifying(server: S3Server) -> Iterator[S3Server]:
    """The server; `require_signatures` is reset after the test."""
    yield server
    server.require_signatures(False)


def sign_with(key: AwsKey, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in key.environment.items():
        monkeypatch.setenv(name, value)


def get(url: str, **headers: str) -> bytes:
    """Get a URL as any HTTP client does, without support for S3."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
        content: bytes = response.read()
    return content


# ---------------------------------------------------------------------------------------------------------- uploads


async def test_uploads_carry_the_urls_arguments(server: S3Server, tmp_path: Path) -> None:
    store = open_store(
        server.store_url(BUCKET, f"{tmp_path.name}/", acl="public-read", storageClass="STANDARD_IA", sse="AES256")
    )
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    key = f"{tmp_path.name}/{fragment.content_path}"
    headers = server.headers(BUCKET, key)
    assert headers["x-amz-storage-class"] == "STANDARD_IA"
    assert headers["x-amz-server-side-encryption"] == "AES256"
    acl = server.acl(BUCKET, key)
    assert "global/AllUsers" in acl
    assert "READ" in acl
    assert await store.read(fragment) == CONTENT
    assert [found.end for found in await listed(store, fragment.journal)] == [len(CONTENT)]
    # The object is public: GET needs no signature.
    assert gzip.decompress(get(f"{server.endpoint}/{BUCKET}/{key}")) == CONTENT


async def test_uploads_use_a_kms_key(server: S3Server, tmp_path: Path) -> None:
    store = open_store(server.store_url(BUCKET, f"{tmp_path.name}/", sse="aws:kms", sseKmsKeyId="key-1"))
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    headers = server.headers(BUCKET, f"{tmp_path.name}/{fragment.content_path}")
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
    assert await store.read(fragment) == CONTENT


async def test_without_arguments_uploads_are_plain(server: S3Server, tmp_path: Path) -> None:
    store = open_store(server.store_url(BUCKET, f"{tmp_path.name}/"))
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    key = f"{tmp_path.name}/{fragment.content_path}"
    headers = server.headers(BUCKET, key)
    assert "x-amz-server-side-encryption-aws-kms-key-id" not in headers
    assert "x-amz-storage-class" not in headers
    assert "content-encoding" not in headers
    assert "AllUsers" not in server.acl(BUCKET, key)


async def test_offloaded_compression_is_declared_and_read_back(server: S3Server, tmp_path: Path) -> None:
    """The object declares its encoding, and readers get the stored bytes."""
    store = open_store(server.store_url(BUCKET, f"{tmp_path.name}/"))
    fragment = fragment_of(CONTENT, Codec.GZIP_OFFLOAD_DECOMPRESSION)
    await put(store, fragment)
    assert server.headers(BUCKET, f"{tmp_path.name}/{fragment.content_path}")["content-encoding"] == "gzip"
    assert await store.get(fragment) == compress(fragment.codec, CONTENT)
    assert await store.read(fragment) == CONTENT
    assert await read_directly(fragment, store.sign(fragment, 60), 0, fragment.end) == CONTENT


async def test_objects_can_be_found_and_replaced_by_url_rewriting(server: S3Server, tmp_path: Path) -> None:
    store = open_store(server.store_url(BUCKET, f"{tmp_path.name}/", find="/events/", replace="/archive/"))
    fragment = fragment_of(CONTENT, journal="flights/events/part-000")
    await put(store, fragment)
    assert server.headers(BUCKET, f"{tmp_path.name}/flights/archive/part-000/{fragment.content_name}")
    (found,) = await listed(store, fragment.journal)
    assert found.journal == "flights/events/part-000"
    assert await store.read(found) == CONTENT


async def test_foreign_objects_are_skipped(server: S3Server, tmp_path: Path) -> None:
    store = open_store(server.store_url(BUCKET, f"{tmp_path.name}/"))
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    server.put(BUCKET, f"{tmp_path.name}/flights/events/README", b"hello")
    assert len(await listed(store, "flights/events")) == 1


# -------------------------------------------------------------------------------------------------------- signed URLs


@pytest.mark.parametrize(
    "journal", ["flights/events", "a/region=eu/part-000", "a/100%/b%2Fc/%41", "été/漢字/Ω=٣", "a+b/c_d.e/-x"]
)
def test_urls_are_signed_as_aws_signs(server: S3Server, monkeypatch: pytest.MonkeyPatch, journal: str) -> None:
    """Compare with the URL that AWS's own library makes at the same time, for names that need all kinds of escapes."""
    url = open_store(server.store_url(BUCKET, "p/")).sign(fragment_of(CONTENT, journal=journal), 300)
    ours = parse_qs(urlsplit(url).query)
    assert ours["X-Amz-Expires"] == ["300"]
    assert ours["X-Amz-SignedHeaders"] == ["host"]
    when = datetime.strptime(ours["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: when)
    request = AWSRequest("GET", url.partition("?")[0])
    S3SigV4QueryAuth(Credentials(ANY_KEY.id, ANY_KEY.secret), "s3", REGION, expires=300).add_auth(request)
    assert parse_qs(urlsplit(request.url).query) == ours


async def test_a_signed_url_serves_ranges(server: S3Server, tmp_path: Path) -> None:
    store = open_store(server.store_url(BUCKET, f"{tmp_path.name}/"))
    fragment = fragment_of(CONTENT, Codec.NONE)
    await put(store, fragment)
    assert get(store.sign(fragment, 60), Range="bytes=5-14") == CONTENT[5:15]


async def test_a_signed_url_of_a_removed_fragment_is_not_found(server: S3Server, tmp_path: Path) -> None:
    store = open_store(server.store_url(BUCKET, f"{tmp_path.name}/"))
    fragment = fragment_of(CONTENT)
    with pytest.raises(StoreError, match="404") as caught:
        await read_directly(fragment, store.sign(fragment, 60), 0, 1)
    assert "X-Amz-Signature" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- keys and permissions


async def test_every_kind_of_request_is_signed_correctly(verifying: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    key = verifying.add_user("writer", "s3:*")
    sign_with(key, monkeypatch)
    verifying.require_signatures()
    store = open_store(verifying.store_url(BUCKET, "signed/", acl="private", storageClass="STANDARD_IA", sse="AES256"))
    fragment = fragment_of(CONTENT, journal="a/region=eu/part-000")
    await put(store, fragment)
    assert await store.exists(fragment)
    assert await store.read(fragment) == CONTENT
    assert len(await listed(store, fragment.journal)) == 1
    await store.remove(fragment)
    assert not await store.exists(fragment)


async def test_a_profiles_key_is_used(verifying: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = verifying.add_user("profiled", "s3:*")
    (tmp_path / "credentials").write_text(
        f"[team]\naws_access_key_id = {key.id}\naws_secret_access_key = {key.secret}\n"
    )
    verifying.require_signatures()
    fragment = fragment_of(CONTENT, journal="profile/test")
    await put(open_store(verifying.store_url(BUCKET, profile="team")), fragment)
    with pytest.raises(StoreDenied, match="InvalidAccessKeyId"):
        await put(open_store(verifying.store_url(BUCKET)), fragment)


@pytest.mark.parametrize(
    ("wrong", "problem"), [("id", "InvalidAccessKeyId: The AWS Access Key Id"), ("secret", "SignatureDoesNotMatch")]
)
async def test_a_wrong_key_is_refused(
    verifying: S3Server, monkeypatch: pytest.MonkeyPatch, wrong: str, problem: str
) -> None:
    key = verifying.add_user(f"with-wrong-{wrong}", "s3:*")
    sign_with(AwsKey(key.id if wrong == "secret" else "AKIANOBODY", "nonsense"), monkeypatch)
    verifying.require_signatures()
    store = open_store(verifying.store_url(BUCKET))
    fragment = fragment_of(CONTENT)
    for call in (put(store, fragment), store.get(fragment), listed(store, fragment.journal), store.remove(fragment)):
        with pytest.raises(StoreDenied, match=problem) as caught:
            await call
        assert "Check the store's credentials" in str(caught.value)
        assert "nonsense" not in str(caught.value)
    # The answer to HEAD has no body.
    with pytest.raises(StoreDenied, match="403 Forbidden"):
        await store.exists(fragment)


async def test_operations_without_permission_are_refused(verifying: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = verifying.add_user("only-puts", "s3:PutObject")
    reader = verifying.add_user("only-reads", "s3:GetObject", "s3:ListBucket")
    verifying.require_signatures()
    fragment = fragment_of(CONTENT, journal="granted/test")
    sign_with(writer, monkeypatch)
    store = open_store(verifying.store_url(BUCKET))
    await put(store, fragment)
    for call in (store.get(fragment), listed(store, fragment.journal), store.remove(fragment)):
        with pytest.raises(StoreDenied, match="AccessDenied: Access Denied"):
            await call
    sign_with(reader, monkeypatch)
    store = open_store(verifying.store_url(BUCKET))
    assert await store.read(fragment) == CONTENT
    assert len(await listed(store, fragment.journal)) == 1
    for call in (put(store, fragment), store.remove(fragment)):
        with pytest.raises(StoreDenied, match="AccessDenied: Access Denied"):
            await call


# ------------------------------------------------------------------------------------------- no bucket, and no server


async def test_a_missing_bucket_is_reported(server: S3Server) -> None:
    store = open_store(server.store_url("elsewhere"))
    fragment = fragment_of(CONTENT)
    calls = [put(store, fragment), store.get(fragment), listed(store, fragment.journal), store.remove(fragment)]
    for call in calls:
        with pytest.raises(StoreError, match="no such bucket") as caught:
            await call
        assert not isinstance(caught.value, FragmentNotFound)
        assert "s3://elsewhere/" in str(caught.value)


async def test_an_unavailable_server_is_reported(server: S3Server, tmp_path: Path) -> None:
    with S3Server(tmp_path) as away:
        store = open_store(away.store_url(BUCKET))
    fragment = fragment_of(CONTENT)
    with pytest.raises(StoreError, match=r"no connection to the service \(Connection refused\)") as caught:
        await store.exists(fragment)
    assert caught.type is StoreError
    assert caught.value.retriable
    with pytest.raises(StoreError, match=r"cannot read fragment .*refused"):
        await read_directly(fragment, store.sign(fragment, 60), 0, 1)


async def test_placeholders_of_folders_are_ignored_without_a_report(server: S3Server, tmp_path: Path) -> None:
    """Consoles and tools write empty objects for folders: `folder/`, and Hadoop's `folder_$folder$`."""
    store = open_store(server.store_url(BUCKET, f"{tmp_path.name}/"))
    fragment = fragment_of(CONTENT)
    await put(store, fragment)
    folder = f"{tmp_path.name}/{fragment.journal}"
    for key in (f"{folder}/", f"{folder}/date=2026-01-01/", f"{folder}/date=2026-01-02_$folder$", f"{folder}/other/"):
        server.put(BUCKET, key, b"")
    with capture_logs() as logs:
        listing = await store.listing(fragment.journal, lambda: [f"{fragment.journal}/other"])
    assert [each.content_name for each in listing.fragments] == [fragment.content_name]
    assert listing.others == frozenset()
    assert {each["log_level"] for each in logs} <= {"debug"}
    server.put(BUCKET, f"{folder}/notes.txt", b"text")
    with capture_logs() as logs:
        await store.listing(fragment.journal)
    assert [(each["event"], each["path"]) for each in logs if each["log_level"] == "warning"] == [
        ("store.file_skipped", "notes.txt")
    ]
