"""Content that a client requests by its offsets and SHA-1."""

from __future__ import annotations

from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.testing.cluster import Cluster


async def test_content_is_returned_only_with_its_sum() -> None:
    async with Cluster(brokers=1) as cluster:
        await cluster.create("a/journal")
        client = cluster.client()
        await client.append("a/journal", b"abcdef")

        async def kept(content: bytes, begin: int, journal: str = "a/journal") -> bytes | None:
            wanted = Fragment(journal, begin, begin + len(content), sum_of(content), Codec.NONE)
            found = await client.kept_content(wanted)
            assert found is None or "/" in found.broker
            return found.content if found is not None else None

        assert await kept(b"cde", 2) == b"cde"
        assert await kept(b"abcdef", 0) == b"abcdef"
        assert await kept(b"abcdeX", 0) is None
        assert await kept(b"abcdefg", 0) is None, "the journal has fewer bytes"
        assert await kept(b"abc", 100) is None
        assert await kept(b"abc", 0, "no/such/journal") is None
