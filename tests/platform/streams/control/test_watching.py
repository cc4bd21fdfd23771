"""Watching the metadata of a stream: the newest state reported by any broker."""

from __future__ import annotations

import asyncio

import pytest

from coranto.client import JournalClient
from coranto.effects import SystemClock
from coranto.errors import InvalidInput, StreamNotFound
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Split
from coranto.streams.control.watching import StreamWatch, beginning
from coranto.testing.cluster import STORE_URL


async def test_a_watch_reports_changes_until_the_stream_is_deleted(streams: Streams, client: JournalClient) -> None:
    changed = asyncio.Event()
    watch = StreamWatch(client, "watched", SystemClock(), changed.set)
    with pytest.raises(InvalidInput, match="refresh"):
        _ = watch.stream
    with pytest.raises(StreamNotFound):
        await watch.refresh()
    await streams.create("watched", template=default_template(stores=[STORE_URL]))
    assert len((await watch.refresh()).active()) == 1
    assert changed.is_set()
    watch.follow()
    watch.follow()
    changed.clear()
    scaled = await streams.scale("watched", [Split(0, 2)])
    async with asyncio.timeout(60):
        while len(watch.stream.active()) != 2:
            await changed.wait()
            changed.clear()
    assert (await watch.refresh(scaled.revision)).revision >= scaled.revision
    watch.check()
    assert dict(await beginning(client, "watched")) == {0: 0}
    await streams.seal("watched")
    await streams.delete("watched")
    async with asyncio.timeout(60):
        while True:
            try:
                watch.check()
            except StreamNotFound:
                break
            await changed.wait()
            changed.clear()
    await watch.close()
