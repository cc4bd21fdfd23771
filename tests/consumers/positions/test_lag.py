"""The lag of a consumer: counted, estimated or unknown."""

from __future__ import annotations

from dataclasses import replace

from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.offsets import JournalOffset
from coranto.testing import Cluster
from coranto_consumers.positions.lag import lag_of

LINE = b'{"n":1}\n'


async def test_lag_is_counted_estimated_or_unknown() -> None:
    async with Cluster(brokers=1, lease_seconds=60) as cluster:
        for name in ("in/few", "in/many", "in/new", "in/other"):
            await cluster.create(name, labels={CONTENT_TYPE: JSON_LINES})
        client = cluster.client()
        for name, count in (("in/few", 3), ("in/many", 100_000), ("in/new", 2), ("in/other", 1)):
            await client.append(name, LINE * count)
        offsets = {
            "in/few": len(LINE),
            "in/many": 0,
            "in/other": JournalOffset(4, "another-1f"),
            "in/gone": 7,
        }
        few, gone, many, new, other = await lag_of(client, offsets, "name:prefix=in/")
        assert (few.behind, few.messages, few.is_estimate, few.seconds) == (2 * len(LINE), 2, False, None)
        assert gone.problem == "there is no such journal"
        assert (many.behind, many.is_estimate) == (100_000 * len(LINE), True)
        assert many.messages == 100_000
        assert (new.position, new.messages) == (None, 2)
        assert other.behind is None
        assert "deleted and created again" in other.problem
        assert replace(few, seconds=2.0).written_per_second == len(LINE)
        (beyond,) = await lag_of(client, {"in/new": 17})
        assert beyond.problem == "it ends before the position"
