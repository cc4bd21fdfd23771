"""Contract tests for fragment stores, including custom ones.

In a test module, with pytest and pytest-asyncio::

    from coranto.testing.contracts.fragment_store import FragmentStoreContract

    class TestMyStore(FragmentStoreContract):
        @pytest.fixture
        def store(self):
            return MyStore(...)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.client.direct import DirectReader
from coranto.errors import CorruptFragment, FragmentNotFound
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec
from coranto.fragments.stores import FragmentStore
from coranto.testing.fragments import CONTENT, fragment_of, listed, put, read_directly


@pytest.mark.asyncio
class FragmentStoreContract:
    """Subclass it as `Test…`, with a fixture `store` that is empty at first."""

    @pytest.fixture
    def store(self) -> FragmentStore:
        raise NotImplementedError("a subclass provides the store to test")

    @pytest.fixture
    def file_root(self, tmp_path: Path) -> Path:
        """The root folder of URLs of a `file:///` store."""
        return tmp_path

    @pytest.mark.parametrize("pieces", [0, 1, 13])
    async def test_content_whose_last_piece_fails_gets_no_name_and_replaces_nothing(
        self, store: FragmentStore, pieces: int
    ) -> None:
        """In an S3 store, the largest content is uploaded in several parts."""
        fragment = fragment_of(CONTENT)

        async def content(*, fails: bool) -> AsyncIterator[bytes]:
            for _ in range(pieces):
                yield bytes(1 << 20)
            if fails:
                raise CorruptFragment("its SHA-1 is another")
            yield b"the end"

        with pytest.raises(CorruptFragment):
            await store.put(fragment, content(fails=True))
        assert await store.size(fragment) is None
        assert await listed(store, fragment.journal) == []
        await store.put(fragment, content(fails=False))
        with pytest.raises(CorruptFragment):
            await store.put(fragment, content(fails=True))
        assert await store.size(fragment) == (pieces << 20) + len(b"the end")
        (found,) = await listed(store, fragment.journal)
        assert found.file_bytes == (pieces << 20) + len(b"the end")

    @pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.GZIP_OFFLOAD_DECOMPRESSION])
    async def test_round_trip(self, store: FragmentStore, codec: Codec) -> None:
        fragment = fragment_of(CONTENT, codec)
        assert not await store.exists(fragment)
        await put(store, fragment)
        assert await store.exists(fragment)
        assert await store.get(fragment) == compress(codec, CONTENT)
        assert await store.read(fragment) == CONTENT
        (found,) = await listed(store, fragment.journal)
        assert found == replace(fragment, backing_store=store.url, mod_time=found.mod_time)
        assert found.mod_time > 0
        await store.remove(fragment)
        assert not await store.exists(fragment)
        assert await listed(store, fragment.journal) == []
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
    async def test_names_survive_and_signed_urls_read(
        self, store: FragmentStore, file_root: Path, journal: str, postfix: str
    ) -> None:
        fragment = fragment_of(CONTENT, journal=journal, postfix=postfix)
        await put(store, fragment)
        (found,) = await listed(store, journal)
        assert replace(found, backing_store="", mod_time=0) == fragment
        assert await store.read(found) == CONTENT
        for url in (store.sign(found, 60), await store.sign_async(found, 60)):
            assert DirectReader(file_root).can_read(url)
            assert await read_directly(found, url, 10, found.end - 10, file_root) == CONTENT[10:-10]

    async def test_a_listing_keeps_to_its_journal(self, store: FragmentStore) -> None:
        for journal in ("flights/events", "flights/events-late", "flights/event"):
            await put(store, fragment_of(CONTENT, journal=journal))
        assert [found.journal for found in await listed(store, "flights/events")] == ["flights/events"]
        assert await listed(store, "flights/none") == []

    async def test_listing_tells_nested_journals_apart(self, store: FragmentStore) -> None:
        for journal, postfix in (("flights/100%", "a=1"), ("flights/100%/eu", ""), ("flights/100%/eu", "b=1")):
            await put(store, fragment_of(CONTENT, journal=journal, postfix=postfix))
        mine = await store.listing("flights/100%", lambda: ["flights/100%/eu", "flights/other"])
        assert (len(mine.fragments), set(mine.others), set(mine.unmarked)) == (1, {"eu"}, {"eu", ""})
        assert len(await listed(store, "flights/100%")) == 3, "without names of other journals, and without markers"
        for _ in range(2):
            await store.mark("flights/100%/eu")
        assert [found.path_postfix for found in await listed(store, "flights/100%")] == ["a=1"]
        theirs = await store.listing("flights/100%/eu")
        assert len(theirs.fragments) == 2
        assert not theirs.others | theirs.unmarked
        assert theirs.unreadable == ()

    async def test_a_listing_of_several_pages(self, store: FragmentStore) -> None:
        """The S3 server lists 100 keys per page."""
        fragments = [fragment_of(b"x", Codec.NONE, begin=begin) for begin in range(250)]
        await asyncio.gather(*(put(store, fragment, b"x") for fragment in fragments))
        assert [
            replace(found, backing_store="", mod_time=0) for found in await listed(store, "flights/events")
        ] == fragments

    async def test_equal_names_are_replaced(self, store: FragmentStore) -> None:
        fragment = fragment_of(CONTENT)
        await store.put(fragment, b"not its content")
        await put(store, fragment)
        assert await store.read(fragment) == CONTENT
        assert len(await listed(store, fragment.journal)) == 1

    @pytest.mark.parametrize("piece_bytes", [10, 6 << 20])
    async def test_content_may_arrive_in_pieces(self, store: FragmentStore, piece_bytes: int) -> None:
        content = CONTENT if piece_bytes == 10 else CONTENT * 400
        fragment = fragment_of(content, Codec.GZIP if piece_bytes == 10 else Codec.NONE)
        data = compress(fragment.codec, content)

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(data), piece_bytes):
                yield data[start : start + piece_bytes]

        await store.put(fragment, pieces())
        assert await store.read(fragment) == content
        assert len(await listed(store, fragment.journal)) == 1

    async def test_a_put_that_fails_leaves_nothing(self, store: FragmentStore) -> None:
        fragment = fragment_of(CONTENT)

        async def broken() -> AsyncIterator[bytes]:
            yield b"half of it"
            raise RuntimeError("the disk went away")

        with pytest.raises(RuntimeError, match="went away"):
            await store.put(fragment, broken())
        assert not await store.exists(fragment)
        assert await listed(store, fragment.journal) == []

    async def test_a_put_that_is_cancelled_leaves_nothing(self, store: FragmentStore) -> None:
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
        assert not await store.exists(fragment)
        assert await listed(store, fragment.journal) == []

    async def test_no_reader_sees_part_of_a_fragment(self, store: FragmentStore) -> None:
        """While a fragment is put repeatedly, reads find no fragment or all of it."""
        fragment = fragment_of(CONTENT)
        data = compress(fragment.codec, CONTENT)

        async def slowly() -> AsyncIterator[bytes]:
            for start in range(0, len(data), 50):
                yield data[start : start + 50]
                await asyncio.sleep(0)

        async def write() -> None:
            for _ in range(5):
                await store.put(fragment, slowly())

        writing = asyncio.create_task(write())
        reads = 0
        while not writing.done():
            try:
                assert await store.read(fragment) == CONTENT
                reads += 1
            except FragmentNotFound:
                assert reads == 0
            await asyncio.sleep(0)
        await writing
        assert await store.read(fragment) == CONTENT

    async def test_notes_are_kept_apart_from_fragments(self, store: FragmentStore) -> None:
        with pytest.raises(FragmentNotFound):
            await store.get_note(".notes/one")
        await store.remove_note(".notes/one")
        await store.put_note(".notes/one", b"first")
        await store.put_note(".notes/one", b"second")
        await store.put_note(".notes/two", b"")
        assert await store.get_note(".notes/one") == b"second"
        assert sorted([file.path async for file in store.files(".notes")]) == ["one", "two"]
        await store.remove_note(".notes/one")
        assert [file.path async for file in store.files(".notes")] == ["two"]

    async def test_a_missing_fragment(self, store: FragmentStore) -> None:
        fragment = fragment_of(CONTENT)
        for call in (store.get, store.read):
            with pytest.raises(FragmentNotFound) as caught:
                await call(fragment)
            assert fragment.content_path in str(caught.value)
            assert not caught.value.retriable

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda content: content[:-1] + b"!", "has the SHA-1"),
            (lambda content: content[:-1], "bytes where its name says"),
            (lambda content: content + b"x", "bytes expected"),
            (lambda content: b"", "bytes"),
        ],
    )
    async def test_damage_is_found_on_reading(
        self, store: FragmentStore, file_root: Path, damage: Callable[[bytes], bytes], problem: str
    ) -> None:
        fragment = fragment_of(CONTENT)
        await store.put(fragment, compress(fragment.codec, damage(CONTENT)))
        with pytest.raises(CorruptFragment, match=problem) as caught:
            await store.read(fragment)
        assert fragment.content_path in str(caught.value)
        assert store.url in str(caught.value)
        with pytest.raises(CorruptFragment):
            await read_directly(fragment, store.sign(fragment, 60), 0, 10, file_root)
