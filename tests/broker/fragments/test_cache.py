"""The cache of stored fragments: fetched once, verified, bounded in memory and on disk."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coranto.errors import CorruptFragment, FragmentNotFound, Unavailable
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.stores import StoreRegistry
from coranto_broker.fragments import cache as fragment_cache
from coranto_broker.fragments.cache import ENTRY_BYTES, LITTLE_BYTES, FragmentCache

MIB = 1 << 20


class Shop:
    """A store in a folder that counts fetches."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stores = StoreRegistry(root)
        self.store = self.stores.get("file:///frags/")
        self.fetched = 0
        self.gate = asyncio.Event()
        self.gate.set()
        stream = self.store.stream

        async def counted(fragment: Fragment) -> AsyncIterator[bytes]:
            self.fetched += 1
            await self.gate.wait()
            async for piece in stream(fragment):
                yield piece

        monkeypatch.setattr(self.store, "stream", counted)

    async def put(self, content: bytes, codec: Codec, *, begin: int = 0, file: bytes | None = None) -> Fragment:
        fragment = Fragment("a/journal", begin, begin + len(content), sum_of(content), codec, "file:///frags/")
        await self.store.put(fragment, compress(codec, content) if file is None else file)
        return fragment


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(tmp_path / "root", monkeypatch)


@contextlib.contextmanager
def little_memory(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def some(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size // 2) + bytes(size - size // 2)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
async def test_a_large_fragment_is_served_from_a_file(shop: Shop, tmp_path: Path, codec: Codec) -> None:
    content = some(24 * MIB + 7)
    fragment = await shop.put(content, codec)
    cache = FragmentCache(shop.stores, tmp_path / "cache", 100 * MIB)
    with little_memory(8 * MIB):
        async with cache.open(fragment) as found:
            assert found.read_at(0, 10) == content[:10]
            assert found.read_at(len(content) - 3, 10) == content[-3:]
            assert found.read_at(11 * MIB, MIB) == content[11 * MIB : 12 * MIB]
    async with cache.open(fragment), cache.open(fragment):
        assert shop.fetched == 1
    assert list((tmp_path / "cache").iterdir()) == [], "the files have no names"
    await cache.close()


async def test_the_overhead_of_tiny_fragments_counts(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragment_cache, "LITTLE_TOTAL_BYTES", 10 * ENTRY_BYTES)
    cache = FragmentCache(shop.stores, tmp_path / "cache", MIB)
    for begin in range(20):
        async with cache.open(await shop.put(b"x", Codec.NONE, begin=begin)) as found:
            assert found.read_at(0, 10) == b"x"
    assert len(cache._little._entries) == 9
    await cache.close()


async def test_small_fragments_are_kept_in_memory(shop: Shop, tmp_path: Path) -> None:
    fragment = await shop.put(b"hello", Codec.GZIP)
    cache = FragmentCache(shop.stores, tmp_path / "cache", 0)
    async with cache.open(fragment) as found:
        assert found.read_at(1, 3) == b"ell"
    assert not (tmp_path / "cache").exists()
    await cache.close()


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty"])
async def test_a_damaged_fragment_is_not_served(shop: Shop, tmp_path: Path, codec: Codec, damage: str) -> None:
    content = some(2 * MIB)
    good = compress(codec, content)
    file = {
        "flipped": good[:MIB] + bytes([good[MIB] ^ 1]) + good[MIB + 1 :],
        "short": good[:-20],
        "long": good * 3,
        "empty": b"",
    }[damage]
    fragment = await shop.put(content, codec, file=file)
    cache = FragmentCache(shop.stores, tmp_path / "cache", 100 * MIB)
    for _ in range(2):
        with pytest.raises(CorruptFragment, match=r"file:///frags/"):
            async with cache.open(fragment):
                pass
    assert shop.fetched == 2, "what failed is tried again"
    await shop.store.put(fragment, good)
    async with cache.open(fragment) as found:
        assert found.read_at(0, len(content)) == content
    await shop.store.remove(fragment)
    missing = await shop.put(content, codec, begin=10)
    await shop.store.remove(missing)
    with pytest.raises(FragmentNotFound):
        async with cache.open(missing):
            pass
    await cache.close()


async def test_concurrent_readers_share_one_fetch_which_outlives_each(shop: Shop, tmp_path: Path) -> None:
    content = some(2 * MIB)
    fragment = await shop.put(content, Codec.GZIP)
    cache = FragmentCache(shop.stores, tmp_path / "cache", 100 * MIB)

    async def read() -> bytes:
        async with cache.open(fragment) as found:
            return found.read_at(0, len(content))

    shop.gate.clear()
    readers = [asyncio.create_task(read()) for _ in range(5)]
    await asyncio.sleep(0)
    readers[0].cancel()
    shop.gate.set()
    gone, *found = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError)
    assert found == [content] * 4
    assert shop.fetched == 1
    await cache.close()


async def test_the_least_recently_used_are_evicted(shop: Shop, tmp_path: Path) -> None:
    fragments = [await shop.put(some(2 * MIB, n), Codec.SNAPPY, begin=n << 30) for n in range(3)]
    cache = FragmentCache(shop.stores, tmp_path / "cache", 5 * MIB)
    for number in (0, 1, 0, 2):  # 1 is evicted for 2.
        async with cache.open(fragments[number]):
            pass
    assert shop.fetched == 3
    async with cache.open(fragments[0]), cache.open(fragments[2]):
        assert shop.fetched == 3
    async with cache.open(fragments[1]):
        assert shop.fetched == 4
    await cache.close()


async def test_readers_of_too_many_fragments_wait_and_are_refused(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments = [await shop.put(some(2 * MIB, n), Codec.SNAPPY, begin=n << 30) for n in range(3)]
    cache = FragmentCache(shop.stores, tmp_path / "cache", 5 * MIB)
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(cache.open(fragments[0]))
        async with cache.open(fragments[1]):
            waiting = asyncio.create_task(held.enter_async_context(cache.open(fragments[2])))
            for _ in range(5):  # The refusal takes some turns of the loop, and no thread.
                await asyncio.sleep(0)
            assert [entry.is_admitted for entry in cache._large._entries.values()] == [True, True, False]
        await waiting  # The second was released.
        monkeypatch.setattr(fragment_cache, "TIMEOUT_SECONDS", 0.05)
        with pytest.raises(Unavailable, match="too many different fragments"):
            await held.enter_async_context(cache.open(fragments[1]))
    async with cache.open(fragments[1]):
        assert shop.fetched == 4
    await cache.close()


async def test_a_fragment_beyond_the_bound_is_served_alone_and_not_kept(shop: Shop, tmp_path: Path) -> None:
    fragment = await shop.put(some(LITTLE_BYTES + 1), Codec.ZSTANDARD)
    cache = FragmentCache(shop.stores, tmp_path / "cache", 1)
    for count in (1, 2):
        async with cache.open(fragment), cache.open(fragment):
            assert shop.fetched == count
    await cache.close()
