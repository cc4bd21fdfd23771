"""Reading fragments by URL, over HTTP as from object stores, including fragments too large for memory."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.client import direct
from coranto.client.direct import DirectReader
from coranto.errors import CorruptFragment, StoreError
from coranto.fragments import codecs
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.testing.http_store import HttpStore

CONTENT = b"a line of content, again and again\n" * 5000


@pytest.fixture
def store() -> Iterator[HttpStore]:
    with HttpStore() as store:
        yield store


def fragment(codec: Codec, content: bytes = CONTENT, begin: int = 1000) -> Fragment:
    return Fragment("test/journal", begin, begin + len(content), sum_of(content), codec, "s3://bucket/", 1)


async def read(reader: DirectReader, wanted: Fragment, url: str, begin: int, end: int) -> bytes:
    return b"".join([piece async for piece in reader.read(wanted, url, begin, end)])


def test_readable_urls(tmp_path: Path) -> None:
    without, rooted = DirectReader(None), DirectReader(tmp_path)
    assert without.can_read("https://bucket/object?signature=x")
    assert not without.can_read("file:///object")
    assert rooted.can_read("file:///object")
    assert not rooted.can_read("gs://bucket/object")


@pytest.mark.parametrize("codec", Codec, ids=lambda codec: codec.name)
async def test_objects_are_read_over_http(store: HttpStore, codec: Codec) -> None:
    store.objects["/object?sig=1"] = (codecs.compress(codec, CONTENT), "")
    found = await read(DirectReader(None), fragment(codec), f"{store.url}/object?sig=1", 1500, 2500)
    assert found == CONTENT[500:1500]
    assert store.accepted == ["identity"]


@pytest.mark.parametrize("undone", [True, False], ids=["undone by the store", "left by the store"])
async def test_an_offloaded_object_is_accepted_decompressed_or_not(store: HttpStore, undone: bool) -> None:
    store.objects["/object"] = (CONTENT, "") if undone else (gzip.compress(CONTENT), "gzip")
    wanted = fragment(Codec.GZIP_OFFLOAD_DECOMPRESSION)
    assert await read(DirectReader(None), wanted, f"{store.url}/object", wanted.begin, wanted.end) == CONTENT


async def test_a_refusal_of_the_store_names_the_fragment(store: HttpStore) -> None:
    with pytest.raises(StoreError, match=r"test/journal/00.*403"):
        await read(DirectReader(None), fragment(Codec.NONE), f"{store.url}/object", 1000, 1001)


async def test_a_truncated_response_is_corrupt(store: HttpStore) -> None:
    store.objects["/object"] = (CONTENT[:-1], "")
    with pytest.raises(CorruptFragment):
        await read(DirectReader(None), fragment(Codec.NONE), f"{store.url}/object", 1000, 1001)


@pytest.mark.parametrize("codec", Codec, ids=lambda codec: codec.name)
async def test_content_too_large_for_memory_uses_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    monkeypatch.setattr(direct, "_IN_MEMORY_BYTES", 1000)
    content = bytes(range(256)) * 12_000
    wanted = fragment(codec, content)
    (tmp_path / "object").write_bytes(codecs.compress(codec, content))
    reader = DirectReader(tmp_path)
    assert await read(reader, wanted, "file:///object", wanted.begin, wanted.end) == content
    assert await read(reader, wanted, "file:///object", wanted.end - 7, wanted.end) == content[-7:]
    with (tmp_path / "object").open("r+b") as file:
        file.seek(-100, 2)
        file.write(bytes(50))
    with pytest.raises(CorruptFragment):
        await read(reader, wanted, "file:///object", wanted.begin, wanted.end)


async def test_names_are_unquoted(tmp_path: Path) -> None:
    (tmp_path / "a=1%").mkdir()
    (tmp_path / "a=1%" / "object").write_bytes(CONTENT)
    wanted = fragment(Codec.NONE)
    found = await read(DirectReader(tmp_path), wanted, "file:///a=1%25/object", wanted.begin, wanted.end)
    assert found == CONTENT


@pytest.mark.parametrize("url", ["file:///../outside", "file:///a/%2e%2e/../outside"])
async def test_nothing_outside_the_root_is_read(tmp_path: Path, url: str) -> None:
    (tmp_path / "outside").write_bytes(CONTENT)
    (tmp_path / "root" / "a").mkdir(parents=True)
    with pytest.raises(StoreError, match="outside of the file root"):
        await read(DirectReader(tmp_path / "root"), fragment(Codec.NONE), url, 1000, 1001)
