"""The examples of docs/streams.md on reading, run as they are."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from coranto.errors import ReaderOffline
from coranto.messages.framing import JsonObject
from coranto.streams import ReaderGroup, Streams, default_template
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.testing.cluster import STORE_URL, Cluster

PAGE = Path(__file__).parents[3] / "docs" / "streams.md"


def example(*names: str) -> dict[str, Any]:
    """Return the definitions of the blocks that define these functions."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {"Cluster": Cluster, "ReaderGroup": ReaderGroup}
    for name in names:
        (block,) = [block for block in blocks if f"async def {name}(" in block]
        exec(compile(block, name, "exec", dont_inherit=True, flags=0), found)
    return found


async def stream(cluster: Cluster, *, sealed: bool) -> None:
    """A stream with the orders 0 to 19."""
    streams = Streams(cluster.client())
    await streams.create("shop/orders", 2, template=default_template(stores=[STORE_URL]))
    async with StreamWriter[JsonObject](cluster.client(), "shop/orders") as writer:
        for n in range(20):
            writer.write_event(f"customer-{n}", {"order": n})
    if sealed:
        await streams.seal("shop/orders")


async def test_reading_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    async with Cluster(brokers=1) as cluster:
        await stream(cluster, sealed=False)
        await example("read_orders")["read_orders"](cluster)
    assert capsys.readouterr().out.count("'order'") == 20


async def test_reader_groups() -> None:
    examples = example("bill", "bill_in_batches", "bill_to_checkpoints", "retain")
    async with Cluster(brokers=1) as cluster:
        await stream(cluster, sealed=True)
        assert sum(await asyncio.gather(*(examples["bill"](cluster, name) for name in ("one", "other")))) == sum(
            range(20)
        )

        group = ReaderGroup(cluster.client(), "shop/orders", "batches")
        await group.create()
        batches: list[list[int]] = []
        await examples["bill_in_batches"](group, batches)
        assert sorted(order for batch in batches for order in batch) == list(range(20))

        await group.begin_checkpoint("end")
        await examples["retain"](cluster, [group])
        found = await Streams(cluster.client()).describe("shop/orders")
        assert all(each.begin == each.sealed_at for each in found.segments.values())


async def test_reading_again_from_earlier() -> None:
    examples = example("bill_to_checkpoints")
    async with Cluster(brokers=1) as cluster:
        await stream(cluster, sealed=False)
        group = ReaderGroup(cluster.client(), "shop/orders", "checkpoints")
        await group.create()
        kept: dict[str, int] = {}
        reading = asyncio.ensure_future(examples["bill_to_checkpoints"](group, "one", kept))
        async with asyncio.timeout(60):
            while True:
                if (await group.state()).owners:
                    break
            await examples["go_back"](group)
            with pytest.raises(ReaderOffline):
                await reading
        checkpoint = await group.checkpoint("noon")
        assert checkpoint is not None
        assert kept.keys() == {"noon"}
