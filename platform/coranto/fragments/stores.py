"""Fragment stores, which hold fragments as plain files or objects.

`open_store` opens the store of a URL (`coranto.fragments.store_urls`). Credentials come from the same places as for
each service's own tools: the AWS environment variables, shared credentials file or instance role; Google's application
default credentials; `AZURE_ACCOUNT_NAME` and `AZURE_ACCOUNT_KEY`, or `AZURE_CLIENT_ID` and `AZURE_CLIENT_SECRET`. For a
service at another address than its public one, set `AWS_ENDPOINT_URL` (or `?endpoint=`), `GOOGLE_BASE_URL` or
`AZURE_ENDPOINT`. An address that begins with `http://` is used without TLS.

A `file:///prefix/` store is below the `file_root` that it is opened with, so that one URL means the same store on
machines that mount it at different places. Its signed URLs leave the root out for the same reason. Without a root such
stores are refused: otherwise every user who may name a store could use the whole file system.

Errors of every service become `StoreError`, `StoreDenied` (credentials) or `FragmentNotFound`.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import math
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from coranto.errors import CorantoError, CorruptFragment, FragmentNotFound, InvalidInput
from coranto.fragments import aws_profile
from coranto.fragments.codecs import check_file_length, decompress
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.journal_folders import (
    MARKER,
    MARKER_TEXT,
    FolderListing,
    Names,
    StoredFile,
    assign_files,
    no_names,
)
from coranto.fragments.store_endpoints import AllowedEndpoints, first_of_environment
from coranto.fragments.store_errors import store_error
from coranto.fragments.store_urls import StoreUrl, parse_store_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

_log = structlog.get_logger(__name__)

_PARTIAL = ".partial-"
_EXIT_SECONDS: Final = 0.05
_MAX_SIGNED_SECONDS: Final = 7 * 24 * 60 * 60
_STREAM_BYTES: Final = 1 << 20
_IN_PLACE_BYTES: Final = 1 << 16  # Content up to this size is checked on the event loop itself.

Content = bytes | AsyncIterable[bytes]


class FragmentStore(ABC):
    """A store for the fragments of any number of journals, below one URL.

    Methods take and return files as stored, compressed by the fragment's codec. Only `read` decompresses. A store
    ignores `Fragment.backing_store`. All calls can be cancelled. A cancelled `put` leaves no fragment behind, but the
    service may keep parts of an upload for a while.
    """

    url: str
    has_placeholders = False
    """True if tools represent a folder by an empty object. Its key ends in a slash, which listings here omit."""

    @abstractmethod
    async def put(self, fragment: Fragment, content: Content) -> None:
        """Store a fragment's compressed file atomically. When `put` returns, the file survives power loss.

        Replaces a fragment of the same name. Raises StoreError, and the errors of iterating over `content`. After an
        error of `content`, nothing was stored or replaced under the fragment's name.
        """

    @abstractmethod
    async def size(self, fragment: Fragment) -> int | None:
        """Return the bytes of the fragment's file; None if it is absent. Raises StoreError if that is unknown."""

    async def exists(self, fragment: Fragment) -> bool:
        """Return True if the fragment's file exists. Raises StoreError if that is unknown."""
        return await self.size(fragment) is not None

    @abstractmethod
    def files(self, journal: str) -> AsyncIterator[StoredFile]:
        """Yield every file below a journal's folder, including other journals' files, unordered. Raises StoreError."""

    @abstractmethod
    async def mark(self, journal: str) -> None:
        """Write the marker that makes a folder the journal's (`coranto.fragments.journal_folders`).

        Raises StoreError.
        """

    async def listing(self, journal: str, names: Names = no_names) -> FolderListing:
        """List a journal's folder, with files assigned to journals by `coranto.fragments.journal_folders`.

        `names` returns the names of existing journals, and is called after all files were listed. Files without a
        fragment's name are skipped with a log line, except for placeholders of folders. Raises StoreError.
        """
        files = [each async for each in self.files(journal)]
        placeholders = {each.path for each in files if each.size == 0} if self.has_placeholders else frozenset()
        found = assign_files(journal, files, names(), backing_store=self.url)
        for path, reason in found.unreadable:
            # Uploads in progress, or interrupted by a crash, are normal.
            unfinished = path.rpartition("/")[2].startswith(_PARTIAL)
            level = logging.DEBUG if unfinished or path in placeholders else logging.WARNING
            _log.log(level, "store.file_skipped", store=self.url, journal=journal, path=path, reason=reason)
        return found

    async def list(self, journal: str, names: Names = no_names) -> AsyncIterator[Fragment]:
        """Yield the journal's fragments of `listing`, with `backing_store`, `mod_time` and `file_bytes` set."""
        for fragment in (await self.listing(journal, names)).fragments:
            yield fragment

    @abstractmethod
    async def get(self, fragment: Fragment) -> bytes:
        """Return the fragment's file as stored. Raises FragmentNotFound and StoreError.

        Also raises CorruptFragment when the file is far longer than the fragment's content, and reads no more of it.
        """

    async def stream(self, fragment: Fragment) -> AsyncIterator[bytes]:
        """Yield the fragment's file as stored, in pieces. Raises FragmentNotFound or StoreError."""
        yield await self.get(fragment)

    @abstractmethod
    def sign(self, fragment: Fragment, ttl_seconds: float) -> str:
        """Return a URL that grants GET without credentials for `ttl_seconds`.

        May request credentials from the service, and so block briefly: prefer `sign_async` in an event loop. Raises
        StoreError, and InvalidInput if the service does not sign for that long.
        """

    @abstractmethod
    async def sign_async(self, fragment: Fragment, ttl_seconds: float) -> str:
        """Return a signed URL like `sign`, without blocking the event loop."""

    @abstractmethod
    async def remove(self, fragment: Fragment) -> None:
        """Remove a fragment; no error when it is absent. Raises StoreError."""

    @abstractmethod
    async def put_note(self, path: str, content: bytes) -> None:
        """Store a file that is not a fragment at `path` below the store's prefix, atomically.

        The file survives power loss, like a fragment. Replaces an existing file. Raises StoreError.
        """

    @abstractmethod
    async def get_note(self, path: str) -> bytes:
        """Return the content of a file that is not a fragment. Raises FragmentNotFound and StoreError."""

    @abstractmethod
    async def remove_note(self, path: str) -> None:
        """Remove a file that is not a fragment; no error when it is absent. Raises StoreError."""

    async def read(self, fragment: Fragment) -> bytes:
        """Return the fragment's uncompressed content, after verifying its length and SHA-1.

        Raises CorruptFragment, FragmentNotFound or StoreError.
        """
        data = await self.get(fragment)
        if fragment.length <= _IN_PLACE_BYTES and len(data) <= _IN_PLACE_BYTES:
            return verified_content(fragment, data, source=self.url)
        return await asyncio.to_thread(verified_content, fragment, data, source=self.url)


def verified_content(fragment: Fragment, data: bytes, *, source: str) -> bytes:
    """Return the verified content of a fragment whose file is `data`. `source` is for error messages.

    Raises CorruptFragment if the file cannot be decompressed, or its content differs from the name's length or SHA-1.
    """
    try:
        content = decompress(fragment.codec, data, fragment.length)
    except CorruptFragment as err:
        raise CorruptFragment(f"{fragment.content_path} in {source}: {err}") from err
    if (actual := sum_of(content)) != fragment.sum:
        raise CorruptFragment(
            f"{fragment.content_path} in {source}: its content has the SHA-1 {actual.hex()}. "
            "The file was changed or damaged: restore it from a copy, or remove it."
        )
    return content


class ObjectStoreFragments(FragmentStore):
    """A store in a cloud's object storage."""

    has_placeholders = True

    def __init__(self, url: StoreUrl, store: ObjectStore, *, write_store: ObjectStore | None = None) -> None:
        """`write_store` is used for `put`, when writing needs headers that reading must not send."""
        self.url = url.text
        self._url = url
        self._store = store
        self._write_store = store if write_store is None else write_store

    async def put(self, fragment: Fragment, content: Content) -> None:
        attributes: dict[str, str] = {}
        if fragment.codec is Codec.GZIP_OFFLOAD_DECOMPRESSION:
            attributes["Content-Encoding"] = "gzip"
        if storage_class := self._url.options.get("storageClass"):
            attributes["Storage-Class"] = storage_class
        with self._errors("put", fragment.content_path):
            await obstore.put_async(self._write_store, self._key(fragment), content, attributes=attributes or None)

    async def size(self, fragment: Fragment) -> int | None:
        try:
            with self._errors("look up", fragment.content_path):
                return (await obstore.head_async(self._store, self._key(fragment)))["size"]
        except FragmentNotFound:
            return None

    async def files(self, journal: str) -> AsyncIterator[StoredFile]:
        folder = self._url.key(journal + "/")
        with self._errors("list", journal):
            async for batch in obstore.list(self._store, folder):
                for meta in batch:
                    path = meta["path"]
                    if path.startswith(folder):  # The placeholder of the folder itself comes without its slash.
                        modified = int(meta["last_modified"].timestamp())
                        yield StoredFile(path.removeprefix(folder), modified, meta["size"])

    async def mark(self, journal: str) -> None:
        path = f"{journal}/{MARKER}"
        with self._errors("mark", journal):
            await obstore.put_async(self._write_store, self._url.key(path), MARKER_TEXT)

    async def get(self, fragment: Fragment) -> bytes:
        with self._errors("get", fragment.content_path):
            content = bytearray()
            result = await obstore.get_async(self._store, self._key(fragment))
            self._check_length(fragment, int(result.meta["size"]))
            async for piece in result.stream(min_chunk_size=_STREAM_BYTES):
                content += piece
                self._check_length(fragment, len(content))
            return bytes(content)

    async def stream(self, fragment: Fragment) -> AsyncIterator[bytes]:
        with self._errors("get", fragment.content_path):
            result = await obstore.get_async(self._store, self._key(fragment))
            async for piece in result.stream(min_chunk_size=_STREAM_BYTES):
                yield bytes(piece)

    def _check_length(self, fragment: Fragment, length: int) -> None:
        """Raise CorruptFragment for a file that is too long. A store is not trusted, and might send endlessly."""
        try:
            check_file_length(fragment.length, length)
        except CorruptFragment as err:
            raise CorruptFragment(f"{fragment.content_path} in {self.url}: {err}") from err

    def sign(self, fragment: Fragment, ttl_seconds: float) -> str:
        with self._errors("sign", fragment.content_path):
            return obstore.sign(self._signer(), "GET", self._key(fragment), self._lifetime(ttl_seconds))

    async def sign_async(self, fragment: Fragment, ttl_seconds: float) -> str:
        with self._errors("sign", fragment.content_path):
            return await obstore.sign_async(self._signer(), "GET", self._key(fragment), self._lifetime(ttl_seconds))

    def _lifetime(self, ttl_seconds: float) -> timedelta:
        """Return a URL's lifetime, rounded up to whole seconds. Raises InvalidInput beyond a week on S3 and GCS.

        Both refuse such URLs, but one of them only when the URL is used.
        """
        if ttl_seconds > _MAX_SIGNED_SECONDS and self._url.scheme in ("s3", "gs"):
            raise InvalidInput(
                f"{ttl_seconds:.0f} s is longer than a URL of {self._url.scheme}:// can be good for, which is "
                f"{_MAX_SIGNED_SECONDS} s (7 days)",
                field="signatureTTL",
            )
        return timedelta(seconds=max(1, math.ceil(ttl_seconds)))

    async def remove(self, fragment: Fragment) -> None:
        with suppress(FragmentNotFound), self._errors("remove", fragment.content_path):
            await obstore.delete_async(self._store, self._key(fragment))

    async def put_note(self, path: str, content: bytes) -> None:
        with self._errors("put", path):
            await obstore.put_async(self._write_store, self._url.key(path), content)

    async def get_note(self, path: str) -> bytes:
        with self._errors("get", path):
            result = await obstore.get_async(self._store, self._url.key(path))
            return bytes(await result.bytes_async())

    async def remove_note(self, path: str) -> None:
        with suppress(FragmentNotFound), self._errors("remove", path):
            await obstore.delete_async(self._store, self._url.key(path))

    def _signer(self) -> Any:
        return self._store

    def _key(self, fragment: Fragment) -> str:
        return self._url.key(fragment.content_path)

    @contextmanager
    def _errors(self, action: str, subject: str) -> Iterator[None]:
        """Turn errors of the service into errors of Coranto."""
        try:
            yield
        except CorantoError:
            raise
        except (BaseError, OSError, ValueError) as err:
            raise store_error(action, subject, self.url, err) from err


class FileFragments(ObjectStoreFragments):
    """A store in folders of this machine, or of a mounted file system.

    This class writes files itself, because the object store library doesn't sync them to disk.
    """

    has_placeholders = False  # File systems have real folders.

    def __init__(self, url: StoreUrl, root: Path) -> None:
        super().__init__(url, LocalStore(prefix=root))
        self._root = root

    async def put(self, fragment: Fragment, content: Content) -> None:
        if fragment.codec is Codec.GZIP_OFFLOAD_DECOMPRESSION:
            raise InvalidInput(
                f"{fragment.codec.name} needs a store that decompresses, and {self.url} doesn't; use GZIP",
                field="compression_codec",
            )
        target = self._root / self._key(fragment)
        with self._errors("put", fragment.content_path):
            partial = await asyncio.to_thread(_create_partial, target)
            try:
                if isinstance(content, bytes):
                    await asyncio.to_thread(_append, partial, content)
                else:
                    async for chunk in content:
                        await asyncio.to_thread(_append, partial, chunk)
                await asyncio.to_thread(_commit, partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    async def put_note(self, path: str, content: bytes) -> None:
        target = self._root / self._url.key(path)
        with self._errors("put", path):
            partial = await asyncio.to_thread(_create_partial, target)
            try:
                await asyncio.to_thread(_append, partial, content)
                await asyncio.to_thread(_commit, partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def sign(self, fragment: Fragment, ttl_seconds: float) -> str:
        return "file:///" + quote(self._key(fragment), safe="/=+")

    async def sign_async(self, fragment: Fragment, ttl_seconds: float) -> str:
        return self.sign(fragment, ttl_seconds)


def open_store(url: str, *, file_root: Path | None = None, endpoints: AllowedEndpoints | None = None) -> FragmentStore:
    """Return the store of a URL. Nothing is read or written yet, so an unreachable store raises errors only later.

    `file_root` is the root folder of `file://` stores, which are refused without it. `endpoints` are the addresses that
    the URL may name. None allows any address, for a URL that the user of this process wrote. Raises InvalidInput when
    the URL, its arguments or its credentials are not valid.
    """
    parsed = parse_store_url(url)
    if endpoints is not None:
        endpoints.require(parsed)
    _delay_exit()
    try:
        if parsed.scheme == "file":
            root = _require_root(url, file_root)
            root.mkdir(parents=True, exist_ok=True)
            return FileFragments(parsed, root)
        if parsed.scheme == "s3":
            return _open_s3(parsed)
        if parsed.scheme == "gs":
            return ObjectStoreFragments(parsed, GCSStore(parsed.bucket))
        return ObjectStoreFragments(parsed, _azure(parsed))
    except (BaseError, OSError, ValueError) as err:
        if isinstance(err, InvalidInput):
            raise
        raise InvalidInput(f"{url!r} cannot be opened: {_first_line(err)}", field="store") from err


def open_objects(url: str, *, file_root: Path | None = None) -> tuple[ObjectStore, str]:
    """Return the library's store of a URL, for objects that are not fragments, and the prefix of the keys.

    Raises the errors of `open_store`.
    """
    opened = open_store(url, file_root=file_root)
    assert isinstance(opened, ObjectStoreFragments)
    return opened._store, opened._url.prefix


@functools.cache
def _delay_exit() -> None:
    """Delay process exit briefly.

    The library's threads clean up after a call whose result was already returned. A thread that needs the interpreter
    for this after interpreter shutdown aborts the process.
    """
    atexit.register(time.sleep, _EXIT_SECONDS)


def _open_s3(url: StoreUrl) -> FragmentStore:
    profile = aws_profile.load(url.options.get("profile", ""), os.environ)
    region = url.options.get("region") or profile.region
    if not region:
        raise InvalidInput(
            f"no AWS region is known for {url.text!r}; add ?region=… to it or set AWS_REGION", field="store"
        )
    config: dict[str, Any] = {"region": region}
    if profile.access_key_id:
        config |= {"access_key_id": profile.access_key_id, "secret_access_key": profile.secret_access_key}
        if profile.session_token:
            config["session_token"] = profile.session_token
    endpoint = url.options.get("endpoint") or first_of_environment()
    if endpoint:
        # A private endpoint rarely has a host name for each bucket.
        config |= {"endpoint": endpoint, "virtual_hosted_style_request": False, **_plain_if(endpoint)}
    if sse := url.options.get("sse"):
        config["server_side_encryption"] = sse
    if key_id := url.options.get("sseKmsKeyId"):
        config["sse_kms_key_id"] = key_id
    store = S3Store(url.bucket, config=config)  # type: ignore[arg-type]  # one of many keys
    if not (acl := url.options.get("acl")):
        return ObjectStoreFragments(url, store)
    # Only uploads send the ACL: as a default header of all requests, signed URLs would sign it too.
    with_acl: ClientConfig = {"allow_http": endpoint.startswith("http://"), "default_headers": {"x-amz-acl": acl}}
    write_store = S3Store(url.bucket, config=config, client_options=with_acl)  # type: ignore[arg-type]
    return ObjectStoreFragments(url, store, write_store=write_store)


def _azure(url: StoreUrl) -> AzureStore:
    config: dict[str, Any] = _plain_if(_first_variable("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"))
    if url.scheme == "azure":
        account, key = _environment(url, "AZURE_ACCOUNT_NAME", "AZURE_ACCOUNT_KEY")
        config |= {"account_name": account, "account_key": key}
        return AzureStore(url.bucket, config=config)  # type: ignore[arg-type]  # as above
    client_id, secret = _environment(url, "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET")
    config |= {
        "account_name": url.account,
        "tenant_id": url.tenant,
        "client_id": client_id,
        "client_secret": secret,
    }
    return AzureStore(url.bucket, config=config)  # type: ignore[arg-type]  # as above


def _plain_if(endpoint: str) -> dict[str, str]:
    """Return the option that allows an endpoint without TLS, which the library otherwise refuses.

    The option goes to the store's configuration, because client options would replace the environment's.
    """
    return {"allow_http": "true"} if endpoint.startswith("http://") else {}


def _first_variable(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


def _environment(url: StoreUrl, *names: str) -> list[str]:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise InvalidInput(f"{url.text!r} needs the environment variables {' and '.join(missing)}", field="store")
    return [os.environ[name] for name in names]


MAX_OPEN_STORES: Final = 256


class StoreRegistry:
    """The stores in use, each opened once. Beyond MAX_OPEN_STORES, drops the store that was opened first.

    The limit exists because the URLs come from specs, which users write.
    """

    def __init__(self, file_root: Path | None = None, endpoints: AllowedEndpoints | None = None) -> None:
        """`endpoints` are the addresses that URLs may name; by default those that the environment allows."""
        self.file_root = file_root
        self._endpoints = endpoints if endpoints is not None else AllowedEndpoints()
        self._stores: dict[str, FragmentStore] = {}

    def get(self, url: str) -> FragmentStore:
        """Return the store of a URL. Raises InvalidInput as `open_store` does, and tries again at the next call."""
        store = self._stores.get(url)
        if store is None:
            store = open_store(url, file_root=self.file_root, endpoints=self._endpoints)
            while len(self._stores) >= MAX_OPEN_STORES:
                self._stores.pop(next(iter(self._stores)), None)
            self._stores[url] = store
        return store

    def check(self, url: str) -> None:
        """Raise InvalidInput for a URL whose store may not be opened here. Credentials are not checked."""
        parsed = parse_store_url(url)
        self._endpoints.require(parsed)
        if parsed.scheme == "file":
            _require_root(url, self.file_root)


def _require_root(url: str, file_root: Path | None) -> Path:
    if file_root is None:
        raise InvalidInput(
            f"{url!r} is below a root folder that is unknown: give brokers --file-root, and commands and jobs that "
            "read files themselves $CORANTO_FILE_ROOT",
            field="store",
        )
    return file_root


def _create_partial(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    # The random part alone makes names unique. With the fragment's name added, the file name could be too long.
    descriptor, name = tempfile.mkstemp(prefix=_PARTIAL, dir=target.parent)
    os.fchmod(descriptor, 0o644)
    os.close(descriptor)
    return Path(name)


def _append(partial: Path, content: bytes) -> None:
    with partial.open("ab") as file:
        file.write(content)


def _commit(partial: Path, target: Path) -> None:
    """Sync a complete file, rename it to its final name, and sync its folder."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _first_line(err: Exception) -> str:
    return str(err).strip().split("\n", 1)[0] or type(err).__name__
