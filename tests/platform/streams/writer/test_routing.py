"""Writers that outlive many segments."""

from __future__ import annotations

from typing import Any

from coranto.client import JournalClient
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Merge, Split
from coranto.streams.writer.multi_key.writer import MultiKeyWriter
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.testing.cluster import STORE_URL


async def test_writers_keep_no_state_of_removed_segments(streams: Streams, client: JournalClient) -> None:
    stream = await streams.create("orders", 1, template=default_template(stores=[STORE_URL]))
    writer, multi = StreamWriter[Any](client, "orders"), MultiKeyWriter[Any](client, "orders")
    async with writer, multi:

        async def write() -> None:
            async with multi.transaction() as transaction:
                for key in ("a", "customer-1", ""):
                    transaction.write(key, {})
                    await writer.write_event(key, {})

        await write()
        for _ in range(3):
            stream = await streams.scale("orders", [Split(stream.active()[0].number)])
            await write()
            low, high = stream.active()
            stream = await streams.scale("orders", [Merge((low.number, high.number))])
            await write()
            stream = await streams.truncate("orders", {stream.active()[0].number: 0})
        last = low.number, high.number, stream.active()[0].number
        assert list(stream.segments) == [last[-1]]
        assert writer._shared is not None
        assert writer._routing is not None
        assert set(writer._shared.ends) <= {*range(low.number - 1, last[-1] + 1)}
        assert set(writer._routing._sealed) <= {*range(low.number - 1, last[-1] + 1)}
        assert len(multi._held) <= 4
        assert len(multi._batches) <= 4
