"""The RPC Note: texts that change only if their version is the expected one, within limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coranto.client.notes import Note
from coranto.errors import EtcdTransactionFailed, RpcFailed
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire.heads_pb2 import NoteRequest
from coranto_broker.handlers import notes


def request(content: bytes | None = None, expect_version: int = 0, **fields: Any) -> NoteRequest:
    given: dict[str, Any] = {"fragment_store": STORE_URL, "name": "records", **fields}
    if content is not None:
        given.update(write=True, content=content, expect_version=expect_version)
    return NoteRequest(**given)


def test_a_note_changes_only_from_the_expected_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MAX_NOTES", 3)

    async def main() -> None:
        async with Cluster(brokers=2) as cluster:
            client = cluster.client()
            assert await client.note(request()) == Note()
            assert await client.note(request(b"one")) == Note(b"one", 1)
            assert await client.note(request(b"two", 1)) == Note(b"two", 2)
            assert await client.note(request(b"two", 1)) == Note(b"two", 2), "a repeated write finds itself"
            for version in (0, 1, 3):
                with pytest.raises(EtcdTransactionFailed):
                    await client.note(request(b"other", version))
            assert await client.note(request()) == Note(b"two", 2)
            # Many concurrent writers, through both brokers: one wins each version.
            writers = (cluster.client(name=f"writer-{number}") for number in range(6))
            writes = (client.note(request(b"%d" % at, 2)) for at, client in enumerate(writers))
            results = await asyncio.gather(*writes, return_exceptions=True)
            assert sum(isinstance(each, Note) for each in results) == 1
            # Notes of other names and stores are independent.
            assert await client.note(request(b"one", name="others")) == Note(b"one", 1)
            assert await client.note(request(b"one", fragment_store="file:///other/")) == Note(b"one", 1)
            for bad in (
                request(b"one", name="a fourth"),
                request(b"x" * (notes.MAX_NOTE_BYTES + 1), 3),
                request(name=""),
                request(name="x" * 1025),
                request(b"one", -1),
                request(fragment_store="nowhere"),
            ):
                with pytest.raises(RpcFailed):
                    await client.note(bad)

    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(main())
        assert isinstance(loop, SimLoop)
        assert not loop.problems
