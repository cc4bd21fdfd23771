"""The examples of docs/streams.md on streams and on transactions over several keys, run as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from coranto.streams.control.lifecycle import Streams, default_template
from coranto.testing.cluster import STORE_URL, Cluster

PAGE = Path(__file__).parents[3] / "docs" / "streams.md"


def example(name: str) -> dict[str, Any]:
    """Return the definitions of the block that defines `name`."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if f"async def {name}(" in block]
    found: dict[str, Any] = {"Cluster": Cluster}
    exec(compile(block, name, "exec", dont_inherit=True, flags=0), found)
    return found


async def test_the_life_of_a_stream() -> None:
    await example("orders")["orders"]()


async def test_a_transaction_on_two_keys() -> None:
    async with Cluster(brokers=1) as cluster:
        streams = Streams(cluster.client())
        await streams.create("shop/orders", 2, template=default_template(stores=[STORE_URL]))
        await example("transfer")["transfer"](cluster)
        heads = await streams.heads(await streams.describe("shop/orders"))
        assert all(heads.values()), "each of the two keys is in another segment"


async def test_an_event_and_a_transaction_on_one_key() -> None:
    async with Cluster(brokers=1) as cluster:
        streams = Streams(cluster.client())
        await streams.create("shop/orders", 2, template=default_template(stores=[STORE_URL]))
        await example("place_order")["place_order"](cluster)
